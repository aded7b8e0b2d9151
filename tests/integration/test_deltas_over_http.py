"""Deltas over HTTP: who sees neither folder nor store has the same bytes, and nothing comes twice."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from penstock.consumers.weights.http import serving
from penstock.consumers.weights.http.serving import Serving
from penstock.errors import PublishError
from penstock.records.keys import Keys
from penstock.records.offer import Offer
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.workers.weights import copies as copies_module
from penstock.workers.weights.fetch import fetcher, swarm
from tests.integration.delta_net import PATIENCE_S, Machine, Net, contents
from tests.integration.fetch_parts import RANGE_BYTES, forge
from tests.integration.spoiling_proxy import SpoilingProxy


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said and looked at every few seconds."""
    for module, name in ((serving, "OFFER_EVERY_S"), (swarm, "OFFER_EVERY_S"), (fetcher, "HAVE_EVERY_S")):
        monkeypatch.setattr(module, name, 0.2)


@pytest.fixture
def net(redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, stack: ExitStack) -> Net:
    return Net(redis_server.url, keys, tmp_path, stack)


@pytest.fixture
def large(redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, stack: ExitStack) -> Net:
    """Of many ranges."""
    return Net(redis_server.url, keys, tmp_path, stack, size=100_000)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def thing(net: Net, version: int) -> str:
    return f"policy:{net.delta(version)}"


def last(machine: Machine) -> tuple[bool, int]:
    """Whether its last version was fetched whole, and through how many deltas it came."""
    made = machine.copies._copies.last
    assert made is not None
    return made.is_whole, made.num_deltas


async def test_I9_versions_come_by_deltas_to_who_sees_neither_folder_nor_store(net: Net) -> None:
    trainer, machine = net.trainer(), net.machine("a")
    for version in range(1, 7):
        net.publish(version, trainer)
        before = machine.fetcher.from_trainer
        await net.get(machine, version)
        assert last(machine) == ((True, 0) if version == 1 else (False, 1))
        wanted = net.size(1) if version == 1 else net.delta_size(version)
        assert machine.fetcher.from_trainer - before == wanted
    before = machine.fetcher.from_trainer
    await machine.get(7, net.index(6))
    assert machine.fetcher.from_trainer == before, "a tick is the weights that are here"


async def test_a_late_joiner_takes_the_nearest_anchor_and_its_chain(net: Net) -> None:
    """The folders of versions are gone: nothing but the store is offered."""
    for version in range(1, 5):
        net.publish(version)
    machine = net.machine("late")
    net.trainer()
    await net.get(machine, 4)
    assert last(machine) == (True, 3)


async def test_the_second_worker_takes_deltas_and_versions_from_the_first(net: Net) -> None:
    trainer, first, second = net.trainer(), net.machine("first"), net.machine("second")
    for version in range(1, 4):
        net.publish(version, trainer)
        await net.get(first, version)
        await net.get(second, version)
    once = net.size(1) + net.delta_size(2) + net.delta_size(3)
    assert (first.fetcher.from_trainer, second.fetcher.from_trainer) == (once, 0)
    assert second.fetcher.from_peers == once
    whole = f"v00000003-{net.index(3)}"
    await until(lambda: whole in first.fetcher._announced and whole in second.fetcher._announced)
    late = net.machine("late")
    await net.get(late, 3)
    assert last(late) == (True, 0)
    assert late.fetcher.from_peers == net.size(3), "a copy that deltas made is the version, byte for byte"
    assert trainer.server.sent_bytes == once, "its link carries each once"


async def test_a_delta_that_rotted_in_the_store_costs_a_whole_version(net: Net) -> None:
    trainer, machine = net.trainer(), net.machine("a")
    net.publish(1, trainer)
    await net.get(machine, 1)
    net.line.publish(2)
    file = net.line.path / "store" / net.delta(2) / "delta"
    data = bytearray(file.read_bytes())
    data[-5] ^= 255
    file.write_bytes(data)
    trainer.offer(2, net.index(2), net.line.written[2].path)
    await net.get(machine, 2)
    assert last(machine) == (True, 0)


async def test_a_delta_that_rotted_on_this_machine_is_fetched_again(net: Net) -> None:
    trainer, machine = net.trainer(), net.machine("a")
    net.publish(1, trainer)
    await net.get(machine, 1)
    net.publish(2, trainer)
    copy = await net.get(machine, 2)
    copy.rename(machine.folder.parent / "elsewhere")
    file = machine.folder / ".fetched" / net.delta(2) / "delta"
    data = bytearray(file.read_bytes())
    data[-5] ^= 255
    file.write_bytes(data)
    before = machine.fetcher.from_trainer
    await net.get(machine, 2)
    assert last(machine) == (False, 1)
    assert machine.fetcher.from_trainer - before == net.delta_size(2)


