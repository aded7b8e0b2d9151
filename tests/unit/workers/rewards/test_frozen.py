"""Frozen models that score samples: what is asked, what is kept, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import ValidationError

from penstock.config import Config
from penstock.errors import ConfigError, FrozenModelError
from penstock.model.tokenizer import check_same_ids
from penstock.names import TEACHER_LOGPROBS, Lane
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.fleet.nodes import Node
from penstock.workers.fleet.plan import plan
from penstock.workers.fleet.specs import specs_of
from penstock.workers.hooks.open_calls import OpenCalls
from penstock.workers.rewards.frozen import FrozenModels
from penstock.workers.rewards.service import Service
from tests.tiny_model import make_tiny_model


class Teacher:
    """Says -1, -2, ... of the tokens that it is asked for; keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.url = ""
        self.status, self.changes = 200, dict[str, Any]()
        #: Questions with more ids are answered with ``status``.
        self.longest = 0
        #: Set when it was asked often.
        self.many = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.heard.append({"path": request.path} | body)
        ids, start = body["input_ids"], body["logprob_start_len"] + 1
        entries = [[None, ids[start - 1], None], *([-float(t), i, None] for t, i in enumerate(ids[start:], 1))]
        meta = {"id": "x", "finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": entries}
        if len(self.heard) >= 20:
            self.many.set()
        status = self.status if len(ids) > self.longest else 200
        return web.json_response({"text": "", "meta_info": meta | self.changes}, status=status)


@pytest.fixture
async def teacher() -> AsyncIterator[Teacher]:
    made = Teacher()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.handle)
    async with TestServer(app) as running:
        made.url = str(running.make_url("")).rstrip("/")
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_PAUSE_S", 0.01)


def config(folder: Path, url: str | None, **changes: Any) -> Config:
    asked = {"name": "big", "url": url, "path": str(folder), "max_attempts": 1} | changes.pop("teacher", {})
    values = {
        "run": "r",
        "model": {"path": str(folder)},
        "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        "rollout": {"teacher": asked} | changes.pop("rollout", {}),
    }
    return Config.model_validate(values | changes)


def sample(**of_job: Any) -> Sample:
    made = Sample(Job("d/0/0", 2, **of_job), 1)
    made.append([5, 6, 7])
    made.prompt_length = 3
    made.append([8, 9, 10, 1], version=0, logprobs=[-0.5] * 4)
    return made


async def test_a_sample_carries_what_the_teacher_says_of_its_response(folder: Path, teacher: Teacher) -> None:
    models = FrozenModels(config(folder, teacher.url))
    one = sample()
    try:
        await models.score(one)
    finally:
        await models.close()
    assert one.sides[TEACHER_LOGPROBS].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert one.sides[TEACHER_LOGPROBS].dtype == np.float32
    [asked] = teacher.heard
    assert (asked["path"], asked["input_ids"], asked["logprob_start_len"]) == ("/generate", one.tokens, 2)
    assert asked["sampling_params"]["max_new_tokens"] == 0, "nothing is drawn"


async def test_each_part_of_a_sample_is_scored_after_its_own_context(folder: Path, teacher: Teacher) -> None:
    models = FrozenModels(config(folder, teacher.url))
    one = sample()
    one.parts = [len(one.tokens)]
    one.append([5, 6])
    one.append([8, 1], version=0, logprobs=[-0.5] * 2)
    try:
        await models.score(one)
    finally:
        await models.close()
    assert [asked["input_ids"] for asked in teacher.heard] == [one.tokens[:7], one.tokens[7:]]
    assert one.sides[TEACHER_LOGPROBS].tolist() == [-1.0, -2.0, -3.0, -4.0, 0.0, -1.0, -2.0, -3.0]
    assert one.sides[TEACHER_LOGPROBS].dtype == np.float32


async def test_other_lanes_are_not_scored(folder: Path, teacher: Teacher) -> None:
    models = FrozenModels(config(folder, teacher.url))
    try:
        assert models.scores(sample())
        for lane in (Lane.EVAL, Lane.SCORE):
            assert not models.scores(sample(lane=lane))
    finally:
        await models.close()


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({}, 400, "rollout.teacher big: 1 tries failed, the last with status 400"),
        ({"input_token_logprobs": None}, 200, "has no logprobs of the input"),
        ({"input_token_logprobs": [[None, 7, None], [-1.0, 8, None]]}, 200, "not one finite number for each token"),
        ({"input_token_logprobs": [[None, 7, None], *[[None, i, None] for i in (8, 9, 10, 1)]]}, 200, "not one finite"),
        ({"input_token_logprobs": [[None, 7, None], *[[-1.0, i, None] for i in (8, 9, 9, 1)]]}, 200, "not one finite"),
        ({"finish_reason": {"type": "abort"}}, 200, "it aborted the scoring of sample d/0/0/1"),
    ],
)
async def test_what_is_no_answer_fails_the_sample(
    folder: Path, teacher: Teacher, changes: dict[str, Any], status: int, why: str
) -> None:
    teacher.status, teacher.changes = status, changes
    models, one = FrozenModels(config(folder, teacher.url)), sample()
    try:
        with pytest.raises(FrozenModelError, match=why):
            await models.score(one)
    finally:
        await models.close()
    assert one.sides == {}


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_teacher_that_is_away_is_waited_for(folder: Path, teacher: Teacher, status: int) -> None:
    teacher.status = status
    models, one = FrozenModels(config(folder, teacher.url)), sample()
    asked = OpenCalls()
    try:
        with asked.recording():
            scoring = asyncio.create_task(models.score(one))
            await teacher.many.wait()
            assert not scoring.done()
            open_ = asked.open()["rollout.teacher"]
            assert open_ is not None
            assert open_.cause.error == f"status {status}"
            teacher.status = 200
            await scoring
    finally:
        await models.close()
    assert one.sides[TEACHER_LOGPROBS].tolist() == [-1.0, -2.0, -3.0, -4.0]


