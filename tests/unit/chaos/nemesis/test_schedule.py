"""A seed says what strikes and when, and a log that is played again says the same."""

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos.nemesis.act import Act, Facts, Ground, Kind
from tests.chaos.nemesis.counting import Strike
from tests.chaos.nemesis.schedule import Log, Replay, Schedule, acts_of
from tests.chaos.places import ROOT

GROUND = Ground(cluster=None)  # type: ignore[arg-type]


def _choose(ground: Ground, rng: Random) -> Facts:
    return {"target": rng.choice("abcdefgh"), "hold_s": rng.random()}


def _strike(ground: Ground, facts: Facts) -> None:
    raise AssertionError("not struck here")


KINDS = {name: Kind(_choose, _strike) for name in ("kill:worker", "stop:worker", "net:delay")}
KINDS["rare:one"] = Kind(_choose, _strike, weight=0.01)
KINDS["unkeyed:one"] = Kind(_choose, _strike, moments=())


def drawn(seed: int, number: int, possible: Any = tuple(KINDS)) -> list[Act]:
    schedule = Schedule(seed, KINDS)
    acts = [schedule.next(possible) for _ in range(number)]
    return [schedule.facts(act, GROUND) for act in acts if act]  # type: ignore[misc]


def test_a_seed_is_a_schedule() -> None:
    assert drawn(1, 50) == drawn(1, 50)
    assert drawn(1, 50) != drawn(2, 50)


def test_all_kinds_get_their_turn_by_their_weights() -> None:
    counts = Counter(act.kind for act in drawn(3, 60))

    assert set(counts) >= set(KINDS) - {"rare:one"}
    assert counts["rare:one"] <= 6
    assert max(counts.values()) - min(counts[name] for name in KINDS if name != "rare:one") <= 8


def test_what_is_not_possible_now_is_not_drawn() -> None:
    assert {act.kind for act in drawn(4, 20, ["net:delay", "gone:kind"])} == {"net:delay"}
    assert Schedule(4, KINDS).next([]) is None


def test_only_kinds_that_may_be_are_keyed_to_a_moment() -> None:
    acts = drawn(5, 200)

    assert {act.moment for act in acts if act.kind == "unkeyed:one"} == {""}
    keyed = [act.moment for act in acts if act.kind == "kill:worker"]
    assert {"", *KINDS["kill:worker"].moments} == set(keyed)
    assert 0 < sum(act.chained for act in acts) < 50


def test_a_log_is_played_again_act_for_act(tmp_path: Path) -> None:
    acts = drawn(6, 20)
    log = Log(tmp_path / "nemesis.jsonl", {"seed": 6})
    for act in acts:
        log.begin(act)
        log.end(Strike(act.number, act.kind, 0.0, 1.0, 3))
    log.close()

    replay = Replay(tmp_path / "nemesis.jsonl")
    again = [replay.facts(act, GROUND) for act in iter(partial(replay.next, ()), None)]

    assert again == acts


def test_an_act_is_in_the_log_before_it_is_done(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tests.chaos.nemesis.act import Act
from tests.chaos.nemesis.schedule import Log
log = Log(Path({str(tmp_path / "log")!r}), {{}})
log.begin(Act(1, "kill:worker", facts={{"parts": ["worker-0"]}}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, env={**os.environ})

    assert done.returncode == -signal.SIGKILL
    assert acts_of(tmp_path / "log") == [Act(1, "kill:worker", facts={"parts": ["worker-0"]})]


def test_a_torn_last_line_is_no_error_and_one_in_the_middle_is(tmp_path: Path) -> None:
    path, act = tmp_path / "log", replace(drawn(7, 1)[0], number=1)
    log = Log(path, {})
    log.begin(act)
    log.begin(act)
    log.close()
    whole = path.read_bytes()

    path.write_bytes(whole[:-10])
    assert acts_of(path) == [act]

    path.write_bytes(whole.replace(b'{"act"', b"{", 1))
    with pytest.raises(ValueError, match="Line 2 of"):
        acts_of(path)
