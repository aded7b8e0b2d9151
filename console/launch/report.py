"""Report a finished run: ``summary.json``, from the rows that its parts wrote."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.consumers.grpo.rows import Rows, of_steps, ratio
from penstock.names import __version__
from penstock.protocol.tokens import ledgers_of, of_training


def summarize(
    config: Config,
    rows: Rows,
    *,
    snapshot: dict[str, Any],
    audit: Any,
    seconds: float,
    setup: dict[str, str],
) -> dict[str, Any]:
    """Return the content of ``summary.json``.

    ``samples`` and ``tokens`` (generated ones) are those trained on, ``tokens_per_s`` is tokens over all seconds of
    the run, ``staleness_mean`` the mean over loss tokens, accuracies those of the first dataset under ``data.eval``.
    ``tokens_drawn`` counts tokens that workers reported for training, ``tokens_by_account`` splits them by outcome
    (I10), and ``goodput`` is the share that was trained on; ``tokens_unreported_at_most`` bounds the tokens that were
    generated but not reported, because an engine or worker was lost before.

    Args:
        snapshot: the last one (``penstock.protocol.snapshot``).
        audit: an AuditReport.
        seconds: time during which the run was up.
        setup: versions, including ``sglang``.
    """
    trained = of_steps(config, rows)
    counters = snapshot.get("counters") or {}
    updates = int(counters.get("weight_updates") or 0)
    drawn = of_training(ledgers_of(snapshot))
    return {
        "run": config.run,
        "engine": {"name": "sglang", "version": setup.get("sglang", "unknown")},
        "mode": config.staleness.mode,
        "bound": config.staleness.bound,
        **{key: trained[key] for key in ("steps", "samples", "tokens")},
        "seconds": round(seconds, 3),
        "tokens_per_s": round(trained["tokens"] / seconds, 3) if seconds > 0 else None,
        **{key: trained[key] for key in ("accuracy_first", "accuracy_last", "staleness_max", "staleness_mean")},
        "lost": int(audit.lost),
        "duplicated": int(audit.duplicated),
        "audit": "ok" if audit.ok else "; ".join(audit.differences),
        "weight_updates": updates,
        "weight_update_pause_s_mean": ratio(float(counters.get("weight_pause_us") or 0) / 1e6, updates),
        **{key: trained[key] for key in ("skipped_steps", "trainer_wait_share")},
        "goodput": ratio(drawn.trained, drawn.heard),
        "tokens_drawn": drawn.heard,
        "tokens_unreported_at_most": drawn.unheard * config.rollout.max_context_tokens,
        "tokens_by_account": {**drawn.accounts, "undecided": drawn.held},
        "setup": setup,
    }


def setup_versions(redis_version: str, engine_version: str) -> dict[str, str]:
    """Return the versions of the software used by the run."""
    return {
        "python": platform.python_version(),
        "redis": redis_version,
        "torch": _installed("torch"),
        "sglang": engine_version,
        "penstock": __version__,
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """Replace ``path`` atomically."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)
