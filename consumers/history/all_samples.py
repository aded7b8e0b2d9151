"""Call the user function of ``hooks.all_samples`` with every sample, whatever its fate."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from penstock.config import Config
from penstock.history.row import WHOLE_JOB, SampleRow
from penstock.hooks.signatures import Hook, load_hook
from penstock.hooks.slime import args_of, number_of, of_row
from penstock.names import Lane
from penstock.system.user_code import staying_alive

log = logging.getLogger(__name__)

#: Seconds between checks for the return of the function.
POLL_S = 0.5


class AllSamples:
    """Call the hook of one recorder, if configured.

    Raises:
        ConfigError: the function cannot be imported, or has a wrong signature.
    """

    def __init__(self, config: Config) -> None:
        path = config.hooks.all_samples
        self._hook = load_hook("all_samples", path) if path is not None else None
        self._limit_s = config.hooks.timeout_s
        self._args = args_of(config)
        #: Set when a call that timed out returns.
        self._left: threading.Event | None = None

    def call(self, rows: Sequence[SampleRow], tick: Callable[[], bool]) -> bool:
        """Call the function with stored rows; log and return False if it raised or timed out.

        Blocks at most ``hooks.timeout_s``; after a timeout its thread keeps running, and rows are skipped until it
        ends.

        Args:
            tick: polled during the wait; true ends the wait.
        """
        hook = self._hook
        if hook is None or not rows:
            return True
        if self._left is not None and not self._left.is_set():
            log.warning("hook %s: an earlier call is still running, skipping %d samples", hook.name, len(rows))
            return False
        ended, raised = threading.Event(), list[BaseException]()

        def body() -> None:
            try:
                with staying_alive():
                    self._call(hook, rows)
            # Including SystemExit, which would end the thread silently.
            except BaseException as exc:
                raised.append(exc)
            ended.set()

        threading.Thread(target=body, name=hook.name, daemon=True).start()
        deadline = time.monotonic() + self._limit_s
        while not ended.wait(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if tick() or time.monotonic() >= deadline:
                log.warning(
                    "hook %s timed out after %g s; not waiting for its call with %d samples (first: %s/%d)",
                    hook.name, self._limit_s, len(rows), rows[0].job, rows[0].k,
                )  # fmt: skip
                self._left = ended
                return False
        if raised:
            log.warning("hook %s raised; its samples are in the history", hook.name, exc_info=raised[0])
        return not raised

    def _call(self, hook: Hook, rows: Sequence[SampleRow]) -> None:
        if not hook.form.is_slime:
            hook.function(list(rows))
            return
        trained = [row for row in rows if row.lane == Lane.TRAIN and row.k != WHOLE_JOB]
        groups = [[_sample(row) for row in some] for _, some in groupby(trained, key=lambda row: row.job)]
        if groups:
            hook.function(self._args, groups, None)


def _sample(row: SampleRow) -> Any:
    """Convert a row to slime's sample, with empty fields for data that is not recorded."""
    at = row.prompt_length
    return of_row(
        row,
        number_of(row.id),
        0 if row.tokens is None else len(row.tokens) - at,
        {"fate": str(row.fate), "reason": row.reason, "reward_info": row.reward_info},
        prompt=row.prompt,
        tokens=[] if row.tokens is None else row.tokens.tolist(),
        response=row.answer,
        label=row.label,
        loss_mask=None if row.loss_mask is None else [int(one) for one in row.loss_mask[at:]],
        rollout_log_probs=None if row.logprobs is None else row.logprobs[at:].tolist(),
    )
