"""Samples of several parts, their payloads, and batches of them with rows as the leader makes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock import payloads
from penstock.buffer.group import Group
from penstock.buffer.manifest import Ages, rows_of
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.fetch import Payloads
from penstock.protocol.staleness import Lineage
from penstock.records.job import Job
from penstock.records.manifest import Manifest
from penstock.records.sample import Sample
from penstock.records.sample_meta import SampleMeta
from tests.batch_factory import make_manifest


class Turn(NamedTuple):
    """A part: tokens that were given, and then tokens of each version in turn."""

    context: int
    #: (version, tokens, whether they bear loss)
    generated: tuple[tuple[int, int, bool], ...]


def turn(context: int, count: int, version: int = 5, *, loss: bool = True) -> Turn:
    return Turn(context, ((version, count, loss),))


def make_sample(k: int, parts: Sequence[Turn], reward: float = 0.0, job: str = "toy/0/0", n: int = 4) -> Sample:
    """A sample whose tokens and logprobs tell its k and their place."""
    made = Sample(Job(job, n, prompt_ids=[1], sampling={"temperature": 1.0}), k)
    for part in parts:
        if made.tokens:
            made.parts.append(len(made.tokens))
        made.append(_tokens(made, part.context))
        made.prompt_length = made.prompt_length or len(made.tokens)
        for version, count, loss in part.generated:
            logprobs = [-0.01 * (k + 1) - 0.001 * i for i in range(count)]
            made.append(_tokens(made, count), version=version, logprobs=logprobs, loss=loss)
    made.reward, made.status, made.finish_reason = reward, "completed", "stop"
    return made


def _tokens(sample: Sample, count: int) -> list[int]:
    return [2 + (3 * sample.k + len(sample.tokens) + i) % 13 for i in range(count)]


def apart(sample: Sample, first_k: int) -> list[Sample]:
    """The parts of a sample as samples of their own."""
    found = []
    for i, (begin, end) in enumerate(zip([0, *sample.parts], [*sample.parts, len(sample.tokens)], strict=True)):
        one = Sample(sample.job, first_k + i, reward=sample.reward)
        for name in ("tokens", "logprobs", "generated", "loss_mask", "versions"):
            setattr(one, name, getattr(sample, name)[begin:end])
        one.prompt_length = one.generated.index(1) if 1 in one.generated else end - begin
        one.status, one.finish_reason = "completed", "stop"
        found.append(one)
    return found


def packed(sample: Sample) -> tuple[bytes, SampleMeta]:
    data, (meta,) = payloads.pack([sample], token="token", server="control")
    return data, meta


def manifest_of(
    samples: Sequence[Sample], *, floor: int = -1, lost: frozenset[int] = frozenset(), **changes: Any
) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest with the rows of these samples, and their payloads.

    Args:
        floor: version below which no token bears loss.
        lost: k of samples whose payload the leader knows to be lost.
    """
    ages = Ages(Lineage(), 6, True, floor, changes.get("mask_offpolicy", False))
    rows, data = [], {}
    for sample in samples:
        data[sample.id], meta = packed(sample)
        group = Group(sample.job.id, "train", 1, 1, sample.job.n, oldest=4, lost=lost)
        rows += rows_of(group, SampleMeta.from_bytes(meta.to_bytes()), ages)
    return make_manifest(rows, mask_below=floor, **changes), data


def batch_of(samples: Sequence[Sample], *, payloads: Payloads | None = None, **options: Any) -> Batch:
    """One rank's share of a batch of these samples; ``payloads``: other than all of them."""
    of_batch = {"dp_rank", "dp_size", "advantage", "read_sides", "store"} & options.keys()
    own = {name: options.pop(name) for name in of_batch}
    made, data = manifest_of(samples, **options)
    sent = made.to_bytes()
    found = data if payloads is None else payloads
    return Batch(Manifest.from_bytes(sent), digest=Manifest.digest(sent), payloads=found, **own)
