"""Encode the samples sent to reward processes, and the verdicts they return: bounded in size, never pickled.

    child/   worker ── settings, then frames of [reward, sample]; no bytes: it is withdrawn ──> process    msgpack
             worker <── no bytes once user code is imported, then verdicts ── process
    pool/    worker ── rq job (JSONSerializer): ENTRY, [worker, reward, sample as JSON text] ──> verifier  JSON
             worker <── stream verdicts:WORKER of (id, JSON) ── verifier

No sample is sent with its side arrays, and to a verifier without its logprobs: a reward judges the answer.
"""

import asyncio
import json
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.errors import ProtocolError, RewardError
from penstock.records.codec import pack, unpack
from penstock.records.job import Job, JobFailure
from penstock.records.record import Record
from penstock.records.sample import Sample
from penstock.text import TooMuch, to_plain, user_trace_of, utf8_safe
from penstock.workers.rewards.outcomes import Raised, words

#: Function name of every rq job of the pool. A verifier imports nothing by a name found in Redis.
ENTRY = "penstock.workers.rewards.pool.worker.check"
#: Largest uncompressed rq job in bytes; the sample's JSON is in it as an escaped string.
MAX_JOB_BYTES = 128 * 1024**2
#: Most bytes of a sample on its way to a verifier, and of the answer, as JSON.
MAX_BYTES = 4 * 1024**2
#: Longest traceback that is sent, in characters.
MAX_TRACE = 4000
#: Most bytes of a frame that the process of rewards sends.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
#: Bytes of a frame's length, and of length and number.
_LENGTH, HEADER = 4, 12


@dataclass(frozen=True, slots=True)
class Verdict(Record):
    """The result of a reward that another process computed."""

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
        return json.dumps(self.to_map())

    @classmethod
    def from_json(cls, text: bytes) -> "Verdict":
        """Parse a verdict. Raises ProtocolError if no verifier wrote it."""
        found = cls.from_map(_from_json(text, "a verdict"), "a verdict")
        try:
            return cls(
                found.reward, to_plain(found.info), utf8_safe(found.outcome), utf8_safe(found.error),
                utf8_safe(found.trace),
            )  # fmt: skip
        except TooMuch as exc:
            raise ProtocolError(f"A verdict says {exc}.") from exc


@dataclass(frozen=True, slots=True)
class _SentSample(Record):
    """A sample, as far as a reward elsewhere sees it; its fields are those of ``Sample``."""

    job: dict[str, Any]
    k: int
    tokens: list  # type: ignore[type-arg]  # entries are not checked: user code alone reads them
    generated: list  # type: ignore[type-arg]
    loss_mask: list  # type: ignore[type-arg]
    versions: list  # type: ignore[type-arg]
    prompt_length: int
    status: str
    finish_reason: str
    text: str
    turns: list  # type: ignore[type-arg]
    num_turns: int
    num_aborts: int
    logprobs: list = field(default_factory=list)  # type: ignore[type-arg]
    cached_tokens: int = 0
    num_unproven: int = 0
    parts: list = field(default_factory=list)  # type: ignore[type-arg]


_NAMES = [one.name for one in fields(_SentSample) if one.name != "job"]


def sample_to_map(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain values."""
    return {"job": sample.job.to_map(), **{name: getattr(sample, name) for name in _NAMES}}


def sample_from_map(value: Any) -> Sample:
    """Return the sample of ``sample_to_map``. Raises ProtocolError if it is malformed."""
    sent = _SentSample.from_map(value, "a sample to be checked")
    job = Job.from_map(sent.job, "job of a sample to be checked")
    return Sample(job, **{name: getattr(sent, name) for name in _NAMES})


def sample_to_json(sample: Sample, max_bytes: int) -> str:
    """Encode a sample for a verifier.

    Raises:
        RewardError: reward_too_large: more than ``max_bytes`` bytes; reward_raised: its metadata cannot be JSON.
    """
    sent = sample_to_map(sample)
    del sent["logprobs"]
    try:
        text = json.dumps(sent)
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
    return sample_from_map(_from_json(text, "a sample to be checked"))


def _from_json(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"The JSON of {what} cannot be read: {exc}.") from exc


def question_of(name: str, sample: Sample) -> bytes:
    """Return reward and sample as bytes.

    Raises:
        TypeError, ValueError, OverflowError: metadata that are not plain values.
    """
    return pack([name, sample_to_map(sample)])


def read_question(data: bytes) -> tuple[str, Sample]:
    """Return reward and sample of ``question_of``."""
    name, value = unpack(data, "a question of the worker")
    return name, sample_from_map(value)


def frame(number: int, data: bytes) -> bytes:
    """Return the bytes of a frame: length, number of the question, data."""
    return len(data).to_bytes(_LENGTH, "big") + number.to_bytes(HEADER - _LENGTH, "big") + data


async def read_frame(reader: asyncio.StreamReader, most: int) -> tuple[int, bytes]:
    """Read one frame. Blocks until it is complete.

    Raises:
        IncompleteReadError: the other end is closed.
        ProtocolError: more than ``most`` bytes.
    """
    header = await reader.readexactly(HEADER)
    if (length := int.from_bytes(header[:_LENGTH], "big")) > most:
        raise ProtocolError(f"A frame claims {length} bytes, and may have {most}.")
    return int.from_bytes(header[_LENGTH:], "big"), await reader.readexactly(length)
