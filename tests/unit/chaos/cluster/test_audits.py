"""What an audit of a run under faults may say."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.cluster.audits import differing, may_tell_lost
from tests.chaos.nemesis import operator

LOST = "payloads: 30 committed samples lost theirs; they were trained with mask 0"


@pytest.mark.parametrize(
    ("found", "may", "words"),
    [
        ({"ok": True, "differences": []}, False, ""),
        ({"ok": False, "differences": [LOST]}, False, LOST),
        ({"ok": False, "differences": [LOST]}, True, ""),
        ({"ok": False, "differences": [LOST, "queue: a job"]}, True, "queue: a job"),
        ({"ok": False, "differences": []}, True, "it found a difference"),
    ],
)
def test_lost_payloads_are_no_difference_where_they_may_be_told(
    found: dict[str, object], *, may: bool, words: str
) -> None:
    assert differing(found, lost_is_known=may) == words


@pytest.mark.parametrize(
    ("kinds", "servers", "may"),
    [
        ([], 2, False),
        (["payloads:lost"], 2, True),
        (["redis:aof_cut"], 2, True),
        (["redis:aof_cut"], 0, False),
        (["kill:redis"], 2, False),
    ],
)
def test_lost_payloads_may_be_told_after_what_lost_them(
    tmp_path: Path, kinds: list[str], *, servers: int, may: bool
) -> None:
    assert may_tell_lost(cluster(tmp_path, kinds, servers=servers)) is may


@pytest.mark.parametrize("kinds", [[], ["payloads:lost"]])
def test_an_audit_in_between_is_judged_as_that_at_the_end(
    tmp_path: Path, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "command", lambda *_, **__: json.dumps({"ok": False, "differences": [LOST]}))
    ground: Any = SimpleNamespace(cluster=cluster(tmp_path, kinds, servers=2))
    strike = operator.kinds()["operator:audit"].strike
    if kinds:
        strike(ground, {})
    else:
        with pytest.raises(operator.OperatorError, match="30 committed samples"):
            strike(ground, {})


def cluster(path: Path, kinds: list[str], *, servers: int) -> Any:
    """A cluster that was struck so."""
    lines = []
    for number, kind in enumerate(kinds):
        lines += [
            {"act": {"number": number, "kind": kind, "facts": {"part": "payload-0"}}, "mono": 1},
            {"end": {"number": number, "ended": 2.0}},
        ]
    (path / "nemesis.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = SimpleNamespace(payload_servers=servers)
    return SimpleNamespace(folder=path, workload=workload)
