"""A workload that spans versions, and what must be true of its samples (T6, T8)."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from penstock.config import RolloutConfig
from penstock.records.job import Job
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.workers.engine import Segment
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.weights.apply import ApplyReport, Policy, Updater
from tests.integration import oracle
from tests.tiny_model import ALPHABET

TEMPERATURE = 0.8
TOLERANCE = 1e-4
#: What a wrong boundary must be off by at least, somewhere in the workload.
VISIBLE = 1e-2
ROLLOUT = RolloutConfig(n=1, sampling={"temperature": TEMPERATURE}, max_context_tokens=1024, max_turns=2)
#: New tokens of each sample; the longest is 75 times the shortest, and drawn for longer than a busy machine takes to
#: prove the files of a version.
LENGTHS = [6, 15, 150, 300, 450]
NUM_SAMPLES = 40


class RecordingEngine(SglangEngine):
    """Keeps the spans that the server itself reports beside what the client makes of each answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truth: dict[str, list[int]] = {}
        #: Per request: version at the sending, in whose namespace it looks for prefix KV, and tokens found there.
        self.found: dict[str, list[tuple[int, int]]] = {}

    def segment_of(self, answer: Any, sent: int, rid: str) -> Segment:
        thrown_away = self.num_stale_prefixes
        segment = super().segment_of(answer, sent, rid)
        if self.num_stale_prefixes > thrown_away:
            return segment
        spans = answer["meta_info"]["weight_versions"]
        self.truth.setdefault(rid, []).extend(
            int(span["version"]) for span in spans for _ in range(span["start"], span["end"])
        )
        self.found.setdefault(rid, []).append((sent, answer["meta_info"].get("cached_tokens", 0)))
        return segment


def jobs(number: int = 0) -> list[Job]:
    """Those of one round."""
    # No two prompts share a prefix: whose KV a request finds is then known.
    return [
        Job(
            id=f"truth/{number}/{index}",
            n=1,
            prompt=f"{ALPHABET[index]}{index * 7919:05}=",
            sampling={"max_new_tokens": LENGTHS[index % len(LENGTHS)], "ignore_eos": index % 4 != 0},
        )
        for index in range(NUM_SAMPLES)
    ]


def versions_of(sample: Sample) -> set[int]:
    return {version for version in sample.versions if version >= 0}


