"""Peers that say that they have a version, and do not give it in any useful time, hold nobody up."""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.workers.weights.fetch import download, progress
from tests.integration.fetch_parts import Version, make_version
from tests.integration.spoiling_proxy import SpoilingProxy
from tests.integration.test_fetching import Play, fetched, play, version

__all__ = ["play", "version"]


class Dripping:
    """A peer whose answers begin, and go on byte after byte until the test ends."""

    def __init__(self) -> None:
        self.num_connections = 0
        #: Called with each connection, before anything is answered.
        self.on_asked: Callable[[], object] = lambda: None
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def up(self) -> Iterator["Dripping"]:
        threading.Thread(target=self._accept, name="dripping", daemon=True).start()
        try:
            yield self
        finally:
            self._ended.set()
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_connections += 1
                self.on_asked()
                threading.Thread(target=self._answer, args=(near,), daemon=True).start()

    def _answer(self, near: socket.socket) -> None:
        asked = b""
        with near, contextlib.suppress(OSError):
            while b"\r\n\r\n" not in asked:
                asked += near.recv(4096)
            found = re.search(rb"bytes=(\d+)-(\d+)", asked)
            assert found is not None
            start, end = int(found[1]), int(found[2])
            head = b"HTTP/1.1 206 P\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n"
            near.sendall(head % (end - start + 1, start, end, end + 1))
            while not self._ended.wait(0.05):
                near.sendall(b"x")


@pytest.fixture
def dripping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dripping]:
    """It is never given up for what it gives in the mean: a range of it would take weeks."""
    monkeypatch.setattr(download, "SLOWEST_BYTES_PER_S", 0.01)
    monkeypatch.setattr(progress, "GRACE_S", 0.1)
    with Dripping().up() as peer:
        yield peer


async def test_what_slow_peers_have_comes_from_the_trainer(play: Play, version: Version, dripping: Dripping) -> None:
    trainer = play.trainer()
    trainer.offer(version.number, version.index, version.folder)
    for name in ("one", "two", "three", "four", "five"):
        play.has_all(version, name, dripping.url)
    worker = play.worker("a", stall_s=60.0)
    assert version.is_at(await fetched(worker, version))
    assert worker.from_trainer == version.num_bytes
    assert dripping.num_connections > 0


async def test_what_a_slow_peer_has_comes_from_another(play: Play, version: Version, dripping: Dripping) -> None:
    """The trainer is gone, and its offer with it; what the slow one was asked for must not be lost."""
    trainer, peer = play.trainer(), play.worker("peer")
    trainer.offer(version.number, version.index, version.folder)
    assert version.is_at(await fetched(peer, version))
    trainer.close()
    play.has_all(version, "slow", dripping.url)
    dripping.on_asked = lambda: play.client.delete(play.keys.relay(play.thing(version)))
    worker = play.worker("a", stall_s=60.0)
    assert version.is_at(await fetched(worker, version))
    assert worker.from_peers == version.num_bytes


async def test_a_peer_that_gave_other_bytes_is_not_asked_for_the_next_version(play: Play, tmp_path: Path) -> None:
    trainer, worker = play.trainer(), play.worker("a", fetches=1)
    proxy, spoilt = None, 0
    for number in (1, 2):
        made = make_version(tmp_path / "published", number)
        trainer.offer(number, made.index, made.folder)
        proxy = proxy or play.up(SpoilingProxy(play.offer(made).url, "change", after=400))
        play.offer(made)
        play.has_all(made, f"liar{number}", proxy.url)
        assert made.is_at(await fetched(worker, made))
        assert proxy.num_connections > 0
        assert spoilt in (0, proxy.num_connections), "another name, and the same address"
        spoilt = proxy.num_connections
