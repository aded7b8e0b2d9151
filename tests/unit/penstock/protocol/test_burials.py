"""Buried jobs are reported by length (T11)."""

from typing import Any
from unittest.mock import Mock

from penstock.payloads import pack
from penstock.protocol import burials
from penstock.records.job import Job
from penstock.records.keys import Keys
from tests.batch_factory import make_samples, tiny_model


def letter(job: Job) -> dict[bytes, bytes]:
    return {b"id": job.id.encode(), b"body": job.to_bytes()}


def test_T11_buried_jobs_are_reported_by_length() -> None:
    samples = make_samples({1: tiny_model(1)}, groups=1, n=2)
    _, metas = pack(samples, token="t", server="s")
    jobs = [
        Job("d/0/0", 4, prompt_ids=[7] * 300, sampling={"max_new_tokens": 2048}),
        Job("d/0/1", 4, prompt="x" * 64),
        Job("d/0/2", 4, prompt_ids=[7] * 70_000),
    ]
    letters = [*map(letter, jobs), {b"id": b"d/0/3", b"body": b"\xc1"}]
    client: Any = Mock()
    client.pipeline.return_value.execute.return_value = [b"".join(m.to_bytes() for m in metas), None, b"", None]
    found = burials.lengths(client, Keys("r"), letters)
    assert found[0] == {
        "prompt_length": 300,
        "prompt_unit": "tokens",
        "max_new_tokens": 2048,
        "answers": [sum(sample.generated) for sample in samples],
    }
    assert (found[1]["prompt_length"], found[1]["prompt_unit"], found[1]["answers"]) == (64, "characters", [])
    assert found[3] == {}
    assert burials.by_length(found) == "up to 64 characters 1, up to 1,024 tokens 1, over 65,536 tokens 1"
    assert burials.by_length([]) == ""
