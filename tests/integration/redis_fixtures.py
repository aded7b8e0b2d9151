"""A real Redis for tests: one server per test session, one run (namespace) per test."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.protocol.scripts import ensure_lanes
from penstock.records.keys import Keys
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration.servers import binary_of


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    name = getattr(request, "param", None)
    server = RedisServer(Path(tmp_path_factory.mktemp("redis")), binary=binary_of(name) if name else None)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    client = connect(redis_server.url)
    yield client
    client.close()


@pytest.fixture
def keys(client: redis.Redis) -> Keys:
    keys = Keys("t" + uuid.uuid4().hex[:12])
    ensure_lanes(client, keys)
    return keys
