"""Tests that share an engine stay in one process: `make test` runs several."""

import os

import pytest


@pytest.fixture(scope="module")
def shared() -> str:
    return "one for the module"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="of `make test`, which runs several processes")
def test_tests_of_one_fixture_stay_together(request: pytest.FixtureRequest, shared: str) -> None:
    """Else each process starts an engine of its own; pytest 9.2, and a mark set too late, brought that about."""
    assert request.node.nodeid.endswith("@tests/unit/test_test_groups.py"), "give --dist loadgroup"
