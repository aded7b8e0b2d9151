"""Encode a check for a verifier, and the verdict for the worker: JSON with bounds, never pickle.

    worker ── rq job (JSONSerializer): ENTRY, [worker, reward, sample as JSON text] ──> verifier
    verifier ── stream verdicts:WORKER: (id, started, NAME), then (id, verdict, JSON) ──> worker

The sample is sent without logprobs and side arrays: a reward judges the answer.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from penstock.errors import ProtocolError, RewardError
from penstock.records.job import Job, JobFailure
from penstock.records.sample import Sample
from penstock.text import TooMuch, to_plain, user_trace_of, utf8_safe
from penstock.workers.rewards.outcomes import Raised, words

#: Function name of every rq job of the pool. A verifier imports nothing by a name found in Redis.
ENTRY = "penstock.workers.rewards.pool.worker.check"
#: Kinds of messages of a verifier.
STARTED, VERDICT = "started", "verdict"
#: Largest uncompressed rq job in bytes; the sample's JSON is in it as an escaped string.
MAX_JOB_BYTES = 128 * 1024**2
#: Most bytes of a sample on its way to a verifier, and of the answer, as JSON.
MAX_BYTES = 4 * 1024**2
#: Longest traceback that is sent, in characters.
MAX_TRACE = 4000

_CARRIED = {"k": int, "tokens": list, "generated": list, "loss_mask": list, "versions": list, "prompt_length": int,
            "status": str, "finish_reason": str, "text": str, "turns": list, "num_turns": int,
            "num_aborts": int}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verifier."""

    #: The number; None if the reward failed.
    reward: float | None = None
    #: The other entries of the reward's result.
    info: dict[str, Any] = field(default_factory=dict)
    #: Why there is no number: an outcome of RewardError, or '' if ``error`` says why after "reward NAME".
    outcome: str = ""
    error: str = ""
    trace: str = ""

    @classmethod
    def raised(cls, exc: BaseException) -> "Verdict":
        """Return the verdict of a reward that raised."""
        return cls(error=words(exc), trace=user_trace_of(exc)[-MAX_TRACE:])

    def result(self, key: str) -> dict[str, Any]:
        """Return the number under ``key``, beside the other entries.

        Raises:
            RewardError: the outcome.
            Raised: the reward raised, or was not computed.
        """
        if self.outcome:
            raise RewardError(self.outcome, self.error)
        if self.reward is None:
            raised = Raised(self.error)
            raised.add_note(self.trace)
            raise raised
        return {**self.info, key: self.reward}

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
        RewardError: reward_too_large: more than ``max_bytes`` bytes; reward_raised: its metadata cannot be JSON.
    """
    try:
        text = json.dumps({"job": sample.job.to_map(), **{name: getattr(sample, name) for name in _CARRIED}})
    except (TypeError, ValueError, RecursionError) as exc:
        message = f"sample {sample.id}: its metadata or tokens cannot go to the verifier pool as JSON: {exc}."
        raise RewardError(JobFailure.REWARD_RAISED, message) from exc
    # ASCII: as many bytes as characters.
    if len(text) > max_bytes:
        message = f"sample {sample.id} has {len(text)} bytes as JSON, more than {max_bytes}."
        raise RewardError(JobFailure.REWARD_TOO_LARGE, message)
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
