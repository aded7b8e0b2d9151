"""Encode an unfinished sample: the prefix that another worker continues.

One complete record, then any number of records with the tokens generated since; each is msgpack. So a growing prefix is
written by appending. The first record has the temperature and the kind of logprobs: the record of a sample has one of
each for all its tokens (T6), so a worker that samples differently cannot continue it.
"""

from array import array
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple, get_args

from penstock.config.sampling import is_temperature
from penstock.errors import PayloadError, ProtocolError
from penstock.protocol.records.codec import pack, unpack_each
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import LogprobKind, Sample, SampleStatus
from penstock.text import format_exc, safe_repr

_FORMAT = 4
#: Longest prefix in bytes, about three million tokens. A longer one is not kept.
MAX_PARTIAL_BYTES = 32 * 1024 * 1024
KINDS = get_args(LogprobKind)
#: Fields stored unchanged.
_PLAIN: dict[str, tuple[type, ...]] = {
    "prompt_length": (int,),
    "finish_reason": (str,),
    "turns": (list,),
    "num_turns": (int,),
    "num_aborts": (int,),
    "cached_tokens": (int,),
    "num_unproven": (int,),
    "started_s": (float, int),
    "first_token_s": (float, int),
    "generate_s": (float, int),
}


class Scale(NamedTuple):
    """The scale of a sample's logprobs: sampling temperature, and whether logprobs are computed after it."""

    temperature: float = 1.0
    #: ``scaled``, or ``original``.
    kind: str = "scaled"

    def __str__(self) -> str:
        return f"temperature {self.temperature:g} ({self.kind} logprobs)"


#: The default scale.
AT_ONE = Scale()


class DrawnOtherwise(PayloadError):
    """A prefix cannot be continued: it was sampled at another temperature, or has another kind of logprobs."""


def partial_to_bytes(sample: Sample, scale: Scale = AT_ONE) -> bytes:
    """Encode the tokens of ``sample`` with their logprobs (float32), masks and version spans, as msgpack.

    Args:
        scale: of its logprobs.

    Raises:
            PayloadError: its fields do not fit such arrays.
    """
    return _packed(
        sample,
        lambda: {
            "format": _FORMAT,
            "sample": sample.id,
            "temperature": scale.temperature,
            "logprob_kind": scale.kind,
            "tokens": array("i", sample.tokens).tobytes(),
            "logprobs": array("f", sample.logprobs).tobytes(),
            "generated": bytes(sample.generated),
            "loss_mask": bytes(sample.loss_mask),
            "versions": _spans(sample.versions),
            **{name: getattr(sample, name) for name in _PLAIN},
        },
    )


def growth_to_bytes(sample: Sample, start: int) -> bytes:
    """Encode the tokens of ``sample`` from ``start`` on, all generated, to append to a prefix of ``start`` tokens.

    Raises:
            PayloadError: its fields do not fit such arrays.
    """
    return _packed(
        sample,
        lambda: {
            "at": start,
            "tokens": array("i", sample.tokens[start:]).tobytes(),
            "logprobs": array("f", sample.logprobs[start:]).tobytes(),
            "versions": _spans(sample.versions[start:]),
            "num_unproven": sample.num_unproven,
        },
    )


def _packed(sample: Sample, record: Callable[[], dict[str, Any]]) -> bytes:
    """Pack a record; raise PayloadError if user code put values into the sample that cannot be stored."""
    try:
        return pack(record())
    except (TypeError, ValueError, OverflowError) as exc:
        raise PayloadError(f"sample {sample.id} cannot be kept: {format_exc(exc)}.") from exc


def _spans(versions: list[int]) -> list[list[int]]:
    return [[version, len(list(run))] for version, run in groupby(versions)]


