"""Lengths of dead jobs: if long ones fail, long ones are missing from training (T11).

Three lengths of a dead job are known: its prompt, its token limit, and the answers that were finished before it died.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import ProtocolError
from penstock.records.codec import name_shown
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample_meta import iter_metas
from penstock.redis.commands import Client

#: Upper ends of the classes by which prompts are counted.
CLASSES = (64, 256, 1024, 4096, 16384, 65536)


def lengths(client: Client, keys: Keys, letters: Sequence[Mapping[bytes, bytes]]) -> list[dict[str, Any]]:
    """Return what is known of the length of each job of the ``dead`` stream. Blocks for one round trip.

    Returns:
        ``prompt_length`` in ``prompt_unit`` (tokens, or characters of a text), ``max_new_tokens`` (None: the engine's
        default) and ``answers`` (generated tokens of each finished answer); {} if the record cannot be read.
    """
    pipe = client.pipeline(transaction=False)
    for letter in letters:
        pipe.get(keys.meta(name_shown(letter.get(b"id", b""))))
    return [_lengths_of(letter, meta) for letter, meta in zip(letters, pipe.execute(), strict=True)]


def by_length(found: Iterable[Mapping[str, Any]]) -> str:
    """Return the dead jobs by prompt length, as text: ``up to 64 tokens 3, up to 1,024 tokens 12``; or ''."""
    counts: Counter[tuple[str, int]] = Counter()
    for one in found:
        if one:
            counts[one["prompt_unit"], sum(one["prompt_length"] > most for most in CLASSES)] += 1
    return ", ".join(f"{_class(at)} {unit} {count}" for (unit, at), count in sorted(counts.items()))


def _class(at: int) -> str:
    return f"up to {CLASSES[at]:,}" if at < len(CLASSES) else f"over {CLASSES[-1]:,}"


def _lengths_of(letter: Mapping[bytes, bytes], meta: bytes | None) -> dict[str, Any]:
    name = name_shown(letter.get(b"id", b""))
    try:
        job = Job.from_bytes(letter.get(b"body", b""), f"record of job {name}")
        answers = [one.num_generated for one in iter_metas(meta or b"", f"metadata of job {name}")]
    except ProtocolError:
        return {}  # a letter is listed, whatever is wrong with its job
    tokens = job.prompt_ids is not None
    return {
        "prompt_length": len(job.prompt_ids or ()) if tokens else len(job.prompt or ""),
        "prompt_unit": "tokens" if tokens else "characters",
        "max_new_tokens": job.sampling.get("max_new_tokens"),
        "answers": answers,
    }
