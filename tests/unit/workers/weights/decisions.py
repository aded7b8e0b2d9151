"""Views and decisions as JSON, in which those of real runs are recorded (``recorded_decisions.json.xz``)."""

from typing import Any

from penstock.records.publication import Publication
from penstock.records.worker_causes import CohortRunning, EvaluationRunning
from penstock.workers.weights.select import Adopt, Decision, EngineView, Load, OtherEngine, Purpose, Restart, View, Wait

#: Characters of a digest that are kept.
DIGEST = 6


def view_to_json(view: View) -> dict[str, Any]:
    """Return the parts of a view that differ from those of an empty one."""
    engine, newest = view.engine, view.newest
    found = {
        "purpose": str(view.purpose),
        "engine": [engine.version, engine.rev, sorted(engine.offloaded), int(engine.is_lost), engine.partial],
        "loaded": view.loaded and _publication(view.loaded),
        "published": [_publication(one) for one in view.published],
        "abandoned": newest.abandoned if newest is not None else [],
        "sendable": view.is_sendable,
        "aside": sorted(view.set_aside),
        "failed": sorted(view.failed),
        "drains": view.drains,
        "bound": view.bound,
        "cohorts": list(view.cohorts),
        "others": sorted([one.version, *one.loading] for one in view.others),
        "evaluating": view.evaluating,
        "late": view.is_late,
    }
    return {name: value for name, value in found.items() if value}


def _publication(one: Publication) -> list[Any]:
    return [one.version, one.rev, int(one.is_whole), one.index[:DIGEST]]


def view_from_json(found: dict[str, Any]) -> View:
    """Return the view that was written so."""
    abandoned = found.get("abandoned", [])

    def publication(one: list[Any]) -> Publication:
        version, rev, is_whole, index = one
        path = f"/weights/{version}" if is_whole else ""
        return Publication("policy", version, "disk", path, rev=rev, index=index, abandoned=abandoned)

    version, rev, offloaded, is_lost, partial = found["engine"]
    loaded = found.get("loaded")
    return View(
        purpose=Purpose(found["purpose"]),
        engine=EngineView(version, rev, frozenset(offloaded), bool(is_lost), partial),
        loaded=publication(loaded) if loaded else None,
        published=tuple(map(publication, found.get("published", ()))),
        is_sendable=found.get("sendable", False),
        set_aside=frozenset(found.get("aside", ())),
        failed=frozenset(found.get("failed", ())),
        drains=found.get("drains", False),
        bound=found.get("bound", 0),
        cohorts=tuple(found.get("cohorts", ())),
        others=tuple(OtherEngine(one[0], tuple(one[1:])) for one in found.get("others", ())),
        evaluating=found.get("evaluating", 0),
        is_late=found.get("late", False),
    )


def decision_to_json(decision: Decision) -> list[str]:
    """Return a decision: its kind, and what it is about."""
    match decision:
        case Load(publication, is_sent):
            return ["load", publication.id, "send" if is_sent else "store"]
        case Adopt(publication):
            return ["adopt", publication.id]
        case Wait(cause):
            kinds = {CohortRunning: "cohort", EvaluationRunning: "evaluation"}
            return ["wait", kinds.get(type(cause), "folder")]
        case Restart():
            return ["restart"]
        case _:
            return ["keep"]
