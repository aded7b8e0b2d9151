"""The commands of Redis that penstock sends are commands of redis-py."""

import inspect
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.client
import redis.client

from penstock.redis.commands import AsyncClient, AsyncPipeline, Client, Pipeline


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        (Client, redis.Redis),
        (Pipeline, redis.client.Pipeline),
        (AsyncClient, redis.asyncio.Redis),
        (AsyncPipeline, redis.asyncio.client.Pipeline),
    ],
)
def test_redis_py_has_every_command_with_the_arguments_that_are_named(protocol: Any, kind: type) -> None:
    commands = {name: verb for name, verb in inspect.getmembers(protocol, inspect.isfunction) if name[0] != "_"}
    assert commands
    for name, verb in commands.items():
        known = inspect.signature(getattr(kind, name)).parameters
        if any(one.kind == one.VAR_KEYWORD for one in known.values()):
            continue
        wanted = inspect.signature(verb).parameters.values()
        named = [one.name for one in wanted if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        assert not set(named) - known.keys(), name
