"""Examples of slime's, unchanged, in a worker: their generate and reward functions, by the names that their flags have.

Needs ``SLIME_SOURCE=/path/to/slime``. The engine is a fake that answers as the example expects; retool's sandbox is its
own, and search-r1 searches a server of this test.
"""

import itertools
import os
import string
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.config import ModelConfig
from penstock.payloads import Payload
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample_meta import SampleMeta
from tests.integration import play
from tests.integration.fake_engine import EOS, FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, read_samples, until
from tests.integration.worker_process import Start, start
from tests.tiny_model import make_tiny_model, publication_of

__all__ = ["start"]

pytestmark = pytest.mark.skipif(
    "SLIME_SOURCE" not in os.environ, reason="SLIME_SOURCE names no checkout of slime, and CI has none"
)

#: Longest work of an example; its worker imports slime for seconds.
LIMIT_S = 120
#: One token per character; the first two are special.
CHARACTERS = string.digits + string.ascii_letters + string.punctuation
IDS = {character: index + 2 for index, character in enumerate(CHARACTERS)}
MULTI_AGENT = "examples.multi_agent.rollout_with_multi_agents:generate_with_multi_agents"
CALL = '<tool_call>{"name":"code_interpreter","arguments":{"code":"print(40+2)"}}</tool_call>'


def ids(text: str) -> list[int]:
    return [*(IDS[character] for character in text), EOS]


def text(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token - 2] for token in tokens if token > EOS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are all printable characters."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "printable", vocab_size=2 + len(CHARACTERS))
    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": EOS, **IDS}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_config(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def publications(folder: Path) -> dict[int, Publication]:
    return {1: publication_of(folder, 1)}


@pytest.fixture
async def searches(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """What search-r1 searched for; every answer is one document."""
    found: list[str] = []

    async def retrieve(request: web.Request) -> web.Response:
        found.extend((await request.json())["queries"])
        return web.json_response({"result": [[{"contents": "France\nParis"}]]})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve)])
    async with TestServer(app) as server:
        monkeypatch.setenv("SLIME_SEARCH_URL", str(server.make_url("/retrieve")))
        yield found


Work = Callable[..., Any]


@pytest.fixture
def work(client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, start: Start) -> Work:
    """Has a worker process generate one sample, and returns it."""

    async def run(
        prompt: str, answer: Callable[[str], str], *, label: Any, **sections: Any
    ) -> tuple[SampleMeta, Payload]:
        fake.script = lambda tokens, _: ids(answer(text(tokens)))
        sections["worker"] = {"max_attempts": 1}
        sections["rollout"] = {"sampling": {"max_new_tokens": 256, "temperature": 1.0}, "max_context_tokens": 4096}
        jobs = admit(client, keys, [job(0, n=1, prompt=prompt, **label_of(label))])
        worker = start(config(**sections), python=("-m", "tests.adapters.slime_worker"))
        ended = ("ready", "dead")
        await until(
            lambda: play.state(client, keys, jobs[0]) in ended or worker.process.poll() is not None, "it to end"
        )
        assert all_in(client, keys, jobs, "ready")(), worker.text()[-6000:]
        play.assert_conserved(client, keys)
        [found] = read_samples(client, keys, jobs[0])
        return found

    return run


def label_of(label: Any) -> dict[str, Any]:
    return {"label": label} if isinstance(label, str) else {"label": "x", "label_value": label}


async def test_T6_T8_retool_calls_its_sandbox_and_is_rewarded(work: Work) -> None:
    def answer(prompt: str) -> str:
        return "Answer:\\boxed{42}" if "<interpreter>" in prompt else CALL

    meta, payload = await work(
        "40+2=",
        answer,
        label="42",
        hooks={"generate": "generate_with_retool:generate"},
        reward={"function": "generate_with_retool:reward_func"},
    )

    said = text(payload.tokens[~payload.generated.astype(bool)].tolist())
    assert "<interpreter>" in said
    assert "42" in said.partition("<interpreter>")[2], "what the sandbox printed"
    drawn = payload.tokens[payload.loss_mask.astype(bool)].tolist()
    assert drawn == ids(CALL) + ids("Answer:\\boxed{42}")
    assert (meta.reward, meta.num_turns, meta.reward_info["acc"]) == (1.0, 2, True)


async def test_T6_T8_search_r1_searches_and_is_rewarded(work: Work, searches: list[str]) -> None:
    def answer(prompt: str) -> str:
        return "<answer>paris</answer>" if "<information>" in prompt else "<search>capital</search>"

    meta, payload = await work(
        "likethis:<answer>beijing</answer>",
        answer,
        label={"ground_truth": {"target": ["Paris"]}},
        hooks={"generate": "generate_with_search:generate"},
        reward={"function": "generate_with_search:reward_func"},
    )

    assert searches == ["capital"]
    drawn = payload.tokens[payload.loss_mask.astype(bool)].tolist()
    assert drawn == ids("<search>capital</search>") + ids("<answer>paris</answer>")
    assert (meta.reward, meta.num_turns) == (1.0, 2)


async def test_T6_T8_the_samples_of_several_agents_are_parts_of_one_sample(work: Work) -> None:
    solutions = itertools.cycle(["think</think>\\boxed{42}", "think</think>\\boxed{41}"])

    def answer(prompt: str) -> str:
        return "choose</think>Judgment:1" if "Judgment" in prompt else next(solutions)

    meta, payload = await work(
        "40+2=",
        answer,
        label="42",
        hooks={"generate": MULTI_AGENT, "args": {"rm_type": "deepscaler"}},
    )

    assert [part.num_generated for part in meta.all_parts].count(len(ids("choose</think>Judgment:1"))) == 1
    assert len(meta.parts) == 11, "five solvers, five rewriters and a selector"
    assert meta.num_turns == 11
    assert (payload.generated == payload.loss_mask).all()
    found = sorted(round(one, 6) for one in meta.reward_info["part_rewards"])
    assert len(found) == 11
    assert set(found) <= {0.0, 0.8, 1.2}
    assert meta.reward == pytest.approx(sum(found) / 11)
