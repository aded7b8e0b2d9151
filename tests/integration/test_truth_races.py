"""T1, T6 and T8 where things meet: aborts and the ends of answers, a rewind and samples that are being drawn."""

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file
from transformers import AutoTokenizer

from penstock.config import ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.payloads import decode
from penstock.protocol.audit import audit
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from penstock.workers.engine import Segment
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.main import Worker
from penstock.workers.weights.apply import Updater
from tests.integration import oracle
from tests.integration.engine_fixtures import cpu_engine
from tests.integration.parts import buffering
from tests.integration.test_prefixes import sample_of
from tests.integration.worker_play import IDS, admit, job, make_config, until, working
from tests.integration.workload import TEMPERATURE, TOLERANCE, RecordingEngine, load_oracle_models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STOPS = [IDS[letter] for letter in "0123456789"]


class CountingEngine(RecordingEngine):
    """Counts answers that were aborted in the very step that drew their end."""

    num_races = 0

    def segment_of(self, answer: Any, sent: int, rid: str) -> Segment:
        segment = super().segment_of(answer, sent, rid)
        ended = bool(segment.output_ids) and segment.output_ids[-1] in (*STOPS, 1)
        self.num_races += segment.finish_reason == "abort" and ended
        return segment


async def test_T6_T8_aborts_that_race_with_the_end_of_an_answer(
    engine_url: str, model_config: ModelConfig, models: list[Path], publications: list[Publication], tmp_path: Path
) -> None:
    """Each answer ends at its first stop, whatever an abort said of it; logprobs and versions are true throughout."""
    tokenizer: Any = AutoTokenizer.from_pretrained(models[0])
    engine = CountingEngine(
        cpu_engine().model_copy(update={"url": engine_url}), model_config, name="test", log_dir=tmp_path
    )
    await engine.start(publications[1])
    valves, drawn = Valves(), asyncio.Semaphore(0)
    config = make_config("redis://h", Keys("r"), model_config, tmp_path).rollout
    sampling = {"max_new_tokens": 60, "stop_token_ids": STOPS, "temperature": TEMPERATURE}

    async def round_of(number: int) -> list[Sample]:
        tasks = {
            asyncio.create_task(
                generate_sample(
                    Source(engine, valves, tokenizer, config),
                    Sample(Job(f"race/{number}/{i}", 1, prompt=f"{letter}{i:02}=", sampling=sampling), 0),
                    interval=1,
                    on_growth=drawn.release,
                )
            )
            for i, letter in enumerate("abcdefghijklmnopqrst")
        }
        while not all(task.done() for task in tasks):
            for _ in range(12):
                more = asyncio.create_task(drawn.acquire())
                await asyncio.wait({more, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
            await engine.abort_all()
            if engine.version < 4:
                await Updater(engine, valves).apply(publications[engine.version + 1], "abort")
        return [task.result() for task in tasks]

    samples: list[Sample] = []

    def num_aborts() -> int:
        return sum(sample.num_aborts for sample in samples)

    try:
        while (engine.num_races < 3 or num_aborts() < 20) and len(samples) < 400:
            samples += await round_of(len(samples))
    finally:
        await engine.stop()
    assert engine.num_races >= 3, "no abort met the end of an answer: the test shows nothing"
    assert num_aborts() >= 20
    oracle_models = load_oracle_models(models)
    for sample in samples:
        answer = sample.tokens[sample.prompt_length :]
        ends = [i for i, token in enumerate(answer) if token in (*STOPS, 1)]
        assert ends in ([], [len(answer) - 1])
        assert sample.status == ("completed" if ends else "truncated")
        assert len(answer) == 60 or ends
        expected = oracle.recompute(oracle_models, sample, sample.versions, TEMPERATURE)
        assert oracle.gap(sample, expected) < TOLERANCE


NUM_JOBS = 24
#: As many as the batches before the rewind take, and some that are ready then.
NUM_FIRST = 10
#: Of those behind them, that no engine is done with while the trainer goes back.
NUM_LONG = 4
#: Batches that are cut before the rewind; they come again as they were, whatever they hold.
NUM_BEFORE = 3


class Rewinding:
    """A trainer of a few fixed sets of weights, two groups a batch."""

    def __init__(self, trainer: Trainer, client: redis.Redis, keys: Keys, weights: dict[int, Any]) -> None:
        self.trainer, self.client, self.keys, self.weights = trainer, client, keys, weights

    def publish(self) -> int:
        version = self.trainer.version + 1
        return self.trainer.publish(self.weights[min(version, max(self.weights))], step=version)

    def step(self, timeout_s: float = 60) -> list[Any]:
        """Rows of the next batch, trained in thought."""
        batch = self.trainer.next(timeout=timeout_s)
        self.trainer.commit(batch)
        self.publish()
        return list(batch.all_rows)

    def rest(self) -> list[Any]:
        """Rows of all further batches, until every group is in one, or dropped, or alone."""
        rows: list[Any] = []
        while NUM_JOBS - len(rows) // 2 - self.num_dropped() >= 2 + 2:
            with suppress(WaitTimeout):  # those that it waits for may be dropped meanwhile
                rows += self.step(timeout_s=1.0)
        return rows

    def num_dropped(self) -> int:
        return int(self.client.hget(self.keys.sub("actor"), "drop:rewound") or 0)


def running(worker: Worker) -> list[Sample]:
    return [sample for held in worker.held.values() for sample in held.samples.values()]


def num_whole(worker: Worker, version: int, jobs: list[Job]) -> int:
    """Groups of ``jobs`` of which every sample is under way and has tokens of ``version``."""
    ids = {job.id for job in jobs}
    found = Counter(sample.job.id for sample in running(worker) if version in sample.versions and sample.job.id in ids)
    return sum(count == 2 for count in found.values())


@pytest.mark.parametrize("policy", ["in_place", "abort"])
async def test_T1_T6_a_rewind_under_load_mixes_nothing_unmarked(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    model_config: ModelConfig,
    models: list[Path],
    engine_url: str,
    tmp_path: Path,
    policy: str,
) -> None:
    """What was drawn under abandoned versions is drawn anew, or its group is dropped; the rest is true and living."""
    config = make_config(
        redis_server.url,
        keys,
        model_config,
        tmp_path,
        engine={"url": engine_url},
        worker={"apply": policy, "slots": 8, "checkpoint_tokens": 20},
        staleness={"mode": "async", "bound": 20},
        trainer={"batch_groups": 2},
        rollout={"max_context_tokens": 2000},
    )
    named = [
        job(i, "abcdefgh"[i % 8], sampling={"max_new_tokens": 60 + 50 * (i % 5), "ignore_eos": True})
        for i in range(NUM_FIRST)
    ]
    long = range(NUM_FIRST, NUM_FIRST + NUM_LONG)
    later = [
        job(i, "abcdefgh"[i % 8], sampling={"max_new_tokens": 1500 if i in long else 100, "ignore_eos": True})
        for i in range(NUM_FIRST, NUM_JOBS)
    ]
    admit(client, keys, named)
    weights = {version: load_file(models[version] / "model.safetensors") for version in range(1, 7)}
    with buffering(config), Trainer(config) as trainer:
        part = Rewinding(trainer, client, keys, weights)
        part.publish()
        async with working(config) as worker:
            await asyncio.to_thread(part.step)
            saved = trainer.state_dict()
            await asyncio.to_thread(part.step)
            await asyncio.to_thread(part.step)
            # Whole groups are under way with tokens of what is abandoned now: one of which a sample is done is dropped,
            # and one may be left alone at the end.
            admit(client, keys, later)
            await until(lambda: num_whole(worker, 4, later[:NUM_LONG]) >= 2, "for groups with tokens of version 4", 60)
            held = {sample.id for sample in running(worker) if {3, 4} & set(sample.versions)}
            trainer.load_state_dict(saved)
            assert part.publish() == 5
            rows = await asyncio.to_thread(part.rest)
    assert held
    again, fresh = rows[: 2 * 2 * (NUM_BEFORE - 1)], rows[2 * 2 * (NUM_BEFORE - 1) :]
    oracle_models = {version: oracle.load_model(models[min(version, 6)]) for version in range(1, 20)}
    by_id = {one.id: one for one in named + later}
    for row in fresh:
        payload = decode(client.get(keys.payload(row.sample, row.token)) or b"", row.sample, row.checksum)
        versions = {version for version in payload.versions.tolist() if version >= 0}
        assert not versions & {3, 4}, "these were abandoned"
        if policy == "abort":
            sample = sample_of(by_id[row.job], row.k, payload)
            assert oracle.gap(sample, oracle.recompute(oracle_models, sample, sample.versions, 1.0)) < TOLERANCE
    assert {row.job for row in again}.isdisjoint(row.job for row in fresh)
    if policy == "in_place":
        # They went on under the next version; whoever holds both is dropped, and counted.
        assert part.num_dropped() > 0
        assert held.isdisjoint(row.sample for row in fresh)
    else:
        assert held & {row.sample for row in fresh}, "what was aborted is drawn anew, and used"
    assert audit(client, keys).ok
