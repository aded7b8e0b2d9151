"""Call the functions of section ``hooks`` for the reference trainer; their exceptions end the run with an error.

    batch ─> rewards ─> samples ─> postprocess ─> step ─> rollout_log       evaluations ─> eval_log, between two steps

``rewards`` and ``samples`` are called on every rank with the rows of the complete batch, and must return equal results,
which ranks compare before the step (T11, T14).
"""

import hashlib
import threading
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from penstock.config import Config
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.train_rows import Ask, asking
from penstock.errors import HookError, PenstockError
from penstock.hooks.signatures import Hook, load_hook
from penstock.hooks.slime import args_of, of_row
from penstock.records.job import JobFailure
from penstock.system.user_code import staying_alive
from penstock.text import format_exc

Rows = list[dict[str, Any]]


class TrainingHooks:
    """Call the hooks of one rank.

    Raises:
        ConfigError: a function cannot be imported, or has a wrong signature.
    """

    def __init__(self, config: Config) -> None:
        hooks = config.hooks
        self._hooks = {
            key: load_hook(key, path)
            for key in ("rewards", "samples", "postprocess", "rollout_log", "eval_log")
            if (path := getattr(hooks, key)) is not None
        }
        self._args: Namespace = args_of(config)
        self._lock = threading.Lock()
        self._evaluations: Rows = []

    def prepare(self, batch: Batch) -> str:
        """Apply the hooks' advantages and removed loss to ``batch``; return a digest of them, '' without hooks.

        Raises:
            HookError: a hook raised, or returned an invalid value.
        """
        if not {"rewards", "samples"} & self._hooks.keys():
            return ""
        digest = hashlib.blake2b(digest_size=16)
        if (hook := self._hooks.get("rewards")) is not None:
            self._checked(hook, lambda: batch.set_advantages(self._advantages(hook, batch)))
            digest.update(batch.advantages.tobytes())
        if (hook := self._hooks.get("samples")) is not None:
            removed = sorted(set(self._removed(hook, batch)))
            self._checked(hook, lambda: batch.remove(removed))
            digest.update(np.array(removed, np.int64).tobytes())
        return digest.hexdigest()

    @property
    def postprocess(self) -> Ask | None:
        """Return the function for ``GRPO.postprocess``; None without the hook."""
        hook = self._hooks.get("postprocess")
        return None if hook is None else asking(hook, self._args, _call)

    def trained(self, step: int, row: dict[str, Any], batch: Batch, seconds: float) -> bool:
        """Report a step to the hook; return whether it replaces the trackers. Raises HookError."""
        hook = self._hooks.get("rollout_log")
        if hook is None:
            return False
        if hook.form.is_slime:
            samples = _samples(batch)
            return bool(_call(hook, step, self._args, samples, dict(row), seconds))
        return bool(_call(hook, step, dict(row), batch))

    def note_evaluation(self, rows: Iterable[dict[str, Any]]) -> None:
        """Store rows for :meth:`tell_evaluations`; from any thread."""
        if "eval_log" in self._hooks:
            with self._lock:
                self._evaluations += rows

    def tell_evaluations(self) -> None:
        """Report the evaluations since the last call from this thread. Raises HookError."""
        with self._lock:
            rows, self._evaluations = self._evaluations, []
        for version, some in groupby(rows, key=lambda row: int(row["version"])):
            _call(self._hooks["eval_log"], version, list(some))

    def _advantages(self, hook: Hook, batch: Batch) -> Sequence[float]:
        if not hook.form.is_slime:
            found: Sequence[float] = _call(hook, batch)
            return found
        samples = _samples(batch)
        _, normalised = _call(hook, self._args, samples)
        return [float(value) for value in normalised]

    def _removed(self, hook: Hook, batch: Batch) -> list[int]:
        if not hook.form.is_slime:
            return [int(index) for index in _call(hook, batch)]
        samples = _samples(batch)
        _call(hook, self._args, [list(some) for _, some in groupby(samples, key=lambda one: one.metadata["job"])])
        return [index for index, one in enumerate(samples) if one.remove_sample]

    def _checked(self, hook: Hook, take: Any) -> None:
        """Raise HookError if a hook's result is invalid."""
        try:
            take()
        except HookError:
            raise
        except (PenstockError, TypeError, ValueError, OverflowError) as exc:
            raise HookError(
                JobFailure.HOOK_RAISED, f"{hook.name} gave what cannot be taken: {format_exc(exc)}"
            ) from exc


def check_alike(digests: Sequence[str]) -> None:
    """Raise HookError if hooks returned different results for one batch on different ranks."""
    if len(set(digests)) > 1:
        raise HookError(
            JobFailure.HOOK_RAISED,
            "hooks.rewards or hooks.samples answered differently on different ranks: what they give must follow from "
            "the batch alone.",
        )


def _call(hook: Hook, *values: Any) -> Any:
    try:
        with staying_alive():
            return hook.function(*values)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        raise HookError(JobFailure.HOOK_RAISED, f"{hook.name} raised {format_exc(exc)}.") from exc


def _samples(batch: Batch) -> list[Any]:
    """Return slime's samples of a batch without tokens and texts, which a rank has only for its own share."""
    return [of_row(row, i, row.length - row.prompt_length, rollout_id=i) for i, row in enumerate(batch.all_rows)]
