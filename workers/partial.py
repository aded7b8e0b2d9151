"""Bytes of a sample that is not finished: the prefix that another worker goes on from."""

from array import array
from itertools import groupby
from typing import Any

from penstock.errors import PayloadError, ProtocolError
from penstock.messages import Job, Sample, pack, unpack

_FORMAT = 1
#: Fields that travel as they are.
_PLAIN = (
    "prompt_length",
    "finish_reason",
    "turns",
    "num_turns",
    "num_aborts",
    "cached_tokens",
    "started_s",
    "generate_s",
)


def partial_to_bytes(sample: Sample) -> bytes:
    """The tokens of ``sample`` with their logprobs (float32), masks and version spans, as msgpack."""
    return pack(
        {
            "format": _FORMAT,
            "sample": sample.id,
            "tokens": array("i", sample.tokens).tobytes(),
            "logprobs": array("f", sample.logprobs).tobytes(),
            "generated": bytes(sample.generated),
            "loss_mask": bytes(sample.loss_mask),
            "versions": [[version, len(list(run))] for version, run in groupby(sample.versions)],
            **{name: getattr(sample, name) for name in _PLAIN},
        }
    )


def partial_from_bytes(data: bytes, job: Job, k: int) -> Sample:
    """The sample of :func:`partial_to_bytes`, to hand to ``generate_sample(partial=...)``.

    Raises:
        PayloadError: these are not the bytes of this sample's partial; names the sample.
    """
    sample = Sample(job, k)
    what = f"the partial of sample {sample.id}"
    try:
        record: dict[str, Any] = unpack(data, what)
        if record["format"] != _FORMAT or record["sample"] != sample.id:
            raise ValueError(f"it is one of {record['sample']!r} in format {record['format']!r}")
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(record["tokens"])
        logprobs.frombytes(record["logprobs"])
        sample.tokens, sample.logprobs = tokens.tolist(), logprobs.tolist()
        sample.generated, sample.loss_mask = list(record["generated"]), list(record["loss_mask"])
        length = len(sample.tokens)
        if sum(count for _, count in record["versions"]) != length:
            raise ValueError("its version spans do not cover its tokens")
        sample.versions = [version for version, count in record["versions"] for _ in range(count)]
        if not len(sample.logprobs) == len(sample.generated) == len(sample.loss_mask) == length:
            raise ValueError("its arrays differ in length")
        if not 0 < record["prompt_length"] <= length:
            raise ValueError("its prompt is longer than all of it")
        for name in _PLAIN:
            setattr(sample, name, record[name])
        sample.text = "".join(sample.turns)
    except (ProtocolError, ValueError, TypeError, KeyError) as exc:
        raise PayloadError(f"{what} cannot be read ({exc}): drop it, the sample then starts from its prompt.") from exc
    sample.status = "aborted"
    return sample
