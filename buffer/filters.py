"""Filter completed groups per subscription before they enter a batch (dynamic sampling).

    group complete ─> filters in order ─> keep: into the pool
                                      ├─> reject: drop with its reason and free its place at the gate (refill);
                                      │           or hold it, if too few might remain
                                      └─> exception: keep | drop | stop, always counted

A user's filter runs in its own thread with a timeout, so that it cannot delay the renewal of the buffer's lease. It
gets metadata and rewards; the buffer never reads payload bytes.
"""

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.buffer.group import Group, deviation
from penstock.buffer.subscription import Subscription
from penstock.config.buffer import OnFilterError
from penstock.errors import ConfigError
from penstock.hooks.signatures import check_hook
from penstock.protocol import scripts
from penstock.protocol.position import total_reward
from penstock.protocol.scripts import Judged, Leadership, run
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.sample_meta import CompletedGroup, SampleMeta
from penstock.redis.commands import Client
from penstock.system.user_code import find, staying_alive
from penstock.text import format_exc, safe_repr

log = logging.getLogger(__name__)

FilterFunction = Callable[[CompletedGroup], Any]

#: Rewards of a group differ when their standard deviation is above this.
MIN_STD = 1e-6
#: Time limit of one filter on one group; exceeding it counts as an exception.
TIMEOUT_S = 1.0
#: Reason of a group that is dropped because its filter raised.
RAISED = "raised"
#: Reason of a group without a sample that bears loss.
NO_LOSS = "no_loss"
#: Reason if a filter returns none, or one that is not a short word.
REJECTED = "rejected"

