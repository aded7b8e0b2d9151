"""``hooks.all_samples``: a user function that gets every sample, whatever became of it."""

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

#: Seconds between two checks whether the function has returned.
LOOK_S = 0.5


class AllSamples:
    """The hook of one recorder; does nothing if no hook is configured.

    Raises:
        ConfigError: the function cannot be imported, or has the wrong signature.
    """

    def __init__(self, config: Config) -> None:
        path = config.hooks.all_samples
        self._hook = load_hook("all_samples", path) if path is not None else None
        self._limit_s = config.hooks.timeout_s
        self._args = args_of(config)
        #: Set when a call that timed out returns.
        self._left: threading.Event | None = None

    def tell(self, rows: Sequence[SampleRow], tick: Callable[[], bool]) -> bool:
        """Call the function with rows that are on disk; return False and log if it raised or timed out.

        Blocks for at most ``hooks.timeout_s``; its thread is left running then, and until it ends rows are skipped.

        Args:
            tick: called during the wait; true ends it.
        """
        hook = self._hook
        if hook is None or not rows:
            return True
        if self._left is not None and not self._left.is_set():
            log.warning("%s: an earlier call is still running, skipping %d samples", hook.name, len(rows))
            return False
        ended, raised = threading.Event(), list[BaseException]()

        def body() -> None:
            try:
                with staying_alive():
                    self._call(hook, rows)
            # SystemExit too: it would end the thread without a message.
            except BaseException as exc:
                raised.append(exc)
            ended.set()

        threading.Thread(target=body, name=hook.name, daemon=True).start()
        deadline = time.monotonic() + self._limit_s
        while not ended.wait(min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            if tick() or time.monotonic() >= deadline:
                log.warning(
                    "%s: still runs after %g s, and is left behind with %d samples that begin with %s/%d",
                    hook.name, self._limit_s, len(rows), rows[0].job, rows[0].k,
                )  # fmt: skip
                self._left = ended
                return False
        if raised:
            log.warning("%s raised; its samples are in the history", hook.name, exc_info=raised[0])
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
    """Convert a row to slime's sample; fields that the history does not record are empty."""
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
