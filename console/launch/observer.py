"""Observe a run through its Redis: each second for the live view and ``queue.jsonl``, finally for ``summary.json``."""

import json
import logging
import platform
import socket
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import redis

from penstock.config import Config
from penstock.console.launch.live import Live
from penstock.console.launch.preflight import engine_version
from penstock.consumers.grpo.rows import Rows, of_steps, ratio, read_rows
from penstock.errors import DiskFull, ProtocolError
from penstock.names import Lane, __version__
from penstock.protocol import user_failures
from penstock.protocol.presence import read_workers
from penstock.protocol.snapshot import jobs_to_train
from penstock.protocol.tokens import ledgers_of, of_training
from penstock.records.keys import Keys
from penstock.redis.connect import connect, translate
from penstock.system.disk import append, is_full
from penstock.system.run_folder import RunFolder

#: Longest wait for an answer, so that observing does not block the launcher for long.
TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Observer:
    """Observer of one run; ``config.redis.url`` is set. Connects, and raises the errors of ``connect``."""

    def __init__(self, config: Config, folder: RunFolder, live: Live) -> None:
        assert config.redis.url is not None
        self.config = config
        self.folder = folder
        self.live = live
        self.keys = Keys(config.run)
        self.url = config.redis.url
        self.client = connect(self.url, timeout_s=TIMEOUT_S)
        #: What is known of the run: its place, and after its end the content of ``summary.json``.
        self.summary: dict[str, Any] = {}
        self._evals_bytes = 0
        self._evaluation: dict[str, Any] | None = None

    def look(self) -> None:
        """Take a snapshot, show and record it; an unreachable Redis is reported. Blocks for ``TIMEOUT_S``."""
        from penstock.protocol.snapshot import snapshot

        try:
            seen = snapshot(self.client, self.keys)
        except redis.RedisError as exc:
            log.warning("%s", translate(exc, self.url))
            return
        except ProtocolError as exc:
            # A foreign process wrote invalid records: keep watching the children.
            log.warning("this second is not shown: %s", exc)
            return
        self.summary = {key: seen.get(key) for key in ("version", "step", "ready", "dead")}
        try:
            append(self.folder.path / "queue.jsonl", json.dumps(queue_row(seen)) + "\n")
        except (DiskFull, OSError) as exc:
            if not is_full(exc):
                raise
            # Keep watching the children: they matter more than a row of queue.jsonl.
            log.warning("this second is not in queue.jsonl: %s", exc)
        self.live.update(seen, self._last_evaluation())

    def too_many_died(self) -> str:
        """Return why the run should end, if user code fails too many jobs; else ''. Blocks for ``TIMEOUT_S``."""
        try:
            failing = user_failures.too_many(self.client, self.keys, self.config.reward)
        except redis.RedisError:
            return ""
        return failing.why if failing is not None else ""

    def still_shows(self, pid: int | None) -> bool:
        """Return whether a worker of this machine with this pid exited without cleaning up: its presence still exists.

        A worker that exits properly removes it, whatever its exit code; user code may exit with code 0 at any time.
        True if Redis does not answer. Blocks for ``TIMEOUT_S``.
        """
        try:
            workers = read_workers(self.client, self.keys)
        except redis.RedisError:
            return True
        return any((worker.pid, worker.host) == (pid, socket.gethostname()) for worker in workers)

    def data_ended(self) -> bool:
        """Return whether the trainer knows that the data has ended (``data.epochs``). Blocks for ``TIMEOUT_S``."""
        try:
            return self.client.hget(self.keys.sub(self.config.trainer.name), "ended") is not None
        except redis.RedisError:
            return False

    def report(self, seconds: float) -> None:
        """Write ``summary.json``, and show the summary.

        Raises:
            QueueUnavailable: Redis does not answer.
        """
        from penstock.protocol.audit import audit
        from penstock.protocol.snapshot import snapshot

        try:
            info = self.client.info("server")
            with connect(self.url) as client:
                summary = summarize(
                    self.config,
                    read_rows(self.folder.path),
                    snapshot=snapshot(client, self.keys),
                    audit=audit(client, self.keys),
                    seconds=seconds,
                    setup=setup_versions(str(info["redis_version"]), engine_version(self.config)),
                )
        except redis.RedisError as exc:
            raise translate(exc, self.url) from exc
        summary["data_ended"] = self.data_ended()
        self.summary = summary
        write_summary(summary, self.folder.path / "summary.json")
        self.live.event(summary_line(summary))
        self.live.event(f"summary.json, config.yaml and logs are in {self.folder.path}")

    def _last_evaluation(self) -> dict[str, Any] | None:
        path = self.folder.path / "eval.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._evals_bytes:
            self._evals_bytes = size
            self._evaluation = next(reversed(read_rows(self.folder.path).evals), None)
        return self._evaluation


def summary_line(summary: Mapping[str, Any]) -> str:
    """Return the figures of a summary; of maps only entries that are not 0."""
    shown = {key: value for key, value in summary.items() if key not in ("run", "setup", "engine")}
    return "  ".join(f"{key} {_in_words(value)}" for key, value in shown.items())


def _in_words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "-" if value is None else str(value)
    return ", ".join(f"{name} {count}" for name, count in value.items() if count) or "none"


def queue_row(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ``queue.jsonl``: groups by state, running samples, tokens/s, tokens generated and trained.

    ``queued``, ``leased`` and ``ready`` count training groups, ``eval_...`` those of lane eval; ``time_s`` is Unix
    time.
    """
    evaluated = (snapshot.get("lanes") or {}).get(Lane.EVAL) or {}
    drawn = of_training(ledgers_of(snapshot))
    workers = snapshot.get("workers") or []
    return {
        "time_s": round(time.time(), 3),
        **{key: snapshot.get(key) for key in ("version", "step", "ready", "kept", "inflight", "delayed", "dead")},
        **{what: jobs_to_train(snapshot, what) for what in ("queued", "leased")},
        **{f"eval_{what}": evaluated.get(what, 0) for what in ("queued", "leased")},
        "eval_ready": (snapshot.get("ready_lanes") or {}).get(Lane.EVAL, 0),
        "tokens_per_s": sum(worker.tokens_per_s for worker in workers),
        "running": sum(worker.running for worker in workers),
        "tokens_heard": drawn.heard,
        "tokens_trained": drawn.trained,
    }


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
