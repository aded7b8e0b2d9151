"""A run on one screen: its figures, its parts with the flows between them, and the cause of each wait."""

from collections.abc import Mapping
from typing import Any

from penstock.console.cli.inspect import ledger_lines, rollback_line
from penstock.console.read.why import Chain, chains
from penstock.console.web.looks import Look
from penstock.console.web.parts import edges_of, parts_of, place_of, place_of_cause
from penstock.consumers.grpo.rows import Row, Rows
from penstock.protocol.records.causes import Working
from penstock.protocol.snapshot import main_trainer
from penstock.protocol.tokens import ledgers_of, of_training

#: Most chains shown.
MAX_CHAINS = 20
#: Figures that the trainer's presence has earlier than its rows.
_OF_TRAINER = ("reward_mean", "staleness_mean", "staleness_max")


def overview(look: Look, rows: Rows, steps: int | None) -> dict[str, Any]:
    """Return the overview of a run whose Redis answers.

    Args:
        steps: ``trainer.steps``, used until the trainer reports how many it will make.
    """
    state = look.state
    found = [_chain(one) for one in chains(state)[:MAX_CHAINS]]
    return {
        "figures": _live_figures(state, rows, steps),
        "parts": parts_of(state, found, look.rooms),
        "edges": edges_of(state, look.rates),
        "chains": found,
        "notes": [line for line in (*ledger_lines(state["subs"]), rollback_line(state["counters"])) if line],
    }


def overview_of_files(rows: Rows, summary: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """Return the overview of a run that is over, from its files.

    Args:
        steps: ``trainer.steps``, used if the rows do not have the number of steps.
    """
    last = rows.steps[-1] if rows.steps else {}
    # A step has its batch's version; its end publishes the next one, which the last evaluation names.
    versions = [row["version"] for row in (last, *rows.evals[-1:]) if isinstance(row.get("version"), int)]
    total = last.get("total_steps", steps) or None
    shown = {**_step_figures(last, rows), "steps": total, "version": max(versions, default=None)}
    shown |= {
        "tokens_per_s": summary.get("tokens_per_s"),
        "goodput": summary.get("goodput"),
        "trainer_wait": summary.get("trainer_wait_share"),
    }
    shown |= {name: summary.get(name) for name in ("samples", "tokens", "weight_updates", "audit")}
    return {"figures": shown, "parts": [], "edges": [], "chains": [], "notes": []}


def _live_figures(state: Mapping[str, Any], rows: Rows, steps: int | None) -> dict[str, Any]:
    trainer = main_trainer(state)
    last = rows.steps[-1] if rows.steps else {}
    shown = _step_figures({**last, **{key: trainer[key] for key in trainer if key in _OF_TRAINER}}, rows)
    return shown | {
        "step": state["step"],
        "steps": trainer.get("total_steps", steps) or None,
        "version": state["version"],
        "tokens_per_s": sum(one.tokens_per_s for one in state["workers"]),
        "trainer_wait": trainer.get("wait_share"),
        "goodput": of_training(ledgers_of(state)).goodput,
        "ready": state["ready"],
        "dead": state["dead"],
    }


def _step_figures(last: Row, rows: Rows) -> dict[str, Any]:
    evaluated = rows.evals[-1] if rows.evals else {}
    return {
        "step": last.get("step"),
        "version": last.get("version"),
        "reward": last.get("reward_mean"),
        "held_out": evaluated.get("accuracy"),
        "staleness_mean": last.get("staleness_mean"),
        "staleness_max": last.get("staleness_max"),
    }


def _chain(chain: Chain) -> dict[str, Any]:
    """Return a chain with the part of each wait, and of its end; ``at_work``: whether it ends in a working part."""
    links = [{**link.to_map(), "part": place_of(link.who)} for link in chain.links]
    return {
        "links": links,
        "end": str(chain.end or ""),
        "part": (chain.end is not None and place_of_cause(chain.end)) or links[-1]["part"],
        "at_work": isinstance(chain.end, Working),
    }
