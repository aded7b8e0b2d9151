"""remote_rm: what a service is sent, and what becomes of what it answers."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import ValidationError

from penstock.config import RewardConfig
from penstock.errors import ConfigError, RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.score import Rewards


class Service:
    """Answers with what it is told to, in turn; the last for ever."""

    def __init__(self) -> None:
        self.answers: list[web.Response] = []
        self.heard: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.heard.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application()
    app.router.add_post("/score", made.handle)
    async with TestServer(app) as server:
        made.url = str(server.make_url("/score"))
        yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_PAUSE_S", 0.01)


async def score(
    service: Service, *answers: web.Response, function: str = "remote_rm", label: Any = 4, **remote: Any
) -> Sample:
    service.answers = list(answers)
    limits = {"url": service.url, "max_attempts": 2, **remote}
    rewards = Rewards(RewardConfig.model_validate({"function": function, "remote": limits}))
    sample = Sample(Job("sums/0/0", 1, prompt="2+2", label=str(label), label_value=label), 0, text="It is \\boxed{4}.")
    try:
        await rewards.score(sample)
    finally:
        await rewards.close()
    return sample


def says(text: str, status: int = 200, **headers: str) -> web.Response:
    return web.Response(status=status, text=text, headers=headers)


async def test_a_service_is_sent_prompt_response_and_label_and_gives_the_reward(service: Service) -> None:
    assert (await score(service, says("0.25"))).reward == 0.25
    assert service.heard == [{"prompt": "2+2", "response": "It is \\boxed{4}.", "label": 4}]
    found = await score(service, says('{"score": 1, "why": "right"}'), function="boxed_remote_rm")
    assert (found.reward, found.reward_info) == (1.0, {"why": "right"})
    assert service.heard[-1]["response"] == "4"


def test_a_worker_refuses_an_address_whose_password_a_saved_configuration_masks() -> None:
    remote = {"url": "http://me:***@scores"}
    with pytest.raises(ConfigError, match=r"reward\.remote\.url is masked in this file: give it again"):
        Rewards(RewardConfig.model_validate({"function": "boxed_remote_rm", "remote": remote}))
    Rewards(RewardConfig.model_validate({"function": "exact_match", "remote": remote}))


@pytest.mark.parametrize("first", [says("busy", 503), says("{"), says("[" * 100_000)], ids=["busy", "cut", "deep"])
async def test_a_try_that_fails_is_made_again(service: Service, first: web.Response) -> None:
    assert (await score(service, first, says("1"))).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "outcome", "tries"),
    [
        (says("no", 500), "reward_raised", 2),
        (says("", 307, Location="/score"), "reward_raised", 1),
        (says("9" * 2000), "reward_too_large", 1),
        (says("NaN"), "reward_not_a_number", 1),
        (says('"1"'), "reward_not_a_number", 1),
    ],
    ids=["status", "redirect", "large", "nan", "text"],
)
async def test_T11_a_service_that_gives_no_number_is_a_named_failure(
    service: Service, answer: web.Response, outcome: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_BYTES", 1024)
    with pytest.raises(RewardError) as caught:
        await score(service, answer)
    assert caught.value.outcome == outcome
    assert len(service.heard) == tries


@pytest.mark.parametrize("label", [math.nan, [1, -math.inf], {"a": math.inf}], ids=repr)
async def test_a_label_that_json_has_not_is_sent_to_nobody(service: Service, label: Any) -> None:
    with pytest.raises(
        RewardError, match=r"sums/0/0/0: remote_rm: its label .*(nan|inf).* cannot be sent as"
    ) as caught:
        await score(service, says("1"), label=label)
    assert caught.value.outcome == "reward_raised"
    assert service.heard == []


@pytest.mark.parametrize("url", ["http://a\nb/", "http://a/ b", "http://a/x\n", "http:// a", "http://", "file:///a"])
def test_an_address_is_one_line_without_blanks(url: str) -> None:
    with pytest.raises(ValidationError, match=r"remote\.url"):
        RewardConfig.model_validate({"remote": {"url": url}})
    assert RewardConfig.model_validate({"remote": {"url": "http://a:1/b?c=d"}}).remote.url == "http://a:1/b?c=d"


@pytest.mark.parametrize("to", ["it", "nobody"])
async def test_a_failure_names_no_secret_of_the_address(service: Service, to: str) -> None:
    address = service.url.removeprefix("http://") if to == "it" else "127.0.0.1:1/score"
    with pytest.raises(RewardError) as caught:
        await score(service, says("", 307, Location="/score"), url=f"http://me:hunter2@{address}?token=hunter2")
    assert "127.0.0.1" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_run_without_an_address_asks_nobody() -> None:
    with pytest.raises(ValueError, match=r"remote_rm requires remote\.url"):
        RewardConfig(function="remote_rm")
    with pytest.raises(ConfigError, match="names reward 'remote_rm'"):
        Rewards(RewardConfig()).check(Job("sums/0/0", 1, reward="remote_rm"))
