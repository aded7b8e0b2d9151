"""Application of subscriptions' filters to completed groups, and the ledger of dropped groups."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.buffer.filters import Filters, Verdict
from penstock.buffer.group import Group
from penstock.buffer.subscription import Subscription
from penstock.config.buffer import OnFilterError
from penstock.protocol import scripts
from penstock.protocol.groups import CompletedGroup
from penstock.protocol.keys import Keys
from penstock.protocol.position import total_reward
from penstock.protocol.records.disposal import Disposal
from penstock.protocol.records.sample_meta import SampleMeta
from penstock.protocol.scripts import Judged, Leadership, run
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Most reasons in one subscription's ledger; further ones count as ``other``.
MAX_REASONS = 64


class Judge:
    """Runs filters for the leader."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership, filters: Filters) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._filters = filters

    def judge(self, sub: Subscription, groups: Iterable[Group], metas: Mapping[str, Sequence[SampleMeta]]) -> None:
        """Run the filters of ``sub`` on groups; dropped groups are marked as used up.

        Args:
            metas: job -> records of its samples.

        Raises:
            LeadershipLost: another buffer leads; nothing was changed.
        """
        if sub.unfilterable or not sub.definition.filters:
            return
        told: list[Judged] = []
        for group in groups:
            if sub.covers(group) and not group.uses.get(sub.account):
                told += self._judge_one(sub, group, metas[group.job])
        self.tell(sub, told, {group.job: group for group in groups})

    def _judge_one(self, sub: Subscription, group: Group, records: Sequence[SampleMeta]) -> list[Judged]:
        """Filter one group; return what has to be recorded: nothing if it is kept, or its result is still open."""
        # A filter may change its argument; the records are needed for rows.
        samples = sorted((one.copy_for_user() for one in records), key=lambda sample: sample.k)
        reward = total_reward(sample.reward for sample in samples)
        verdict = self._filters.judge(
            sub.definition.filters, CompletedGroup(group.job, group.lane, group.wanted, tuple(samples))
        )
        if verdict.keep:
            return []
        if verdict.error:
            return self._take_error(sub, group, verdict, len(samples), reward)
        judged = Judged(group.job, verdict.reason, False, len(samples), reward)
        if sub.definition.keep_when_few:
            sub.held[group.job] = judged
            return []
        return [judged]

    def _take_error(self, sub: Subscription, group: Group, verdict: Verdict, num: int, reward: float) -> list[Judged]:
        if sub.definition.on_filter_error is OnFilterError.STOP:
            sub.stuck[group.job] = verdict.error
            return []
        drop = sub.definition.on_filter_error is OnFilterError.DROP
        return [Judged(group.job, verdict.reason if drop else "", True, num, reward)]

    def tell(self, sub: Subscription, told: Sequence[Judged], groups: Mapping[str, Group]) -> None:
        """Drop rejected groups and count raised filters. Raises LeadershipLost. Blocks for one round trip."""
        if not told:
            return
        told = _bounded(sub, told)
        run(self._client, scripts.judge(self._keys, self._lead, sub.name, told))
        position = sub.position
        for one in told:
            position.filter_raised += one.raised
            if not one.reason:
                continue
            name = f"filter/{one.reason}"
            position.dropped[name] = position.dropped.get(name, 0) + 1
            position.rejected_samples += one.num_samples
            position.rejected_reward = total_reward([position.rejected_reward, one.reward])
            if (group := groups.get(one.job)) is not None:
                group.uses[sub.account] = Disposal.FILTERED.code


def _bounded(sub: Subscription, told: Sequence[Judged]) -> list[Judged]:
    """Limit the reasons in the ledger, a hash in Redis, if a filter makes up a reason for every group."""
    known = {name for name in sub.position.dropped if name.startswith("filter/")}
    out = []
    for one in told:
        name = f"filter/{one.reason}"
        if one.reason and name not in known:
            if len(known) >= MAX_REASONS:
                one = replace(one, reason="other")
            else:
                known.add(name)
        out.append(one)
    return out