async def test_a_fetcher_that_ends_first_leaves_nobody_waiting(large: Net) -> None:
    trainer, machine = large.trainer(serve_bytes_per_s=100_000), large.machine("a")
    large.publish(1, trainer)
    getting = asyncio.create_task(machine.get(1, large.index(1)))
    await until(lambda: trainer.server.sent_bytes > RANGE_BYTES)
    await asyncio.to_thread(machine.fetcher.close)
    with pytest.raises(PublishError, match="nothing more is fetched over HTTP"):
        await getting


async def test_a_delta_whose_bytes_are_other_ones_than_announced_is_never_applied(
    net: Net, stack: ExitStack, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "GIVE_UP_S", 1.0)
    trainer, machine = net.trainer(), net.machine("a")
    net.publish(1, trainer)
    await net.get(machine, 1)
    proxy = stack.enter_context(SpoilingProxy(trainer.server.url, "change", after=500).up())
    net.publish(2, trainer)
    await elsewhere(net, client, trainer, 2, proxy.url)
    await net.get(machine, 2)
    assert last(machine) == (True, 0)
    assert proxy.num_connections


async def elsewhere(net: Net, client: redis.Redis, trainer: Serving, version: int, url: str) -> None:
    """Have a trainer offer a delta at another address."""
    key = net.keys.relay(thing(net, version))
    await until(lambda: net.delta(version) in trainer._offers)
    one = trainer._offers[net.delta(version)]
    trainer._offers[net.delta(version)] = one._replace(offer=replace(one.offer, url=url))
    await until(lambda: (data := client.get(key)) is not None and Offer.from_bytes(data).url == url)


async def has_first_and_is_offered_second(net: Net, client: redis.Redis) -> tuple[Machine, str]:
    """A machine that has version 1, and the address of a trainer that offered 2 and is gone."""
    trainer, machine = net.trainer(), net.machine("a")
    net.publish(1, trainer)
    await net.get(machine, 1)
    net.publish(2, trainer)
    await until(lambda: client.exists(net.keys.relay(f"policy:v00000002-{net.index(2)}")))
    trainer.close()
    return machine, trainer.server.url


def offer_whole(net: Net, version: int) -> None:
    """By a new trainer, which offers no deltas."""
    again = net.trainer()
    again._store = None
    again.offer(version, net.index(version), net.line.written[version].path)


async def test_a_delta_that_was_swept_is_done_without(net: Net, client: redis.Redis) -> None:
    machine, _ = await has_first_and_is_offered_second(net, client)
    client.delete(net.keys.relay(thing(net, 2)))
    offer_whole(net, 2)
    await net.get(machine, 2)
    assert last(machine) == (True, 0)


async def test_a_delta_that_is_offered_with_more_than_changes_all_of_its_base_takes_no_room(
    net: Net, client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "GIVE_UP_S", 10.0)
    machine, url = await has_first_and_is_offered_second(net, client)
    many = Offer(url, 2, net.index(2), 2**20, [["delta", 2**28]], bytes(16 * 2**8))
    forge(client, net.keys, thing(net, 2), many)
    offer_whole(net, 2)
    await net.get(machine, 2)
    assert last(machine) == (True, 0)
    assert f"{net.delta(2)} is offered with {2**28} bytes" in caplog.text


async def test_a_trainer_that_comes_back_at_another_port_is_gone_on_with(large: Net) -> None:
    trainer, machine = large.trainer(), large.machine("a")
    large.publish(1, trainer)
    await large.get(machine, 1)
    trainer.close()
    large.change_all()
    large.publish(2)
    slow = large.trainer(serve_bytes_per_s=1_000_000)
    getting = asyncio.create_task(large.get(machine, 2))
    await until(lambda: slow.server.sent_bytes > 2 * RANGE_BYTES)
    slow.close()
    assert not getting.done()
    again = large.trainer()
    await getting
    assert last(machine) == (False, 1)
    assert 0 < again.server.sent_bytes < large.delta_size(2)


