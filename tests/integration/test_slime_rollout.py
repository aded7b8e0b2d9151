"""Penstock as slime's rollout function, by the flags of docs/adapters.md alone: its own parser, loader and manager.

Needs ``SLIME_SOURCE=/path/to/slime``; the worker's part is played.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import pytest
import redis
import torch

from penstock import payloads
from penstock.config import Config
from penstock.config.load import save_resolved
from penstock.names import PART_REWARDS
from penstock.payloads import sides
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from tests.adapters.slime_contract import check_share
from tests.integration import play
from tests.integration.docs_blocks import blocks
from tests.integration.parts import Player, buffering, make_config, until
from tests.integration.worker_play import IDS

PROMPTS = ("ab", "cde", "f")
GROUPS, N = len(PROMPTS), 4
PROCESS_S = 300
NAME = "penstock.consumers.adapters.slime_rollout"

pytestmark = [
    pytest.mark.skipif(
        "SLIME_SOURCE" not in os.environ, reason="SLIME_SOURCE names no checkout of slime, and CI has none"
    ),
    pytest.mark.timeout(2 * PROCESS_S + 60),
]


def answer(worker: Player, stop: threading.Event) -> None:
    """Whatever is asked: the prompt, k + 2 tokens, reward k % 2."""
    while not stop.wait(0.05):
        for held in worker.lease(8, version=worker.clock):
            job = Job.from_bytes(held.body)
            samples = [sample_of(job, k, worker.clock) for k in range(job.n)]
            worker.commit(held, samples, worker.clock, temperature=job.sampling["temperature"])


def sample_of(job: Job, k: int, version: int) -> Sample:
    assert job.prompt_ids is not None
    assert job.raw_label["answer"] in range(GROUPS)
    sample = Sample(job, k)
    sample.append(job.prompt_ids)
    sample.prompt_length = len(job.prompt_ids)
    sample.append([5 + k] * (k + 2), version=version, logprobs=[-0.5] * (k + 2))
    sample.status, sample.finish_reason, sample.reward = "completed", "stop", float(k % 2)
    return sample


def answer_in_parts(worker: Player, stop: threading.Event) -> None:
    """The same, by a generate function that returns two samples of rewards k and k + 0.5, as the run's flags name."""
    while not stop.wait(0.05):
        for held in worker.lease(8, version=worker.clock):
            job, records = Job.from_bytes(held.body), []
            assert job.reward == "deepscaler"
            for k in range(job.n):
                sample = sample_of(job, k, worker.clock)
                sample.parts.append(len(sample.tokens))
                sample.append([9])
                sample.append([5 + k], version=worker.clock, logprobs=[-0.5])
                rewards = sides.packed(PART_REWARDS, np.array([k, k + 0.5]), sample.id)
                drawn = {"token": held.token, "server": "control", "temperature": job.sampling["temperature"]}
                data, (meta,) = payloads.pack([sample], **drawn)
                meta.sides = [rewards.entry(PART_REWARDS)[:3]]
                worker.client.set(worker.keys.payload(sample.id, held.token), data, nx=True, ex=600)
                place = sides.key_of(worker.keys, held.job, k, held.token, meta.sides[0])
                worker.client.set(place, rewards.data, ex=600)
                records.append((k, worker.clock, meta.to_bytes()))
            assert run(worker.client, scripts.commit(worker.keys, held.job, held.token, records)).outcome == "ready"


def documented(folder: Path) -> list[str]:
    """The flags of the page, with files in ``folder``."""
    [page] = [block for block in blocks() if block.key.startswith("docs/adapters.md: --rollout-function-path")]
    return [
        str(folder / Path(flag).name) if flag.endswith(("/weights", ".yaml")) else flag
        for flag in split(page.text.replace("\\\n", " "))
    ]


def run_slime(module: str, *given: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, os.environ["SLIME_SOURCE"], *given],
        capture_output=True, text=True, timeout=PROCESS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