async def test_a_teacher_that_is_refused_or_silent_is_waited_for(folder: Path) -> None:
    silent = await asyncio.start_server(lambda _, writer: asyncio.Event().wait(), "127.0.0.1", 0)
    there = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    for url in ("http://127.0.0.1:1", there):
        limits = {"timeout_s": 0.02}
        models, asked = FrozenModels(config(folder, url, teacher=limits)), OpenCalls()
        try:
            with asked.recording():
                scoring = asyncio.create_task(models.score(sample()))
                await asyncio.wait({scoring}, timeout=0.5)
            assert not scoring.done()
            assert asked.open()["rollout.teacher"] is not None
        finally:
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)
            await models.close()
    silent.close()


async def test_who_waits_for_a_teacher_ends_where_a_time_out_hides_that_it_was_cancelled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def post(*_: object, **__: object) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TimeoutError from None

    monkeypatch.setattr(Service, "_post", post)
    models = FrozenModels(config(folder, "http://127.0.0.1:1"))
    scoring = asyncio.create_task(models.score(sample()))
    await asked.wait()
    scoring.cancel()
    await asyncio.wait({scoring}, timeout=60)
    assert scoring.cancelled()


async def test_a_sample_that_a_teacher_dies_of_is_at_fault_where_it_answers_others(
    folder: Path, teacher: Teacher
) -> None:
    teacher.status, teacher.longest = 500, 2
    models, one = FrozenModels(config(folder, teacher.url)), sample()
    try:
        with pytest.raises(FrozenModelError, match="2 tries failed, the last with status 500"):
            await models.score(one)
    finally:
        await models.close()
    assert [len(asked["input_ids"]) for asked in teacher.heard] == [7, 2, 7], "it has one try more"


async def test_an_id_that_the_teacher_does_not_have_is_never_sent(folder: Path, teacher: Teacher) -> None:
    models, one = FrozenModels(config(folder, teacher.url)), sample()
    one.append([4000], version=0, logprobs=[-1.0])
    try:
        with pytest.raises(FrozenModelError, match=r"has id 4000, and rollout\.teacher big has ids below 45"):
            await models.score(one)
    finally:
        await models.close()
    assert teacher.heard == []


def test_a_job_at_another_temperature_is_refused(folder: Path) -> None:
    models = FrozenModels(config(folder, "http://127.0.0.1:1"))
    models.check(Job("d/0/0", 2), 1.0)
    models.check(Job("d/0/0", 2, lane=Lane.EVAL), 0.0)
    with pytest.raises(ConfigError, match=r"samples at temperature 0\.7, and the models of section rollout that score"):
        models.check(Job("d/0/0", 2), 0.7)


def test_a_teacher_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    check_same_ids(str(folder), str(other), "rollout.teacher big")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 12', '"ä": 12'))
    with pytest.raises(
        ConfigError, match=r"rollout\.teacher big: its tokenizer .* token 'a' is id None there and 12 here"
    ):
        FrozenModels(config(folder, "http://127.0.0.1:1", teacher={"path": str(other)}))


def test_a_teacher_of_fewer_ids_is_refused(folder: Path, tmp_path: Path) -> None:
    small = make_tiny_model(tmp_path / "small")
    settings = small / "config.json"
    # Its tokenizer is allowed ids that are added, and those of this one are not.
    settings.write_text(settings.read_text().replace('"vocab_size": 45', '"vocab_size": 44'))
    with pytest.raises(ConfigError, match=r"gives ids up to 44, and the model has 44|ids up to 44, and the model in"):
        check_same_ids(str(folder), str(small), "rollout.teacher big")


def test_one_without_an_address_says_so_at_the_start(folder: Path) -> None:
    models = [{"name": "policy", "server_groups": [{"num_engines": 1}]},
              {"name": "big", "model_path": str(folder), "server_groups": [{"num_engines": 1}]}]  # fmt: skip
    with pytest.raises(ConfigError, match=r"rollout\.teacher big has no address:"):
        FrozenModels(config(folder, None, fleet={"models": models}, teacher={"path": None}))


def test_the_fleet_gives_its_workers_the_address_and_the_folder(folder: Path, tmp_path: Path) -> None:
    models = [{"name": "policy", "server_groups": [{"num_engines": 1}]},
              {"name": "big", "model_path": str(folder), "server_groups": [{"num_engines": 1}]}]  # fmt: skip
    made = config(folder, None, fleet={"models": models}, teacher={"path": None}, directory=str(tmp_path))
    planned = plan(made, [Node("127.0.0.1")])
    specs_of(made, planned)
    [saved] = (tmp_path / "r" / "fleet").glob("*.yaml")
    asked = saved.read_text().partition("teacher:")[2]
    assert f"url: {planned.endpoints()['big']}" in asked
    assert f"path: {folder}" in asked


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"teacher": {"url": None}}, "rollout.teacher 'big' has no url, and fleet.models has no frozen model"),
        ({"teacher": {"path": None}}, "rollout.teacher 'big' has no path, so its tokenizer cannot be compared"),
        ({"rollout": {"sampling": {"temperature": 0.7}}}, "dataset 'd' samples at 0.7: set its temperature to 1"),
        ({"data": {"train": [{"name": "d", "path": "p", "sampling": {"temperature": 2}}]}}, "'d' samples at 2"),
        ({"rollout": {"teacher": None}, "trainer": {"distill": {}}}, "trainer.distill requires a teacher"),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config(folder, "http://127.0.0.1:1", **changes)
