"""The commands that look into a run, over records that others wrote: a sentence or what else there is, no traceback."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import redis

from penstock.console.cli.main import execute
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play

ESCAPES = "\x1b]0;PWNED\x07\u202e"

Write = Callable[[redis.Redis, Keys], object]


def field(name: str, at: str | bytes, value: Any) -> Write:
    """Writes one field of a hash: bytes and text as they are, all else packed."""
    raw = value if isinstance(value, str | bytes) else pack(value)
    return lambda client, keys: client.hset(getattr(keys, name), at, raw)  # type: ignore[arg-type]


def fleet(**changes: Any) -> Write:
    state = {"at": time.time() + 3600, "host": "h", "groups": {}, "processes": [], "endpoints": {}, "autoscale": {}}
    return field("fleet", "state", state | changes)


def of_a_worker(client: redis.Redis, keys: Keys) -> None:
    record = {"name": "a.x", "at": time.time() + 3600, "engines": [{"url": "http://h:1"}]}
    client.hset(keys.workers, "a.x", pack(record))
    client.hset(keys.fleet, "engines:a", pack([{"url": ESCAPES}]))


def with_another_kind(client: redis.Redis, keys: Keys) -> None:
    """A worker whose own record has a kind of engine that no list takes."""
    record = {"name": "a.x", "at": time.time() + 3600, "engines": [{"url": "http://h:1", "worker_type": "huge"}]}
    client.hset(keys.workers, "a.x", pack(record))


def letter(client: redis.Redis, keys: Keys) -> None:
    client.xadd(keys.dead, {"id": b"a\xff", "attempts": "many"})


def group(job: str, fields: Mapping[str, str | int]) -> Write:
    return lambda client, keys: client.hset(keys.group(job), mapping=dict(fields))  # type: ignore[arg-type]


def another_type(name: str, *of: str) -> Write:
    """Puts text where penstock has a stream, a set or a hash."""

    def write(client: redis.Redis, keys: Keys) -> None:
        key = getattr(keys, name)
        client.set(key(*of) if of else key, "x")

    return write


#: What is written, what is asked, and what is said of it with which exit code.
CASES: dict[str, tuple[Write, list[str], int, str]] = {
    "fleet is a list": (field("fleet", "state", [1]), ["fleet", "ls"], 1, "is not a record that penstock wrote"),
    "fleet at text": (fleet(at="x"), ["fleet", "ls"], 1, "has an invalid field 'at': it should be a number."),
    "fleet without a host": (fleet(host=None), ["fleet", "ls"], 1, "has an invalid field 'host': it should be"),
    "fleet of numbers": (
        fleet(processes=[1]),
        ["fleet", "ls"],
        1,
        "field 'processes'.0: it should",
    ),
    "group of nothing": (
        fleet(groups={"m.g": {}}),
        ["fleet", "scale", "1"],
        1,
        "'worker_type': it is missing.",
    ),
    "autoscaler": (
        fleet(autoscale={"wanted": "x"}),
        ["fleet", "ls"],
        1,
        "field 'autoscale'.'group': it is missing.",
    ),
    "endpoint": (fleet(endpoints={"m": ESCAPES}), ["fleet", "ls"], 0, r"m: \x1b]0;PWNED\x07\u202e"),
    "members": (of_a_worker, ["fleet", "engines", "a"], 1, "The list of engines of worker a cannot be read: url:"),
    "engines": (with_another_kind, ["fleet", "engines", "a"], 1, "What worker a shows of its engines cannot be read"),
    "server": (
        field("servers", "s:a", {"state": "live", "url": 1}),
        ["payloads", "ls"],
        0,
        "payload servers: none",
    ),
    "address": (field("servers", "s:a", {"state": "live", "url": "x"}), ["payloads", "ls"], 0, "a"),
    "held": (field("held", "actor", {"groups": "x"}), ["subs", "ls"], 0, "has a field groups that it cannot have"),
    "sub's name": (field("subs", b"sub:\xff", "1"), ["subs", "ls"], 0, "actor"),
    "counter": (field("counters", "dead", "x"), ["status"], 0, "run "),
    "audit counter": (field("counters", "duplicated", "x"), ["audit"], 1, "The counter duplicated is b'x' in Redis"),
    "rollback": (field("counters", "rolled_back:a", "3"), ["status"], 0, "0 times (failover, power loss)"),
    "letter": (letter, ["dead", "ls"], 0, "a\\xff"),
    "few fields": (group("d/0/9", {"st": "queued"}), ["audit"], 1, "group d/0/9: it is not one that a verb wrote"),
    "no id": (group(ESCAPES, {"st": "queued", "n": 1}), ["audit"], 1, r"group \x1b]0;PWNED\x07\u202e: it has an id"),
    "other type": (lambda client, keys: client.set(keys.group("d/0/9"), "x"), ["audit"], 1, "group d/0/9: it is not"),
    "type of a stream": (another_type("dead"), ["dead", "ls"], 1, "than penstock gives it (XRANGE 'penstock:{"),
    "type of one of many": (another_type("delayed"), ["status"], 1, "than penstock gives it (Command # "),
    "type of a hash": (another_type("group", "d/0/9"), ["dead", "requeue", "d/0/9"], 1, "gives it (HGET 'penstock:{"),
    "wait": (field("waits", b"\xff", {"at": 0.0, "since": 0.0, "cause": 1}), ["why"], 0, ""),
    "drops": (lambda client, keys: client.hset(keys.sub("actor"), "drop:x", "y"), ["status"], 0, "Field drop:x of"),
    "jobs": (group("d/0/9", {"st": "queued"}), ["jobs", "ls"], 0, "d/0/9"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_record_is_a_sentence_or_left_out(
    case: str, redis_server: RedisServer, client: redis.Redis, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    write, arguments, code, said = CASES[case]
    play.subscribe(client, keys, size=2)
    write(client, keys)

    assert execute([*arguments, "--run", keys.run, "--redis", redis_server.url]) == code

    out, err = capfd.readouterr()
    assert said in out + err
    assert "errors.pydantic.dev" not in err
    assert all(char.isprintable() or char == "\n" for char in out + err)
