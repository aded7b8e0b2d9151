"""Fixtures that all tests share, and which tests stay together when several processes run them."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.integration.redis_fixtures import client, keys, redis_server
from tests.integration.servers import BOTH, NAMES, VARIABLE, choose_server

__all__ = ["client", "keys", "redis_server"]

#: What `make bubblewrap` unpacks, for machines that have no bwrap.
os.environ["PATH"] += f"{os.pathsep}{Path(__file__).parents[1] / '.bubblewrap/usr/bin'}"

pytest_plugins = ["tests.never_ending", "tests.plain_reports"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that workers run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _server_of_the_tests() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="penstock-server-") as folder:
        choose_server(Path(folder))
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of what a server must keep run on each server, unless one is chosen for all tests."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in BOTH and "redis_server" in metafunc.fixturenames and VARIABLE not in os.environ:
        metafunc.parametrize("redis_server", NAMES, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the session's engine go to one process, which starts it once; so do tests of a module's fixtures."""
    for item in items:
        if "engine_url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("engine"))
        elif item.get_closest_marker("xdist_group") is None and _has_module_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


def _has_module_fixture(item: pytest.Item) -> bool:
    found = getattr(item, "_fixtureinfo", None)
    return found is not None and any(one.scope == "module" for defs in found.name2fixturedefs.values() for one in defs)
