"""Encode a check for a verifier, and the verdict for the worker: JSON with bounds, never pickle.

    worker ── rq job (JSONSerializer): ENTRY, [worker, reward, sample as JSON text] ──> verifier
    verifier ── stream verdicts:WORKER: (id, started, NAME), then (id, verdict, JSON) or (id, died, why) ──> worker

The sample is sent without logprobs and side arrays: a reward judges the answer.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from penstock.errors import ProtocolError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.text import TooMuch, to_plain, utf8_safe

#: Function name of every rq job of the pool. A verifier imports nothing by a name found in Redis.
ENTRY = "penstock.workers.rewards.pool.worker.check"
#: Kinds of messages of a verifier.
STARTED, VERDICT, DIED = "started", "verdict", "died"
#: Largest uncompressed rq job in bytes; the sample's JSON is in it as an escaped string.
MAX_JOB_BYTES = 128 * 1024**2
#: Longest traceback that is sent, in characters.
MAX_TRACE = 4000

_CARRIED = {"k": int, "tokens": list, "generated": list, "loss_mask": list, "versions": list, "prompt_length": int,
            "status": str, "finish_reason": str, "text": str, "turns": list, "num_turns": int,
            "num_aborts": int}  # fmt: skip


class TooLarge(Exception):
    """More bytes than ``reward.pool.max_bytes``."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verifier."""

    #: The number; None if the reward failed.
    reward: float | None = None
    #: The other entries of the reward's result.
    info: dict[str, Any] = field(default_factory=dict)
    #: Why there is no number: an outcome of RewardError, or '' if ``error`` is what the reward raised.
    outcome: str = ""
    error: str = ""
    trace: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Verdict":
        """Parse a verdict. Raises ProtocolError if no verifier wrote it."""
        value = _parse(text, "a verdict")
        types = {"reward": (float, int, type(None)), "info": dict, "outcome": str, "error": str, "trace": str}
        _check(value, types, "a verdict")
        if set(value) != {one.name for one in fields(cls)}:
            raise ProtocolError("A verdict lacks fields.")
        words = {name: utf8_safe(value[name]) for name in ("outcome", "error", "trace")}
        try:
            return cls(**value | words | {"info": to_plain(value["info"])})
        except TooMuch as exc:
            raise ProtocolError(f"A verdict says {exc}.") from exc


def sample_to_json(sample: Sample, max_bytes: int) -> str:
    """Encode a sample for a reward.

    Raises:
        TooLarge: more than ``max_bytes`` bytes.
        TypeError, ValueError: its metadata cannot be JSON (bytes, for instance).
    """
    text = json.dumps({"job": sample.job.to_map(), **{name: getattr(sample, name) for name in _CARRIED}})
    # ASCII: as many bytes as characters.
    if len(text) > max_bytes:
        raise TooLarge(f"{len(text)} bytes as JSON, and reward.pool.max_bytes is {max_bytes}")
    return text


def sample_from_json(text: str) -> Sample:
    """Decode a sample. Raises ProtocolError if it is malformed."""
    value = _parse(text, "a sample to be checked")
    job = Job.from_map(value.pop("job", None), "job of a sample to be checked")
    _check(value, _CARRIED, "a sample to be checked")
    return Sample(job, **value)


def _parse(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"The JSON of {what} cannot be read: {exc}.") from exc
    if not isinstance(value, dict):
        raise ProtocolError(f"The JSON of {what} is not a map.")
    return value


def _check(value: Mapping[str, Any], types: Mapping[str, Any], what: str) -> None:
    wrong = sorted(name for name in value.keys() | types.keys()
                   if name not in types or not isinstance(value.get(name), types[name]))  # fmt: skip
    if wrong:
        raise ProtocolError(f"The JSON of {what} has wrong, missing or unknown fields: {wrong}.")