async def test_I4_a_worker_that_is_killed_in_a_fetch_is_gone_on_with_by_the_next(
    large: Net, redis_server: RedisServer, client: redis.Redis
) -> None:
    trainer = large.trainer()
    large.publish(1, trainer)
    machine = large.machine("w")
    await large.get(machine, 1)
    machine.close()
    trainer.close()
    large.change_all()
    large.publish(2)
    slow = large.trainer(serve_bytes_per_s=1_000_000)
    arguments = [redis_server.url, large.keys.run, str(large.folder / "w"), "x", "2", large.index(2)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.integration.delta_net", *arguments)
    try:
        await until(lambda: slow.server.sent_bytes > large.delta_size(2) // 2)
    finally:
        process.kill()
        await process.wait()
    assert slow.server.sent_bytes < large.delta_size(2)
    slow.close()
    # What the dead one said runs out.
    client.delete(large.keys.relay_have(thing(large, 2), "x"), *large.keys.relay_slots(thing(large, 2)))
    large.trainer()
    second = large.machine("w")
    await large.get(second, 2)
    assert last(second) == (False, 1)
    assert second.fetcher.from_trainer <= 0.75 * large.delta_size(2), "what had come is believed by its digests"
    assert not list(second.folder.glob(".making*"))


async def test_what_is_fetched_counts_against_the_bound_of_copies(net: Net) -> None:
    trainer = net.trainer()
    net.publish(1, trainer)
    bound = int(3.5 * net.size(1))
    machine, tiny = net.machine("a", copies_bytes=bound), net.machine("tiny", copies_bytes=net.size(1) // 2)
    for version in range(1, 8):
        if version > 1:
            net.publish(version, trainer)
        await net.get(machine, version)
        assert machine.num_bytes <= bound
    with pytest.raises(PublishError, match=r"raise worker\.copies_bytes"):
        await tiny.get(7, net.index(7))
    assert tiny.num_bytes == 0


async def test_what_is_offered_no_more_is_deleted_on_workers_too(net: Net) -> None:
    trainer, machine = net.trainer(), net.machine("a")
    for version in range(1, 4):
        net.publish(version, trainer)
        await net.get(machine, version)
    fetched = machine.folder / ".fetched"
    assert {path.name for path in fetched.iterdir()} == {net.delta(2), net.delta(3)}
    gone = net.delta(2)
    net.line.store.delete(f"{gone}/whole")
    net.line.store.delete(f"{gone}/delta")
    await until(lambda: gone not in trainer.server.shelf.names())
    net.publish(4, trainer)
    await net.get(machine, 4)
    assert {path.name for path in fetched.iterdir()} == {net.delta(3), net.delta(4)}
    await until(lambda: gone not in machine.fetcher.server.shelf.names())


async def test_nobody_waits_for_a_version_that_is_not_offered_while_a_newer_one_is_there(
    net: Net, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = net.machine("a")
    net.line.publish(1)
    newer = Publication("policy", 2, "delta", "/nowhere", index="0" * 32)
    getting = asyncio.create_task(machine.get(1, net.index(1)))
    client.xadd(net.keys.weights("policy"), {"p": newer.to_bytes()})
    with pytest.raises(PublishError, match="before a newer one was announced"):
        await getting
    monkeypatch.setattr(copies_module, "OFFER_WAIT_S", 0.3)
    with pytest.raises(PublishError, match=r"set serving\.enabled for its trainer too"):
        await machine.get(3, net.index(1))


async def test_a_worker_that_ends_waits_for_nothing(large: Net) -> None:
    trainer, machine = large.trainer(serve_bytes_per_s=100_000), large.machine("a")
    large.publish(1, trainer)
    getting = asyncio.create_task(machine.get(1, large.index(1)))
    await until(lambda: trainer.server.sent_bytes > RANGE_BYTES)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    await until(lambda: not machine.fetcher._announced)


async def test_a_store_that_is_seen_is_read_and_its_copies_are_given_to_others(net: Net, stack: ExitStack) -> None:
    trainer: Serving = net.trainer()
    near = net.machine("near")
    near.copies._config = near.copies._config.model_copy(
        update={"trainer": near.copies._config.trainer.model_copy(update={"delta_store": str(net.line.path / "store")})}
    )
    net.publish(1, trainer)
    path = await net.get(near, 1)
    assert trainer.server.sent_bytes == 0
    name = f"v00000001-{net.index(1)}"
    await until(lambda: name in near.fetcher._announced)
    assert contents(path) == contents(net.line.written[1].path)
    assert near.fetcher.server.shelf.names() == [name]
