"""Tests that share an engine stay in one process: `make test` runs several."""

import os

import pytest


@pytest.mark.xdist_group("proof")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """A release of pytest that pytest-xdist does not know made a server of every process start for each group."""
    assert request.node.nodeid.endswith("@proof")
