"""When a prefix is written, and what: what is new, the whole where it is not true any more, nothing after its end."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config import WorkerConfig
from penstock.errors import LeaseLost, PayloadError, QueueFull
from penstock.protocol.scripts import Call
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.records.worker_causes import RedisFull
from penstock.workers.jobs.prefixes import Prefix, partial_from_bytes
from penstock.workers.services import Services, Tally

JOB = Job(id="d/0/0", n=1, prompt="abc")


class Server:
    """Plays the two verbs; holds answers back while ``open`` is cleared."""

    def __init__(self) -> None:
        self.data = b""
        self.verbs: list[str] = []
        self.sizes: list[int] = []
        self.open = asyncio.Event()
        self.open.set()

    async def call(self, call: Call[Any]) -> Any:
        self.verbs.append(call.script.name)
        await self.open.wait()
        if call.script.name == "checkpoint":
            self.data = bytes(cast(bytes, call.args[3]))
            self.sizes.append(len(self.data))
            return True
        assert call.args[3] == len(self.data)
        self.data += cast(bytes, call.args[4])
        self.sizes.append(len(cast(bytes, call.args[4])))
        return "kept"

    async def has_room(self) -> bool:
        return True


def make(server: Server, *, routing: bool = False, **worker: Any) -> tuple[Prefix, Sample]:
    sample = Sample(JOB, 0)
    sample.append([1, 2, 3])
    sample.prompt_length = 3
    services = SimpleNamespace(
        config=SimpleNamespace(worker=WorkerConfig(**worker)),
        control=server,
        commits=server,
        keys=Keys("r"),
        tally=Tally(),
        engine=SimpleNamespace(logprob_kind="scaled", returns_routing=routing),
    )
    return Prefix(cast(Services, services), "token", sample, 1.0), sample


async def draw(prefix: Prefix, sample: Sample, count: int, version: int = 1) -> None:
    sample.append([7] * count, version=version, logprobs=[-0.5] * count)
    prefix.keep_if_due()
    await prefix.written()


async def test_a_checkpoint_costs_its_new_tokens() -> None:
    server = Server()
    prefix, sample = make(server, checkpoint_tokens=100)
    for _ in range(50):
        await draw(prefix, sample, 50)
    assert server.verbs == ["checkpoint"] + ["extend"] * 24
    assert max(server.sizes) < 100 * 12 + 300
    assert partial_from_bytes(server.data, JOB, 0).tokens == sample.tokens


async def test_T6_a_prefix_whose_versions_turn_out_otherwise_is_written_anew() -> None:
    server = Server()
    prefix, sample = make(server, checkpoint_tokens=2)
    await draw(prefix, sample, 4)
    sample.versions[-1] = 2
    await draw(prefix, sample, 2, version=2)
    assert server.verbs == ["checkpoint", "checkpoint"]
    assert partial_from_bytes(server.data, JOB, 0).versions == sample.versions == [-1, -1, -1, 1, 1, 1, 2, 2, 2]


async def test_T8_the_end_of_a_turn_is_written_with_it() -> None:
    server = Server()
    prefix, sample = make(server, checkpoint_tokens=2)
    await draw(prefix, sample, 4)
    sample.finish_reason = "stop"
    await draw(prefix, sample, 2)
    assert partial_from_bytes(server.data, JOB, 0).finish_reason == "stop"


@pytest.mark.parametrize("ending", ["settle", "keep_all"])
async def test_what_is_on_its_way_arrives_before_the_end_and_nothing_after_it(ending: str) -> None:
    """A prefix that is written behind the commit of its sample would be there for ever."""
    server = Server()
    server.open.clear()
    prefix, sample = make(server, checkpoint_tokens=2)
    sample.append([7] * 4, version=1, logprobs=[-0.5] * 4)
    prefix.keep_if_due()
    end = asyncio.create_task(getattr(prefix, ending)())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not end.done()
    server.open.set()
    await end
    count = len(server.verbs)
    sample.append([7] * 4, version=1, logprobs=[-0.5] * 4)
    prefix.keep_if_due()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(server.verbs) == count == (1 if ending == "settle" else 2)


async def test_only_the_first_turn_is_kept() -> None:
    server = Server()
    prefix, sample = make(server, checkpoint_tokens=2)
    sample.num_turns = 2
    await draw(prefix, sample, 4)
    assert server.verbs == []


async def test_T17_no_prefix_is_kept_of_a_sample_whose_routing_would_not_go_with_it() -> None:
    server = Server()
    prefix, sample = make(server, routing=True, checkpoint_tokens=10)
    await draw(prefix, sample, 40)
    assert await prefix.keep_all()
    assert server.sizes == []
    assert prefix.usage().live == 40


async def test_turns_and_observations_are_appended_and_masks_that_change_are_written_anew() -> None:
    server = Server()
    prefix, sample = make(server)
    for turn in range(3):
        sample.append([7, 8], version=turn, logprobs=[-0.5, -1.0])
        sample.finish_reason = "stop"
        sample.turns.append("gh")
        await prefix.keep_now()
        sample.append([9])
        sample.num_turns, sample.finish_reason = turn + 2, ""
        sample.state = pack([float(turn), {}, pack({"turn": turn})])
        await prefix.keep_now()
    assert server.verbs == ["checkpoint"] + ["extend"] * 5
    found = partial_from_bytes(server.data, JOB, 0)
    names = ("tokens", "logprobs", "generated", "loss_mask", "versions", "turns", "num_turns", "state")
    assert {name: getattr(found, name) for name in names} == {name: getattr(sample, name) for name in names}
    sample.loss_mask[3] = 0
    await prefix.keep_now()
    assert server.verbs[-1] == "checkpoint"
    assert partial_from_bytes(server.data, JOB, 0).loss_mask == sample.loss_mask


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_turn_waits_until_redis_has_room_and_ends_with_its_lease(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("penstock.workers.jobs.prefixes.FULL_WAIT_S", 0.0)

    class Full(Server):
        refusals = 3

        async def call(self, call: Call[Any]) -> Any:
            if self.refusals:
                self.refusals -= 1
                raise QueueFull("no room", RedisFull())
            return False if is_lost else await super().call(call)

    server = Full()
    prefix, sample = make(server)
    sample.append([7], version=1, logprobs=[-0.5])
    if is_lost:
        with pytest.raises(LeaseLost):
            await prefix.keep_now()
    else:
        await prefix.keep_now()
        assert partial_from_bytes(server.data, JOB, 0).tokens == sample.tokens
    assert server.refusals == 0


async def test_nothing_is_done_after_a_checkpoint_found_the_lease_lost() -> None:
    class Lost(Server):
        async def call(self, call: Call[Any]) -> Any:
            return False if call.script.name == "checkpoint" else "lost"

    prefix, sample = make(Lost(), checkpoint_tokens=2)
    prefix.keeps_turns = True
    await draw(prefix, sample, 4)
    with pytest.raises(LeaseLost):
        await prefix.keep_now()


async def test_a_full_prefix_is_written_anew_with_one_state_and_one_that_is_still_too_large_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.workers.jobs.prefixes.MAX_PARTIAL_BYTES", 5000)

    class Full(Server):
        async def call(self, call: Call[Any]) -> Any:
            if call.script.name == "extend" and len(self.data) + len(cast(bytes, call.args[4])) > 5000:
                return "full"
            return await super().call(call)

    server = Full()
    prefix, sample = make(server)
    for turn in range(20):
        sample.append([7], version=1, logprobs=[-0.5])
        sample.state = pack([0.0, {}, b"%d" % turn * 500])
        await prefix.keep_now()
    assert server.verbs.count("checkpoint") > 1
    assert partial_from_bytes(server.data, JOB, 0).state == sample.state
    sample.append([7] * 2000, version=1, logprobs=[-0.5] * 2000)
    with pytest.raises(PayloadError, match="return smaller snapshots"):
        await prefix.keep_now()
