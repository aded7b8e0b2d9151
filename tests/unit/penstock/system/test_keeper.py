"""The keeper of a worker, without processes: tests/integration/test_worker_ends.py has those."""

import os

import pytest

from penstock.system.keeper import keep, started_pid


def test_without_pidfds_as_on_macos_the_process_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    keep(1.0)
    assert started_pid() == os.getpid()