async def produce(
    engine: SglangEngine,
    tokenizer: Any,
    publications: list[Publication],
    policy: Policy,
    versions: Callable[[Sample], set[int]] = versions_of,
) -> tuple[list[Sample], list[ApplyReport]]:
    """Rounds of samples until one was interrupted as it should be: a starved client may send a version too late.

    Those of all rounds; only the last one is worth its name (:func:`assert_spans_enough`). ``versions`` returns those
    that generated a sample.
    """
    samples: list[Sample] = []
    reports: list[ApplyReport] = []
    while not samples or engine.version + 2 < len(publications):
        drawn, applied = await _round(len(samples) // NUM_SAMPLES, engine, tokenizer, publications, policy)
        samples, reports = samples + drawn, reports + applied
        if _spans_enough(drawn, versions) and (policy != "abort" or all(report.num_aborted for report in applied)):
            break
    return samples, reports


async def _round(
    number: int, engine: SglangEngine, tokenizer: Any, publications: list[Publication], policy: Policy
) -> tuple[list[Sample], list[ApplyReport]]:
    """The next version comes when the first answer is done, the one after it when two in five are."""
    valves = Valves()
    tasks = {
        asyncio.create_task(generate_sample(Source(engine, valves, tokenizer, ROLLOUT), Sample(job, 0)))
        for job in jobs(number)
    }
    reports = []
    for num_done in (1, NUM_SAMPLES * 2 // 5):
        while sum(task.done() for task in tasks) < num_done:
            await asyncio.wait({task for task in tasks if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
        reports.append(await Updater(engine, valves).apply(publications[engine.version + 1], policy))
    return await asyncio.gather(*tasks), reports


def assert_spans_enough(samples: list[Sample], versions: Callable[[Sample], set[int]] = versions_of) -> None:
    """The workload is worth its name: many samples span two versions, lengths span a factor of 20."""
    last = samples[-NUM_SAMPLES:]
    drawn = [sum(sample.generated) for sample in last]
    assert max(drawn) >= 20 * min(drawn)
    assert _spans_enough(last, versions)


def _spans_enough(samples: list[Sample], versions: Callable[[Sample], set[int]]) -> bool:
    return sum(len(versions(sample)) >= 2 for sample in samples) >= 0.2 * len(samples)


def assert_well_formed(samples: list[Sample]) -> None:
    for sample in samples:
        length = len(sample.tokens)
        assert len(sample.logprobs) == len(sample.generated) == len(sample.versions) == length
        drawn_versions = [version for version in sample.versions if version >= 0]
        assert drawn_versions == sorted(drawn_versions)
        assert [version >= 0 for version in sample.versions] == [bool(drawn) for drawn in sample.generated]
        asked = sample.job.sampling["max_new_tokens"]
        assert sum(sample.generated) <= asked
        if sample.job.sampling["ignore_eos"]:
            assert sum(sample.generated) == asked
            assert sample.status == "truncated"


Compute = Callable[[Sample, list[int]], list[float]]


def assert_true(samples: list[Sample], compute: Compute, engine: SglangEngine) -> None:
    """Recorded logprobs are the oracle's, and would not be with any boundary one token off."""
    truths = [true_versions(sample, compute, engine) for sample in samples]
    for by in (1, -1):
        moved = [oracle.shifted(versions, by) for versions in truths]
        # One that is cautious of its first token may have no boundary in truth.
        gaps = [
            oracle.gap(sample, compute(sample, versions))
            for sample, true, versions in zip(samples, truths, moved, strict=True)
            if versions != true
        ]
        assert len(gaps) >= 0.1 * len(samples)
        assert all(gap > TOLERANCE for gap in gaps)
        assert max(gaps) > VISIBLE


def true_versions(sample: Sample, compute: Compute, engine: SglangEngine) -> list[int]:
    """The versions under which the oracle agrees; they are the recorded ones wherever these are proven."""
    gaps = [(oracle.gap(sample, compute(sample, versions)), versions) for versions in _possible(sample, engine)]
    gap, versions = min(gaps)
    assert gap < TOLERANCE, (sample.id, gap, sample.versions)
    return versions


def _possible(sample: Sample, engine: SglangEngine) -> Iterator[list[int]]:
    """The recorded versions, and what else may be true where the record is cautious.

    Where steps overlap, the first token that the server itself gives to a new version may be of the one before: whether
    its step was in flight during the change is not told, so it is recorded as the older. It may be an answer's last,
    whose record has no boundary then.
    """
    recorded = sample.versions
    unsure = dict(_unsure(sample, engine))
    for choice in product(*(range(recorded[index], newer + 1) for index, newer in unsure.items())):
        versions = list(recorded)
        for index, version in zip(unsure, choice, strict=True):
            versions[index] = version
        yield versions


def _unsure(sample: Sample, engine: SglangEngine) -> Iterator[tuple[int, int]]:
    """(place, version that the server gives it) of each token that is recorded as of an older one."""
    if not engine.info.window:
        return
    assert isinstance(engine, RecordingEngine)
    drawn = [index for index, generated in enumerate(sample.generated) if generated]
    for index, told in zip(drawn, engine.truth[sample.id], strict=True):
        if sample.versions[index] != told:
            assert sample.versions[index] < told, "a record never claims a newer version"
            yield index, told


def in_place_oracle(models: dict[int, Any], engine: RecordingEngine) -> Compute:
    return lambda sample, versions: oracle.continued(models, sample, versions, TEMPERATURE, engine.found[sample.id])


def recompute_oracle(models: dict[int, Any]) -> Compute:
    return lambda sample, versions: oracle.recompute(models, sample, versions, TEMPERATURE)


def load_oracle_models(folders: list[Path]) -> dict[int, Any]:
    return {version: oracle.load_model(folder) for version, folder in enumerate(folders)}
