"""Decisions of the code before ``select_version``, recorded with their views in runs under faults and in tests.

It decided in eight places, by reads at different times. A decision was recorded if the view was the same before and
after it. Where the two differ, ``DIFFERENCES`` has the reason.
"""

import json
import lzma
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.workers.weights.select import Keep, View, select_version
from tests.unit.workers.weights.decisions import decision_to_json, view_from_json

DATA = Path(__file__).parent / "recorded_decisions.json.xz"
#: Fewest recorded decisions; identical ones are stored once, with their number.
FEWEST = 5000

#: Reason -> whether it explains what was decided then, in this view.
DIFFERENCES: dict[str, Callable[[View, list[str], list[str]], bool]] = {
    # The earlier code enrolled again for a send that it had been refused, and loaded the folder after that.
    "its folder is loaded at once": lambda view, then, now: (
        then[0] == now[0] == "load" and then[1] == now[1] and then[2] == "send" and not view.is_sendable
    ),
    # The earlier code looked for one every 0.5 s.
    "an earlier folder within the bound is loaded at once": lambda view, then, now: (
        then == ["wait", "folder"] and now[0] == "load" and view.bound > 0
    ),
    # The loop notes that, and takes it out of the view (``WeightLoop._view``); the recorded views do not have it.
    "its server could not take another number": lambda view, then, now: then[0] == "load" and now == ["adopt", then[1]],
    # The earlier code looked for these before a blocking read alone, up to a second later.
    "its publication was set aside": lambda view, then, now: (
        then == ["keep"] and now == ["restart"] and view.engine.id in view.set_aside
    ),
    # It was lost between the decision and the load, which came to nothing.
    "nothing is loaded into a lost engine": lambda view, then, now: (
        then[0] == "load" and view.engine.is_lost and now == ["keep"]
    ),
}


def recorded() -> list[tuple[dict[str, Any], list[str], int, int]]:
    """Views, decisions, whether the earlier code had not read the newest publication, and how often."""
    return [tuple(one) for one in json.loads(lzma.decompress(DATA.read_bytes()))]


def test_recorded_decisions_are_decided_again_or_their_difference_has_a_reason() -> None:
    found, agree, stale, unexplained = recorded(), 0, 0, []
    reasons: Counter[str] = Counter()
    for view_json, then, is_stale, count in found:
        view = view_from_json(view_json)
        now = decision_to_json(select_version(view))
        if now == then:
            agree += count
        elif is_stale:
            # It went on with the publication before, and would have decided about this one next.
            stale += count
        elif reason := next((name for name, explains in DIFFERENCES.items() if explains(view, then, now)), ""):
            reasons[reason] += count
        else:
            unexplained.append((view_json, then, now))
    assert unexplained == []
    total = sum(count for *_, count in found)
    assert total >= FEWEST
    assert agree + stale + reasons.total() == total
    assert agree >= 0.98 * total
    assert set(reasons) == set(DIFFERENCES), "each reason has its decisions"


def test_recorded_decisions_are_of_every_kind() -> None:
    kinds = Counter((then[0], then[-1]) if then[0] in ("wait", "load") else (then[0], "") for _, then, *_ in recorded())
    assert kinds.keys() >= {
        ("keep", ""),
        ("adopt", ""),
        ("restart", ""),
        ("load", "send"),
        ("load", "store"),
        ("wait", "cohort"),
        ("wait", "evaluation"),
        ("wait", "folder"),
    }


def test_recorded_views_never_lead_to_a_version_that_may_not_be_loaded() -> None:
    for view_json, *_ in recorded():
        view = view_from_json(view_json)
        decision, newest = select_version(view), view.newest
        publication = getattr(decision, "publication", None)
        if publication is None:
            continue
        assert newest is not None
        assert publication in (*view.published, view.loaded), "no version is ahead of the publications"
        assert not newest.abandons(publication.version)
        assert publication.id not in view.set_aside
        assert publication.version > view.engine.version or "weights" in view.engine.offloaded
        assert not isinstance(decision, Keep)
