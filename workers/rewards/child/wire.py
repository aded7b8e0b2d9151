"""Frames between a worker and the process of its rewards: length, number of the question, then msgpack, never pickle.

    worker ── settings, then questions [reward, sample]; no bytes: the question is withdrawn ──> process
    worker <── no bytes once user code is imported, then verdicts ── process

All of it has bounds.
"""

import asyncio
from dataclasses import asdict

from penstock.errors import ProtocolError
from penstock.records.codec import pack, unpack
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.pool.wire import Verdict

#: Bytes of a frame's length, and of length and number.
_LENGTH, HEADER = 4, 12
#: Most bytes of a frame that the process sends.
MAX_ANSWER_BYTES = 4 * 1024 * 1024

_CARRIED = ("k", "tokens", "logprobs", "generated", "loss_mask", "versions", "prompt_length", "status",
            "finish_reason", "text", "turns", "num_turns", "num_aborts", "cached_tokens", "num_unproven",
            "parts")  # fmt: skip


def frame(number: int, data: bytes) -> bytes:
    """Return the bytes of a frame."""
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


def question_of(name: str, sample: Sample) -> bytes:
    """Return reward and sample as bytes, the sample without side arrays and earlier rewards.

    Raises:
        TypeError, ValueError, OverflowError: metadata that are not plain values.
    """
    return pack([name, {"job": sample.job.to_map(), **{field: getattr(sample, field) for field in _CARRIED}}])


def read_question(data: bytes) -> tuple[str, Sample]:
    """Return reward and sample of ``question_of``."""
    name, value = unpack(data, "a question of the worker")
    return name, Sample(Job.from_map(value.pop("job")), **value)


def verdict_to_bytes(verdict: Verdict) -> bytes:
    """Return a verdict as bytes."""
    return pack(asdict(verdict))


def read_verdict(data: bytes) -> Verdict:
    """Return a verdict. Raises ProtocolError where user code wrote to the pipe."""
    values = unpack(data, "an answer of the process of rewards")
    if not isinstance(values, dict) or values.keys() != Verdict.__dataclass_fields__.keys():
        raise ProtocolError("The process of rewards sent what is not an answer.")
    return Verdict(**values)
