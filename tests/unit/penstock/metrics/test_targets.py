"""The file that tells Prometheus where parts are: those that are there, at addresses that may be scraped."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.metrics.server import targets, write_targets
from penstock.records.codec import pack
from penstock.records.keys import Keys


class Pipeline:
    def __init__(self, hashes: dict[str, dict[bytes, bytes]]) -> None:
        self.hashes = hashes
        self.asked: list[str] = []

    def pipeline(self, *, transaction: bool) -> "Pipeline":
        return self

    def hgetall(self, name: str) -> None:
        self.asked.append(name)

    def execute(self) -> list[dict[bytes, bytes]]:
        return [self.hashes[name] for name in self.asked]


def found(workers: dict[str, dict[str, Any]], parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    keys = Keys("r")
    hashes = {
        name: {field.encode(): pack({"at": time.time(), **record}) for field, record in records.items()}
        for name, records in ((keys.workers, workers), (keys.parts, parts))
    }
    return targets(Pipeline(hashes), keys)  # type: ignore[arg-type]


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"part": "trainer", "host": "h", "pid": 1, "name": "actor", "metrics": url} | more


def test_parts_and_workers_that_serve_are_listed_with_their_labels() -> None:
    workers = {"w-0.abc": {"metrics": "http://10.0.0.1:90/metrics"}, "w-1.abc": {}}
    parts = {"t": part("http://[fd00::7]:91/metrics"), "b": part("", part="buffer")}

    assert found(workers, parts) == [
        {"targets": ["10.0.0.1:90"], "labels": {"run": "r", "part": "worker", "name": "w-0"}},
        {"targets": ["[fd00::7]:91"], "labels": {"run": "r", "part": "trainer", "name": "actor"}},
    ]


def test_who_is_silent_is_not_scraped() -> None:
    old = {"at": time.time() - 60}

    assert found({"w.a": {"metrics": "http://h:1/metrics", **old}}, {"t": part("http://h:2/metrics", **old)}) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254:80/latest/meta-data",
        "https://h:1/metrics",
        "http://h/metrics",
        "http://u:p@h:1/metrics",
        "http://h:99999/metrics",
        "http://h:1/metrics\nx",
    ],
)
def test_an_address_that_no_part_shows_is_left_out(url: str) -> None:
    assert found({}, {"t": part(url)}) == []


def test_the_file_is_replaced_only_where_it_changed_and_others_may_read_it(tmp_path: Path) -> None:
    path, groups = tmp_path / "targets.json", [{"targets": ["h:1"], "labels": {}}]

    assert write_targets(path, groups)
    before = path.stat().st_ino
    assert not write_targets(path, groups)

    assert path.stat().st_ino == before
    assert json.loads(path.read_text()) == groups
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert write_targets(path, [])
