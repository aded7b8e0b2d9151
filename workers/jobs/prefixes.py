"""Checkpoint the tokens of running samples in Redis, so that a crash loses only the latest ones.

    generated ─> due? ─> first time, or stored tokens differ: write the complete prefix (checkpoint)
                    └─> else: append the new tokens (extend)

A checkpoint writes only the bytes of new tokens. It never blocks generation: one is written at a time, and tokens that
arrive meanwhile go into the next. Later turns are kept if the environment can be restored (``episodes``): each turn is
then written before the environment acts on it, and each observation before the next turn. Prefixes are not kept if the
routing of a mixture-of-experts model is recorded.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, get_args

from penstock.config.sampling import is_temperature
from penstock.errors import LeaseLost, PayloadError, PenstockError, ProtocolError, QueueFull
from penstock.protocol import scripts
from penstock.records.codec import pack, unpack_each
from penstock.records.job import Job
from penstock.records.sample import Drawn, LogprobKind, Sample, SampleStatus
from penstock.redis.commands import AsyncClient
from penstock.redis.control import raise_passing
from penstock.text import format_exc, safe_repr
from penstock.workers.jobs.episodes import unpacked_state
from penstock.workers.services import Services

log = logging.getLogger(__name__)

# Format of a prefix, from which another worker continues a sample.
#
# One complete msgpack record, then any number of records with later tokens, so that a prefix grows by appending. The
# first record has the temperature and the kind of logprobs: a sample has one of each for all its tokens (T6), so a
# worker with other sampling settings cannot continue it.

_FORMAT = 6
#: Longest prefix in bytes, about three million tokens; longer prefixes are not kept.
MAX_PARTIAL_BYTES = 32 * 1024 * 1024
KINDS = get_args(LogprobKind)
#: Fields that every record stores unchanged.
_PLAIN: dict[str, tuple[type, ...]] = {
    "finish_reason": (str,),
    "num_turns": (int,),
    "num_aborts": (int,),
    "cached_tokens": (int,),
    "num_unproven": (int,),
    "started_s": (float, int),
    "first_token_s": (float, int),
    "generate_s": (float, int),
}


class Scale(NamedTuple):
    """Describe the scale of a sample's logprobs: temperature, and whether it is applied to them."""

    temperature: float = 1.0
    #: ``scaled``, or ``original``.
    kind: str = "scaled"

    def __str__(self) -> str:
        return f"temperature {self.temperature:g} ({self.kind} logprobs)"


#: The default scale.
AT_ONE = Scale()


class SamplingMismatch(PayloadError):
    """Report a prefix that was sampled at another temperature, or has another kind of logprobs."""


def partial_to_bytes(sample: Sample, scale: Scale = AT_ONE) -> bytes:
    """Encode the tokens of ``sample`` with their logprobs (float32), masks and version spans, as msgpack.

    Args:
        scale: scale of the logprobs.

    Raises:
            PayloadError: the fields of the sample do not fit these arrays.
    """
    return _packed(
        sample,
        lambda: {
            "format": _FORMAT,
            "sample": sample.id,
            "temperature": scale.temperature,
            "logprob_kind": scale.kind,
            "generated": bytes(sample.generated),
            "loss_mask": bytes(sample.loss_mask),
            "prompt_length": sample.prompt_length,
            **_common(sample, 0, 0),
        },
    )


def growth_to_bytes(sample: Sample, start: int, turns: int, state: bytes | None = None) -> bytes:
    """Encode the tokens of ``sample`` from ``start`` on, to append to a prefix of ``start`` tokens and ``turns`` texts.

    Args:
        state: environment state of the prefix; a different state is written again.

    The record has no masks: every generated token is trained on.

    Raises:
            PayloadError: the fields of the sample do not fit these arrays.
    """
    has_state = state is not None and state == _state(sample)
    return _packed(sample, lambda: {"at": start, **_common(sample, start, turns, has_state=has_state)})


def _state(sample: Sample) -> bytes | None:
    """Return the environment state to store; None with side arrays, which it cannot restore."""
    return None if sample.sides else sample.state


def _common(sample: Sample, start: int, turns: int, *, has_state: bool = False) -> dict[str, Any]:
    """Return the fields of every record: new tokens, the starts of all parts, and a changed environment state."""
    state = _state(sample)
    return {
        "tokens": array("i", sample.tokens[start:]).tobytes(),
        "logprobs": array("f", sample.logprobs[start:]).tobytes(),
        "versions": _spans(sample.versions[start:]),
        "parts": sample.parts,
        "turns": sample.turns[turns:],
        "is_over": sample.is_over and state is not None,
        **({} if has_state else {"state": state}),
        **{name: getattr(sample, name) for name in _PLAIN},
    }


