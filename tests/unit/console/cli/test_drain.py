"""``penstock payloads drain`` says how far it is, on stderr, and nothing of that where JSON was asked for."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.console import progress
from penstock.console.cli import payloads
from penstock.console.cli.command import Change
from penstock.payloads import servers
from penstock.payloads import store as stores


@pytest.mark.parametrize("as_json", [False, True])
def test_drain_says_how_far_it_is(as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    looks = iter(
        [servers.Drain(8, 0, ["w1"]), servers.Drain(10, 0, []), servers.Drain(4, 0, []), servers.Drain(0, 0, [])]
    )
    server = SimpleNamespace(name="p1", url="redis://nowhere", state=servers.ServerState.LIVE)
    states = []
    target: Any = SimpleNamespace(client=None, keys=None)
    monkeypatch.setattr(payloads, "_about", lambda *_: "p1")
    monkeypatch.setattr(payloads, "LOOK_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(servers, "set_state", lambda *args: states.append(args[-1]) or server)
    monkeypatch.setattr(servers, "drain", lambda *_: next(looks))
    monkeypatch.setattr(
        stores,
        "open_store",
        lambda *_: contextlib.closing(SimpleNamespace(check=lambda: None, close=lambda: None)).thing,
    )
    payloads.drain("p1", target, Change(as_json, yes=True))
    out, err = capsys.readouterr()
    assert states == [servers.ServerState.DRAINING, servers.ServerState.DRAINED]
    if as_json:
        assert "drained" in out
        assert err == ""
    else:
        assert "draining p1: 0 of 8 waiting for workers w1" in err
        assert "draining p1: 6 of 10 waiting for 4 payloads" in err
        assert "empty and may be stopped" in out
