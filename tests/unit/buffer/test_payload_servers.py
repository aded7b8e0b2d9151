"""Payload servers that do not answer, as the leader meets them."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as NoAnswer

from penstock.buffer.payload_servers import PayloadServers
from penstock.config import RedisConfig
from penstock.payloads.folder import PayloadFolder
from penstock.records.keys import Keys


def test_a_folder_that_is_silent_when_payloads_expire_is_away_and_the_others_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would have the leader begin anew, once in every minute."""
    asked: list[str] = []

    def expire(folder: PayloadFolder, prefix: str, ttl_s: float) -> int:
        asked.append(folder.path.name)
        if folder.path.name == "dead":
            raise NoAnswer("it does not answer")
        return 3

    monkeypatch.setattr(PayloadFolder, "expire", expire)
    folders = {name: f"file://{tmp_path}/{name}" for name in ("dead", "good")}
    unused: Any = None
    servers = PayloadServers(RedisConfig(url="redis://unused", payload_servers=folders), unused)

    assert [servers.expire("{run}:", 1.0) for _ in range(2)] == [3, 3]

    assert sorted(asked) == ["dead", "good", "good"]
    assert (servers.is_away("dead"), servers.is_away("good")) == (True, False)


class NoRecords:
    """A control Redis that knows no payload server."""

    def hget(self, key: str, field: str) -> bytes | None:
        return None

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {}


@pytest.mark.parametrize("call", ["scandir", "access"])
def test_a_look_finds_a_folder_away_that_payloads_cannot_expire_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As of another user's: else it is away once in a minute, answers again at once, and is asked in vain."""
    keys, control = Keys("run"), NoRecords()
    folder = PayloadFolder(f"file://{tmp_path}")
    folder.put([(keys.payload("d/0/0/0", "t"), b"x")])
    connection: Any = control
    servers = PayloadServers(
        RedisConfig(url="redis://unused", payload_servers={"theirs": folder.url}), connection, keys
    )

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if call == "access":
            return False
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        assert servers.expire(keys.prefix, 1.0) == 0
        assert servers.is_away("theirs")
        servers.away()["theirs"].next_try = 0.0
        servers.look()
        assert servers.is_away("theirs")
    servers.away()["theirs"].next_try = 0.0
    servers.look()
    assert not servers.is_away("theirs")