def _packed(sample: Sample, record: Callable[[], dict[str, Any]]) -> bytes:
    """Pack a record; raise PayloadError if user code put values into the sample that cannot be stored."""
    try:
        return pack(record())
    except (TypeError, ValueError, OverflowError) as exc:
        raise PayloadError(f"sample {sample.id} cannot be stored: {format_exc(exc)}.") from exc


def _spans(versions: list[int]) -> list[list[int]]:
    return [[version, len(list(run))] for version, run in groupby(versions)]


def partial_from_bytes(data: bytes, job: Job, k: int, scale: Scale = AT_ONE) -> Sample:
    """Decode a sample that :func:`partial_to_bytes` encoded, to continue it with ``generate_sample``.

    Args:
        scale: scale of this worker's logprobs.

    Raises:
        SamplingMismatch: the prefix has another scale.
        PayloadError: the bytes are not a prefix of this sample.
    """
    sample = Sample(job, k)
    what = f"the prefix of sample {sample.id}"
    try:
        first, *growths = _records(data, what)
        found = _read_first(first, sample)
        for growth in growths:
            _read_growth(growth, sample)
    except (ProtocolError, ValueError, TypeError, KeyError) as exc:
        raise PayloadError(f"{what} cannot be read ({exc}): delete it to restart the sample from its prompt.") from exc
    if found != scale:
        raise SamplingMismatch(
            f"{what} was sampled at {found}, but this worker samples at {scale}: use the same rollout.sampling and "
            "engine.logprob_kind for all workers of the run."
        )
    sample.status = SampleStatus.ABORTED
    return sample


def _records(data: bytes, what: str) -> list[dict[str, Any]]:
    if len(data) > MAX_PARTIAL_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than {MAX_PARTIAL_BYTES}")
    found = list(unpack_each(data, what, MAX_PARTIAL_BYTES))
    if not set(map(type, found)) <= {dict}:
        raise ValueError("it contains an object that is not a record")
    return found


def _read_first(record: dict[str, Any], sample: Sample) -> Scale:
    if record["format"] != _FORMAT or record["sample"] != sample.id:
        raise ValueError(f"it belongs to {record['sample']!r} and has format {record['format']!r}")
    sample.tokens, sample.logprobs, sample.versions = _arrays(record)
    if not isinstance(record["generated"], bytes) or not isinstance(record["loss_mask"], bytes):
        raise ValueError("its masks are not bytes")
    sample.generated, sample.loss_mask = list(record["generated"]), list(record["loss_mask"])
    length = len(sample.tokens)
    if not len(sample.generated) == len(sample.loss_mask) == length:
        raise ValueError("its arrays differ in length")
    if type(record["prompt_length"]) is not int or not 0 < record["prompt_length"] <= length:
        raise ValueError("its prompt is longer than its tokens")
    sample.prompt_length = record["prompt_length"]
    _read_common(record, sample)
    temperature, kind = record["temperature"], record["logprob_kind"]
    if not is_temperature(temperature) or kind not in KINDS:
        raise ValueError(f"it has temperature {safe_repr(temperature)} and logprobs of kind {safe_repr(kind)}")
    return Scale(float(temperature), kind)


def _read_growth(record: dict[str, Any], sample: Sample) -> None:
    if record["at"] != len(sample.tokens):
        raise ValueError(f"it continues at token {record['at']!r} of {len(sample.tokens)}")
    tokens, logprobs, versions = _arrays(record)
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        # Tokens without a version belong to an observation.
        given = None if version < 0 else logprobs[start:end]
        sample.append(tokens[start:end], version=version, logprobs=given)
        start = end
    _read_common(record, sample)


def _read_common(record: dict[str, Any], sample: Sample) -> None:
    for name, kinds in _PLAIN.items():
        if type(record[name]) not in kinds:
            raise ValueError(f"its {name} is {safe_repr(record[name])}")
        setattr(sample, name, record[name])
    before, sample.parts = sample.parts, record["parts"]
    if not sample.has_valid_parts() or sample.parts[: len(before)] != before:
        raise ValueError(f"its parts are {safe_repr(sample.parts)}")
    if not 0 <= sample.num_unproven <= sum(sample.generated):
        raise ValueError(f"its num_unproven is {sample.num_unproven}")
    if type(record["turns"]) is not list or not set(map(type, record["turns"])) <= {str}:
        raise ValueError("its turns are not texts")
    sample.turns += record["turns"]
    sample.text = "".join(sample.turns)
    state, sample.is_over = record.get("state", sample.state), record["is_over"]
    if type(sample.is_over) is not bool or not isinstance(state, bytes | None) or (sample.is_over and state is None):
        raise ValueError("its is_over or state is invalid")
    sample.state = state
    if state is not None:
        unpacked_state(state)


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