def flags_of(folder: Path, model: Path) -> list[Any]:
    """Flags of a rollout of three prompts, which are written to ``folder``."""
    rows = [{"input": text, "label": {"answer": number}} for number, text in enumerate(PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "slime.yaml").write_text(f"penstock_config: {folder / 'run.yaml'}\n")
    return [
        *documented(folder),
        "--hf-checkpoint", model, "--prompt-data", folder / "train.jsonl", "--label-key", "label",
        "--rollout-batch-size", GROUPS, "--n-samples-per-prompt", N, "--num-rollout", 1,
        "--global-batch-size", GROUPS * N,
        "--rollout-max-response-len", 8, "--rollout-temperature", 0.8, "--advantage-estimator", "grpo",
        "--eval-prompt-data", "held", folder / "train.jsonl", "--eval-interval", 1, "--n-samples-per-eval-prompt", 2,
        "--actor-num-nodes", 1, "--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1,
    ]  # fmt: skip


def test_slimes_own_manager_loads_the_function_by_its_flag_and_takes_what_it_returns(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, models: list[Path], tmp_path: Path
) -> None:
    config: Config = make_config(redis_server.url, keys.run, tmp_path)
    save_resolved(config, tmp_path / "run.yaml")
    flags = [
        *flags_of(tmp_path, models[0]),
        "--rollout-sample-filter-path", "tests.adapters.slime_functions.takes_loss_off",
        "--rollout-all-samples-process-path", "tests.adapters.slime_functions.keeps_a_list",
    ]  # fmt: skip
    stop = threading.Event()
    worker = threading.Thread(target=answer, args=(Player(client, keys), stop))
    with buffering(config):
        worker.start()
        try:
            run_slime("tests.adapters.slime_manager", str(tmp_path), *map(str, flags))
        finally:
            stop.set()
            worker.join()
        until(lambda: play.counter(client, keys, "retired") == 2 * GROUPS)
    assert audit(client, keys).ok
    evaluated = json.loads((tmp_path / "eval.json").read_text())
    assert evaluated["paths"] == [f"{NAME}.generate_rollout"] * 2
    assert evaluated["module"] == NAME
    assert evaluated["held"] == {"rewards": [0.0, 1.0] * GROUPS, "n": 2 * GROUPS}
    shares = torch.load(tmp_path / "shares.pt", weights_only=True)
    assert len(shares) == 2
    rows_of: dict[int, list[int]] = {}
    for share in shares:
        rows_of |= dict(zip(share["partition"], (tokens.tolist() for tokens in share["tokens"]), strict=True))
    wanted = [[IDS[c] for c in text] + [5 + k] * (k + 2) for text in PROMPTS for k in range(N)]
    assert [rows_of[i] for i in range(GROUPS * N)] == wanted
    for share in shares:
        check_share(share, GROUPS * N)
        for place, mask in zip(share["partition"], share["loss_masks"], strict=True):
            assert mask.any() == (place % N > 0)
    seen = json.loads((tmp_path / "all_samples.json").read_text())
    assert seen == [[i, {"answer": i // N}, i % N == 0] for i in range(GROUPS * N)]
    # And slime's ranks take them: process_rollout_data, the step to tensors, log_rollout_data, over real gloo.
    torch.save([share | {"groups": GROUPS, "n": N} for share in shares], tmp_path / "shares.pt")
    run_slime("tests.adapters.slime_ranks", str(tmp_path / "shares.pt"), str(tmp_path / "ranks.json"))
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert found["rollout"]["rollout/raw_reward"] == pytest.approx(0.5)
    # slime's mean over samples, of which one in N bears no loss.
    assert found["rollout"]["rollout/rollout_log_probs"] == pytest.approx(-0.5 * (N - 1) / N)


def test_parts_of_an_answer_reach_slimes_ranks_as_samples_of_one_rollout(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, models: list[Path], tmp_path: Path
) -> None:
    hooks = {"generate": "generate_with_retool:generate"}
    config: Config = make_config(redis_server.url, keys.run, tmp_path, hooks=hooks)
    save_resolved(config, tmp_path / "run.yaml")
    flags = [
        *flags_of(tmp_path, models[0]),
        "--custom-generate-function-path", "generate_with_retool.generate", "--rm-type", "deepscaler", "--group-rm",
    ]  # fmt: skip
    stop = threading.Event()
    worker = threading.Thread(target=answer_in_parts, args=(Player(client, keys), stop))
    with buffering(config):
        worker.start()
        try:
            run_slime("tests.adapters.slime_manager", str(tmp_path), *map(str, flags))
        finally:
            stop.set()
            worker.join()
        until(lambda: play.counter(client, keys, "retired") == 2 * GROUPS)
    evaluated = json.loads((tmp_path / "eval.json").read_text())
    assert evaluated["held"] == {"rewards": [0.0, 0.5, 1.0, 1.5] * GROUPS, "n": 4 * GROUPS}
    shares = torch.load(tmp_path / "shares.pt", weights_only=True)
    rows: dict[int, tuple[list[int], int, float]] = {}
    for share in shares:
        check_share(share, 2 * GROUPS * N, GROUPS * N)
        columns = (share["tokens"], share["rollout_ids"], share["rollout_mask_sums"].tolist())
        named = zip(share["partition"], *columns, strict=True)
        rows |= {place: (tokens.tolist(), rollout, sum_) for place, tokens, rollout, sum_ in named}
        assert share["raw_reward"] == [k + part / 2 for k in range(N) for part in range(2)] * GROUPS
    found = [rows[place] for place in range(2 * GROUPS * N)]
    assert [one[1:] for one in found] == [(i, i % N + 3) for i in range(GROUPS * N) for _ in range(2)]
    assert [one[0] for one in found[1::2]] == [[9, 5 + k] for k in range(N)] * GROUPS
