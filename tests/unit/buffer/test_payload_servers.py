"""Payload servers that do not answer, as the leader meets them."""

from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as NoAnswer

from buffer.payload_servers import PayloadServers
from penstock.config import RedisConfig
from penstock.payloads.folder import PayloadFolder


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