def partial_from_bytes(data: bytes, job: Job, k: int, scale: Scale = AT_ONE) -> Sample:
    """Decode the sample of :func:`partial_to_bytes`, to pass to ``generate_sample(partial=...)``.

    Args:
        scale: at which it would be continued.

    Raises:
        DrawnOtherwise: it has another scale.
        PayloadError: these are not the bytes of a partial of this sample; names the sample.
    """
    sample = Sample(job, k)
    what = f"the partial of sample {sample.id}"
    try:
        first, *growths = _records(data, what)
        found = _read_whole(first, sample)
        for growth in growths:
            _read_growth(growth, sample)
    except (ProtocolError, ValueError, TypeError, KeyError) as exc:
        raise PayloadError(f"{what} cannot be read ({exc}): drop it, the sample then starts from its prompt.") from exc
    if found != scale:
        raise DrawnOtherwise(
            f"{what} was sampled at {found}, and this worker samples at {scale}: give all workers of the run the same "
            "rollout.sampling and engine.logprob_kind."
        )
    sample.status = SampleStatus.ABORTED
    return sample


def _records(data: bytes, what: str) -> list[dict[str, Any]]:
    if len(data) > MAX_PARTIAL_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than {MAX_PARTIAL_BYTES}")
    found = list(unpack_each(data, what, MAX_PARTIAL_BYTES))
    if not set(map(type, found)) <= {dict}:
        raise ValueError("it holds something that is not a record")
    return found


def _read_whole(record: dict[str, Any], sample: Sample) -> Scale:
    if record["format"] != _FORMAT or record["sample"] != sample.id:
        raise ValueError(f"it is one of {record['sample']!r} in format {record['format']!r}")
    sample.tokens, sample.logprobs, sample.versions = _arrays(record)
    if not isinstance(record["generated"], bytes) or not isinstance(record["loss_mask"], bytes):
        raise ValueError("its masks are not bytes")
    sample.generated, sample.loss_mask = list(record["generated"]), list(record["loss_mask"])
    length = len(sample.tokens)
    if not len(sample.generated) == len(sample.loss_mask) == length:
        raise ValueError("its arrays differ in length")
    if not 0 < record["prompt_length"] <= length:
        raise ValueError("its prompt is longer than all of it")
    for name, kinds in _PLAIN.items():
        if type(record[name]) not in kinds:
            raise ValueError(f"its {name} is {safe_repr(record[name])}")
        setattr(sample, name, record[name])
    if not set(map(type, sample.turns)) <= {str}:
        raise ValueError("its turns are not texts")
    _read_unproven(record, sample)
    sample.text = "".join(sample.turns)
    temperature, kind = record["temperature"], record["logprob_kind"]
    if not is_temperature(temperature) or kind not in KINDS:
        raise ValueError(f"it has temperature {safe_repr(temperature)} and logprobs of kind {safe_repr(kind)}")
    return Scale(float(temperature), kind)


def _read_growth(record: dict[str, Any], sample: Sample) -> None:
    if record["at"] != len(sample.tokens):
        raise ValueError(f"it continues at token {record['at']!r} of {len(sample.tokens)}")
    tokens, logprobs, versions = _arrays(record)
    if min(versions, default=0) < 0:
        raise ValueError("it has generated tokens without a version")
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        sample.append(tokens[start:end], version=version, logprobs=logprobs[start:end])
        start = end
    _read_unproven(record, sample)


def _read_unproven(record: dict[str, Any], sample: Sample) -> None:
    unproven = record["num_unproven"]
    if type(unproven) is not int or not 0 <= unproven <= sum(sample.generated):
        raise ValueError(f"its num_unproven is {safe_repr(unproven)}")
    sample.num_unproven = unproven


def _arrays(record: dict[str, Any]) -> tuple[list[int], list[float], list[int]]:
    """Return tokens, logprobs and versions of a record, all [T]."""
    tokens, logprobs = array("i"), array("f")
    tokens.frombytes(record["tokens"])
    logprobs.frombytes(record["logprobs"])
    length = len(tokens)
    if len(logprobs) != length:
        raise ValueError("its arrays differ in length")
    spans = record["versions"]
    if not all(type(version) is int and type(count) is int and count > 0 for version, count in spans):
        raise ValueError("its version spans are not pairs of a version and a length")
    if sum(count for _, count in spans) != length:
        raise ValueError("its version spans do not cover its tokens")
    return tokens.tolist(), logprobs.tolist(), [v for v, count in spans for _ in range(count)]
