"""Determine the fate of a retiring group's samples, and the batches that used them.

If subscriptions differ the first of these counts: payload lost, trained, masked, filtered, dropped.
"""

from penstock.consumers.history.retired import Retired
from penstock.history.row import SCORES, Fate, Use
from penstock.protocol.records.disposal import Disposal
from penstock.protocol.records.sample_meta import SampleMeta

_DISPOSALS = {reason.code: reason for reason in Disposal}
#: Fates by the group's reason to retire, if it does not depend on subscriptions.
_ENDS = {"cancelled": (Fate.CANCELLED, ""), "timed_out": (Fate.DROPPED, "timed_out"), "evicted": (Fate.EVICTED, "")}
#: Accounts of samples in a durable batch.
_USED = ("masked", "trained")
#: Reason of groups without a reader: a lane without a trainer, or a dropped subscription.
UNUSED = "unused"
#: Reasons that have other names in rows.
_REASONS = {"unwanted": UNUSED, "unknown": ""}


def uses_of_sample(group: Retired, meta: SampleMeta) -> list[Use]:
    """Return each batch that held the sample, by subscription."""
    found = []
    for sub, uses in sorted(group.uses.items()):
        for use in uses:
            bearing = [] if meta.k in group.lost else use.bearing(meta)
            oldest = min((version for version, _ in bearing), default=-1)
            staleness = use.staleness(oldest) if bearing else -1
            loss_tokens = sum(count for _, count in bearing)
            found.append(Use(group.job, meta.k, sub, use.batch, use.train_version, staleness, loss_tokens))
    return found


def fate_of(group: Retired, meta: SampleMeta | None, uses: list[Use]) -> tuple[Fate, str]:
    """Return fate and reason of a sample; ``meta`` None: of a job that ended without one."""
    if group.broken:
        return Fate.DROPPED, Disposal.UNREADABLE
    if meta is not None and meta.k in group.lost:
        return Fate.PAYLOAD_LOST, ""
    if group.account:
        return _booked(group, meta, uses)
    return _guessed(group, meta, uses)


def _booked(group: Retired, meta: SampleMeta | None, uses: list[Use]) -> tuple[Fate, str]:
    """Return the fate recorded in the ledger of tokens."""
    account, _, reason = group.account.partition(":")
    if account in _ENDS:
        return _ENDS[account]
    if group.lane in SCORES:
        return SCORES[group.lane], ""
    if account in _USED:
        durable = [use for use in uses if use.batch <= group.checkpoints.get(use.subscription, 0)]
        return _used(meta, durable) if durable or not uses else (Fate.MASKED, "")
    if account == Fate.PAYLOAD_LOST:
        return Fate.PAYLOAD_LOST, ""
    return (Fate.FILTERED if account == Fate.FILTERED else Fate.DROPPED), _REASONS.get(reason, reason)


def _guessed(group: Retired, meta: SampleMeta | None, uses: list[Use]) -> tuple[Fate, str]:
    """Derive the fate from the group's own fields, if it retired before the account was recorded."""
    if group.reason in _ENDS and not (group.reason == "cancelled" and uses):
        return _ENDS[group.reason]
    if group.lane in SCORES:
        return SCORES[group.lane], ""
    if uses or any(count > 0 for count in group.accounts.values()):
        return _used(meta, uses)
    return _unused(group)


def _used(meta: SampleMeta | None, uses: list[Use]) -> tuple[Fate, str]:
    # Without uses it was cut before the run recorded a history.
    bore_loss = any(use.loss_tokens for use in uses) if uses else meta is not None and meta.num_loss > 0
    return (Fate.TRAINED if bore_loss else Fate.MASKED), ""


def _unused(group: Retired) -> tuple[Fate, str]:
    given_up = [_DISPOSALS[code] for code in sorted(group.accounts.values()) if code in _DISPOSALS]
    if Disposal.FILTERED in given_up:
        return Fate.FILTERED, next(iter(sorted(group.filtered.values())), "")
    if Disposal.PAYLOAD_LOST in given_up:
        return Fate.PAYLOAD_LOST, ""
    return Fate.DROPPED, given_up[0] if given_up else UNUSED
