"""Whatever fields a hash in Redis has, it is read, or refused by an error of penstock's own."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.buffer import cutter
from penstock.buffer.group import read_group
from penstock.buffer.main import Rollback
from penstock.buffer.state import State
from penstock.config.subscription import Definition
from penstock.console.cli.inspect import ledger_lines
from penstock.consumers.clock import Clock
from penstock.consumers.history.retired import group_of
from penstock.payloads.servers import parse as parse_servers
from penstock.protocol import snapshot, subs, waits
from penstock.protocol.burials import _lengths_of
from penstock.protocol.gate import read_gates
from penstock.protocol.position import Position
from penstock.protocol.presence import parse_workers
from penstock.protocol.scripts import loading_of
from penstock.protocol.transfers import enrolled
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from tests.hostile import HEADS, SAME, OneHash, is_read_or_refused, packed_near

Hash = dict[bytes, bytes]
KEYS = Keys("run")
DEFINED = {key.encode(): text.encode() for key, text in Definition().fields().items()}
MOVED = {b"cut": b"7", b"drop:stale": b"2", b"rejected_reward": b"-1.5", b"abandoned": b"1-2,4-5", b"repeats": b"3"}
GROUP = {
    b"st": b"ready",
    b"ln": b"train",
    b"n": b"2",
    b"c": b"2",
    b"seq": b"1",
    b"o": b"3",
    b"u:a": b"-2",
    b"b:a": b"1",
}


def refresh(raw: Hash) -> None:
    """What a leader does at each of its looks."""
    unused: Any = SimpleNamespace(lost_and_away=None)
    State(cast(Client, OneHash(raw)), KEYS, unused, unused).refresh()


def read_clock(raw: Hash) -> tuple[int, object]:
    control = SimpleNamespace(do=lambda work: work(OneHash(raw)))
    subscriber: Any = SimpleNamespace(control=control, keys=KEYS, name="actor")
    clock = Clock(subscriber, "policy", Path("weights"))
    return clock.read(), clock._abandoned()


#: What reads a hash -> one that it reads.
HASHES: dict[str, tuple[Callable[[Hash], object], Hash]] = {
    "definition": (lambda raw: Definition.read(raw, "a"), DEFINED),
    "position": (lambda raw: Position.read(raw, "a"), MOVED),
    "subscription": (lambda raw: subs._known(raw, "a", raw.get(b"held")), DEFINED | MOVED),
    "group": (lambda raw: read_group("j", raw, 1), GROUP),
    "group of a history": (
        lambda raw: group_of("d/0/1", raw, None),
        GROUP | {b"ta": b"1700", b"t0": b"1700", b"t1": b"1800", b"att": b"1"},
    ),
    "servers": (parse_servers, {b"rev": b"2", b"s:a": pack({"url": "redis://h", "state": "live"})}),
    "workers": (parse_workers, {b"w.1": pack({"name": "w.1", "at": 1.0})}),
    "enrolled": (enrolled, {b"st": b"open", b"m:w": pack({"worker": "w", "url": "http://h", "num_ranks": 1})}),
    "waits": (
        lambda raw: waits.waits_in(raw, ()),
        {b"trainer:a": pack({"cause": "x", "fields": {}, "since": 1.0, "at": 1.0})},
    ),
    "gates": (lambda raw: read_gates(cast(Client, OneHash(raw)), KEYS), {b"sub:a": b"1", b"rev": b"3", b"share": b"p"}),
    "presence": (lambda raw: snapshot._present(raw, "part"), {b"p": pack({"at": 1.0})}),
    "subscriptions": (lambda raw: snapshot._subs(cast(Client, OneHash(raw)), KEYS, raw), {b"sub:a": b"1"}),
    "clocks and subscriptions": (refresh, {b"version:policy": b"3", b"rev": b"2", b"sub:a": b"1"}),
    "counters": (lambda raw: Rollback(cast(Client, OneHash(raw)), KEYS).check(), {b"admitted": b"3", b"cut": b"1"}),
    "end of the data": (
        lambda raw: cutter._end(raw.get(b"train"), raw.get(b"end"), b"train"),
        {b"train": b"7", b"end": b"7"},
    ),
    "clock of a trainer": (read_clock, {b"version:policy": b"3", b"abandoned": b"1-2"}),
    "dead letter": (lambda raw: _lengths_of(raw, None), {b"id": b"j", b"body": pack({"id": "j", "n": 1})}),
    "loading": (
        lambda raw: [loading_of(name, data) for name, data in raw.items()],
        {b"w.1": pack({"at": 1.0, "versions": [1, 2]})},
    ),
}  # fmt: skip

FIELDS = st.sampled_from(
    [
        b"",
        b"\xff",
        b"s:\xff",
        b"m:\xff",
        b"sub:\xff",
        b"u:\xff",
        b"b:x",
        b"drop:\xff",
        b"rev",
        b"held",
        b"share",
        b"drop:x",
    ]
)
TEXTS = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"-1", b"1e9", b"nan", b"\xd9\xa1", b"1" * 400, b"0-", b"9-1,", b"1.", b"2" * 5000, *HEADS[:4]]),
)


@pytest.mark.parametrize("name", HASHES)
def test_a_hash_is_read_or_refused(name: str) -> None:
    decode, good = HASHES[name]
    decode(good)

    @SAME
    @given(
        less=st.sets(st.sampled_from(sorted(good))),
        more=st.dictionaries(st.one_of(FIELDS, st.sampled_from(sorted(good))), TEXTS, min_size=1, max_size=4),
    )
    def holds(less: set[bytes], more: Hash) -> None:
        is_read_or_refused(decode, {key: value for key, value in good.items() if key not in less} | more)

    holds()


#: What reads a hash that many write to, how many good entries it finds, and a good entry.
SHARED: dict[str, tuple[Callable[[Hash], int], bytes, bytes]] = {
    "servers": (
        lambda raw: len(parse_servers(raw).servers),
        b"s:good",
        pack({"url": "redis://h", "state": "live", "rev": 1}),
    ),
    "workers": (lambda raw: len(parse_workers(raw)), b"good", pack({"name": "good", "at": 1.0})),
    "waits": (
        lambda raw: len(waits.waits_in(raw, ())),
        b"good",
        pack({"cause": "x", "fields": {}, "since": 1.0, "at": 2.0**40}),
    ),
    **{
        what: (
            lambda raw, what=what: len(snapshot._present(raw, what)),  # type: ignore[misc]
            b"good",
            pack({"name": "a", "part": "buffer", "host": "h", "pid": 1, "at": 2.0**40}),
        )
        for what in ("trainer", "verifier", "part")
    },
}


@pytest.mark.parametrize("name", SHARED)
def test_one_bad_entry_keeps_nobody_from_the_others(name: str) -> None:
    read, field, good = SHARED[name]

    @SAME
    @given(bad=st.dictionaries(st.one_of(FIELDS, st.sampled_from([b"s:bad", b"bad"])), packed_near(BAD), max_size=4))
    def holds(bad: Hash) -> None:
        assert read(bad | {field: good}) >= 1

    holds()


#: Fields of all of them; what is changed in it is bad for some.
BAD = {
    "at": 1.0,
    "since": 1.0,
    "cause": "x",
    "fields": {},
    "rev": 1,
    "state": "live",
    "url": "redis://h",
    "step": 3,
    "pid": 1,
}


def test_an_entry_that_is_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert parse_servers({b"s:said-once": b"\xc1", b"s:\xfeonce": b"", b"rev": b"x"}).rev == "x"
    assert caplog.text.count("said-once") == 1
    assert "has a name that is not text" in caplog.text


def test_a_subscription_that_cannot_be_read_is_shown_as_such() -> None:
    (sub,) = snapshot._subs(cast(Client, OneHash({b"drop:x": b"many"})), KEYS, {b"sub:a": b"1", b"sub:\xff": b"1"})
    assert (sub["name"], sub["owned"]) == ("a", False)
    assert "Field drop:x of subscription 'a' is b'many'" in sub["unreadable"]
    assert ledger_lines([sub]) == [sub["unreadable"]]