#: Seconds between attempts to store a turn while Redis has no room.
FULL_WAIT_S = 0.5
#: Time to live of prefixes, in seconds.
PARTIAL_TTL_S = 7 * 86400


class _Stored(NamedTuple):
    """Describe the prefix stored in Redis: versions and masks of its tokens, number of turns, environment state."""

    versions: list[int]
    masks: list[int]
    num_turns: int
    state: bytes | None


class Prefix:
    """Write checkpoints of one sample to Redis under one lease.

    Args:
        token: token of the lease; after a lost lease, writes stop (I3).
        temperature: sampling temperature of the sample.
    """

    def __init__(self, services: Services, token: str, sample: Sample, temperature: float) -> None:
        config = services.config.worker
        self._services = services
        self._token = token
        self._sample = sample
        self._temperature = temperature
        self._every_tokens = config.checkpoint_tokens
        #: Tokens discarded under this lease.
        self.account = Drawn()
        #: Whether turns after the first are kept.
        self.keeps_turns = False
        #: Length of the stored prefix in bytes, and its contents.
        self._num_bytes = 0
        self._stored = _Stored([], [], 0, None)
        #: Whether the lease is lost, and whether the sample is too large to be stored.
        self._is_lost = self._is_full = False
        #: False if routing is recorded: prefixes do not store it, and another forward pass would change it (T17).
        self._is_kept = not services.engine.returns_routing
        self._ended = not self._is_kept
        self._task: asyncio.Task[None] | None = None

    def usage(self, *, at_end: bool = False) -> Drawn:
        """Return the current token usage of the sample (I10); a given answer has no generated tokens.

        Args:
            at_end: the lease ends, so requests in flight get no answer.
        """
        given = self._sample.status == SampleStatus.GIVEN
        live = 0 if given else sum(self._sample.generated)
        return replace(self.account, live=live, unheard=self.account.unheard if at_end else 0)

    def keep_if_due(self) -> None:
        """Start a checkpoint if one is due. Does not block."""
        if self._ended or (self._task is not None and not self._task.done()):
            return
        if self._sample.num_turns > 1 and not self.keeps_turns:
            return
        if self._is_due():
            self._task = asyncio.create_task(self._keep(), name=f"prefix {self._sample.id}")

    def _is_due(self) -> bool:
        new = len(self._sample.tokens) - (len(self._stored.versions) or self._sample.prompt_length)
        if new <= 0:
            return False
        return self._every_tokens is not None and new >= self._every_tokens

    async def settle(self) -> None:
        """Wait for the checkpoint in flight, and start no more.

        Raises:
            Exception: error of that checkpoint, except a full Redis.
        """
        self._ended = True
        await self.written()

    async def written(self) -> None:
        """Wait for the checkpoint in flight; raises like ``settle``."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def keep_now(self) -> None:
        """Write all new tokens and the environment state before the next turn or step depends on them.

        Blocks for a round trip, and while Redis has no room.

        Raises:
            LeaseLost: another worker may have leased the job.
            PayloadError: the sample is too large to be stored.
        """
        if not self._is_kept:
            return
        await self.written()
        is_waiting = False
        while not self._is_lost:
            try:
                self._is_lost = not await self._write()
            except QueueFull as exc:
                if not is_waiting:
                    log.warning("sample %s is blocked until its turn is stored: %s", self._sample.id, exc)
                is_waiting = True
                await asyncio.sleep(FULL_WAIT_S)
                continue
            if self._is_full:
                raise PayloadError(
                    f"sample {self._sample.id} cannot be stored: with the environment's state it has more than "
                    f"{MAX_PARTIAL_BYTES} bytes; lower rollout.max_context_tokens, or return smaller snapshots."
                )
            if not self._is_lost:
                return
        raise LeaseLost(f"job {self._sample.job.id}")

    async def keep_all(self) -> bool:
        """Write the complete sample; return False if the lease is lost. Raises QueueFull."""
        await self.settle()
        return not self._is_kept or await self._write_complete()

    async def _keep(self) -> None:
        try:
            if not await self._services.commits.has_room():
                return
            if not await self._write():
                self._is_lost = True
                self._ended = True  # the heartbeat reports the lost lease
        except QueueFull as exc:
            log.warning("failed to checkpoint the prefix of sample %s, retrying later: %s", self._sample.id, exc)

    async def _write(self) -> bool:
        """Write tokens that Redis lacks; return False if the lease is lost. Raises QueueFull."""
        return await (self._write_growth() if self._is_current() else self._write_complete())

    def _is_current(self) -> bool:
        """Return whether the stored prefix matches the current tokens.

        A final answer may change the versions of streamed tokens, and an environment may clear masks.
        """
        (versions, masks, turns, _), sample = self._stored, self._sample
        length = len(versions)
        is_same = sample.versions[:length] == versions and sample.loss_mask[:length] == masks
        is_unmasked = sample.loss_mask[length:] == sample.generated[length:]
        return bool(versions) and is_same and is_unmasked and turns <= len(sample.turns)

    def _snapshot(self) -> "_Stored":
        sample = self._sample
        return _Stored(list(sample.versions), list(sample.loss_mask), len(sample.turns), _state(sample))

    async def _write_growth(self) -> bool:
        sample, services = self._sample, self._services
        versions, _, turns, state = self._stored
        record, stored = growth_to_bytes(sample, len(versions), turns, state), self._snapshot()
        call = scripts.extend(
            services.keys,
            sample.job.id,
            self._token,
            sample.k,
            record,
            before=self._num_bytes,
            ttl_s=PARTIAL_TTL_S,
            most=MAX_PARTIAL_BYTES,
            usage=self.usage(),
        )
        answer = await services.control.call(call)
        if answer == "kept":
            self._record_stored(self._num_bytes + len(record), stored)
        elif answer in ("other", "full"):
            return await self._write_complete()  # drops old environment states
        return answer != "lost"

    async def _write_complete(self) -> bool:
        sample, services = self._sample, self._services
        scale = Scale(self._temperature, services.engine.logprob_kind)
        record, stored = partial_to_bytes(sample, scale), self._snapshot()
        if len(record) > MAX_PARTIAL_BYTES:
            log.warning("prefix of sample %s not stored: %d bytes are too large", sample.id, len(record))
            self._ended = self._is_full = True
            return True
        call = scripts.checkpoint(
            services.keys, sample.job.id, self._token, sample.k, record, PARTIAL_TTL_S, self.usage()
        )
        kept = await services.control.call(call)
        if kept:
            self._record_stored(len(record), stored)
        return kept

    def _record_stored(self, num_bytes: int, stored: "_Stored") -> None:
        self._services.tally.checkpoints += 1
        self._services.tally.checkpoint_bytes += max(0, num_bytes - self._num_bytes)
        self._num_bytes, self._stored = num_bytes, stored


async def read_prefixes(
    services: Services, job: Job, token: str, missing: list[int], temperature: float
) -> dict[int, Sample]:
    """Return the ``missing`` samples of ``job`` that can continue at ``temperature``, by k.

    Discards the other prefixes. Raises LeaseLost.
    """
    scale = Scale(temperature, services.engine.logprob_kind)
    prefixes, unread = {}, []
    for k, (data, recorded) in zip(missing, await _fetch(services, job.id, missing), strict=True):
        if data is None:
            unread += [k] if recorded is not None else []
            continue
        try:
            prefixes[k] = partial_from_bytes(data, job, k, scale)
            continue
        except SamplingMismatch as exc:
            services.repeats.warn(None, f"sample {job.id}/{k} starts over: {exc}", "other sampling")
        except PenstockError as exc:
            log.warning("sample %s/%d starts over: %s", job.id, k, exc)
        unread.append(k)
    if unread and not await services.control.call(scripts.unread(services.keys, job.id, token, unread)):
        raise LeaseLost(f"job {job.id}")
    return prefixes


async def _fetch(services: Services, job: str, missing: list[int]) -> list[tuple[bytes | None, bytes | None]]:
    """Return the prefix and the recorded token usage of each k."""
    if not missing:
        return []
    keys = services.keys

    async def read(client: AsyncClient) -> list[Any]:
        pipe = client.pipeline(transaction=False)
        pipe.mget([keys.partial(f"{job}/{k}") for k in missing])
        pipe.hmget(keys.group(job), [f"t:{k}" for k in missing])
        return raise_passing(await pipe.execute(raise_on_error=False))

    prefixes, usage = await services.control.do(read)
    return list(zip(prefixes, usage, strict=True))