_REASON = re.compile(r"[A-Za-z0-9_.+-]{1,48}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the filters for one group."""

    keep: bool
    #: Why it was rejected; '' if it is kept.
    reason: str = ""
    #: Exception of a filter, as text; '' without one.
    error: str = ""


KEEP = Verdict(True)


def nonzero_std(group: CompletedGroup) -> tuple[bool, str]:
    """Keep groups whose rewards differ; equal rewards make every advantage 0 (DAPO, arXiv:2503.14476, 3.2).

    The standard deviation (population) of the samples that bear loss must be above 1e-6: a masked sample has no
    gradient and does not affect the advantages of the others (consumers/batch/advantages.py). The reason contains the
    reward that they share.

    Raises:
        ConfigError: groups have one sample, which has no deviation, so every group would be dropped.
    """
    if group.num_wanted < 2:
        raise ConfigError(f"nonzero_std drops every group of n = {group.num_wanted}: leave it out, or raise n.")
    rewards = group.rewards_with_loss
    if not rewards:
        return False, NO_LOSS
    return deviation(rewards) > MIN_STD, f"zero_std_{rewards[0]:.1f}"


BUILT_IN: dict[str, FilterFunction] = {"nonzero_std": nonzero_std}


def load_filter(name: str) -> FilterFunction:
    """Load a built-in filter, or ``module:function``. Raises ConfigError. Imports the user's module."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(f"filter {name!r} is not a filter: use {', '.join(BUILT_IN)} or module:function.")
    found = find(name, "filter")
    if not callable(found):
        raise ConfigError(f"filter {name} is not a function.")
    check_hook("trainer.filter.functions", name, found)
    return found  # type: ignore[no-any-return]


class Filters:
    """Load and run the filters that this buffer may run.

    Args:
        allowed: ``module:function`` names in the buffer's configuration. A subscription's definition comes from
            Redis, and must not choose which code this process imports.

    Raises:
        ConfigError: one of ``allowed`` cannot be loaded.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._functions = dict(BUILT_IN) | {name: load_filter(name) for name in allowed}
        self._thread: _Thread | None = None

    def unknown(self, names: Sequence[str]) -> str:
        """Return the first of ``names`` that this buffer may not run; '' if it may run all."""
        return next((name for name in names if name not in self._functions), "")

    def judge(self, names: Sequence[str], group: CompletedGroup) -> Verdict:
        """Call filters in order until one rejects; never raises. Blocks for at most ``TIMEOUT_S`` each."""
        for name in names:
            verdict = self._run(name, group)
            if verdict is not KEEP:
                return verdict
        return KEEP

    def _run(self, name: str, group: CompletedGroup) -> Verdict:
        function = self._functions[name]
        try:
            answer = function(group) if name in BUILT_IN else self._in_thread(function, group)
            keep, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
            if type(keep).__name__ not in ("bool", "bool_"):  # numpy's bool is not a subclass of Python's
                raise TypeError(f"it returned {safe_repr(answer)}, not a bool or (bool, reason)")
        except Exception as exc:
            log.warning("filter %s raised on group %s", name, group.job, exc_info=exc)
            return Verdict(False, RAISED, f"filter {name} raised on group {group.job}: {format_exc(exc)}")
        return KEEP if keep else Verdict(False, clean_reason(reason))

    def _in_thread(self, function: FilterFunction, group: CompletedGroup) -> Any:
        if self._thread is None:
            self._thread = _Thread()
        try:
            return self._thread.call(function, group, TIMEOUT_S)
        except TimeoutError:
            # A thread cannot be killed: abandon it, and start another for the next call.
            self._thread = None
            raise TimeoutError(f"it took longer than {TIMEOUT_S:g} s") from None


class _Thread:
    """Daemon thread that calls one function at a time."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[FilterFunction, CompletedGroup]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="filter", daemon=True).start()

    def call(self, function: FilterFunction, group: CompletedGroup, timeout_s: float) -> Any:
        """Call a function; raise what it raises, or TimeoutError after ``timeout_s``."""
        self._calls.put((function, group))
        try:
            done, value = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if not done:
            raise value
        return value

    def _work(self) -> None:
        while True:
            function, group = self._calls.get()
            try:
                with staying_alive():
                    self._answers.put((True, function(group)))
            except Exception as exc:
                self._answers.put((False, exc))
            except BaseException as exc:  # a filter that calls sys.exit must not silently end the thread
                self._answers.put((False, RuntimeError(format_exc(exc))))


def clean_reason(reason: Any) -> str:
    """Return ``reason`` if it is a short word, else ``rejected``, for the ledger."""
    return reason if isinstance(reason, str) and _REASON.fullmatch(reason) else REJECTED


#: Most reasons in one subscription's ledger; others count as ``other``.
MAX_REASONS = 64


class GroupFilter:
    """Run the filters of subscriptions for the leader."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership, filters: Filters) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._filters = filters

    def apply(self, sub: Subscription, groups: Iterable[Group], metas: Mapping[str, Sequence[SampleMeta]]) -> None:
        """Run the filters of ``sub`` on groups, and mark dropped groups as used up.

        Args:
            metas: job -> records of its samples.

        Raises:
            LeadershipLost: another buffer leads; nothing was changed.
        """
        if sub.unfilterable or not sub.definition.filters:
            return
        rejected: list[Judged] = []
        for group in groups:
            if sub.covers(group) and not group.uses.get(sub.account):
                rejected += self._apply_one(sub, group, metas[group.job])
        self.record(sub, rejected, {group.job: group for group in groups})

    def _apply_one(self, sub: Subscription, group: Group, records: Sequence[SampleMeta]) -> list[Judged]:
        """Filter one group; return the result to record: [] if the group is kept, or held until it is needed."""
        # Copy the records: a filter may modify its argument, and rows are made from them.
        samples = sorted((one.copy_for_user() for one in records), key=lambda sample: sample.k)
        reward = total_reward(sample.reward for sample in samples)
        verdict = self._filters.judge(
            sub.definition.filters, CompletedGroup(group.job, group.lane, group.wanted, tuple(samples))
        )
        if verdict.keep:
            return []
        if verdict.error:
            return self._handle_error(sub, group, verdict, len(samples), reward)
        judged = Judged(group.job, verdict.reason, False, len(samples), reward)
        if sub.definition.keep_when_few:
            sub.held[group.job] = judged
            return []
        return [judged]

    def _handle_error(self, sub: Subscription, group: Group, verdict: Verdict, num: int, reward: float) -> list[Judged]:
        if sub.definition.on_filter_error is OnFilterError.STOP:
            sub.stuck[group.job] = verdict.error
            return []
        drop = sub.definition.on_filter_error is OnFilterError.DROP
        return [Judged(group.job, verdict.reason if drop else "", True, num, reward)]

    def record(self, sub: Subscription, judged: Sequence[Judged], groups: Mapping[str, Group]) -> None:
        """Drop rejected groups and count exceptions of filters. Raises LeadershipLost. Blocks for one round trip."""
        if not judged:
            return
        judged = _limit_reasons(sub, judged)
        run(self._client, scripts.judge(self._keys, self._lead, sub.name, judged))
        position = sub.position
        for one in judged:
            position.filter_raised += one.raised
            if not one.reason:
                continue
            name = f"filter/{one.reason}"
            position.dropped[name] = position.dropped.get(name, 0) + 1
            position.rejected_samples += one.num_samples
            position.rejected_reward = total_reward([position.rejected_reward, one.reward])
            if (group := groups.get(one.job)) is not None:
                group.uses[sub.account] = Disposal.FILTERED.code


def _limit_reasons(sub: Subscription, judged: Sequence[Judged]) -> list[Judged]:
    """Limit the number of reasons in the ledger, a hash in Redis: a filter may return a new one for every group."""
    known = {name for name in sub.position.dropped if name.startswith("filter/")}
    out = []
    for one in judged:
        name = f"filter/{one.reason}"
        if one.reason and name not in known:
            if len(known) >= MAX_REASONS:
                one = replace(one, reason="other")
            else:
                known.add(name)
        out.append(one)
    return out
