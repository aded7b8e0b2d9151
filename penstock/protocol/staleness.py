"""Staleness rules of admission, cut and expiry (T1-T5).

    staleness of a token = number of versions in (version that generated it, train_version] that changed the weights

| rule | computed in | uses |
|---|---|---|
| admission (T3) | ``protocol/gate.py``; enforced by ``lua/admission.lua`` | ``places`` (``config/staleness.py``) |
| the cut (T4) | ``buffer/decision.py``; enforced by ``lua/batch.lua`` | ``floor``, ``overdue``, ``oldest_allowed`` |
| expiry | ``buffer/decision.py``, and the manifest for masked tokens | ``gives_up``, ``mask_below`` |

A rewind abandons versions: their policies no longer exist, so they do not age any token, and tokens generated with one
of them are not trained. The publication that follows a rewind may hold the weights of the restored version; it does
not age any token either.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config import Config, StalenessConfig, TrainerConfig
from penstock.config.staleness import Mode, OnExpiry, Sampler
from penstock.config.subscription import Asked, Definition, SubscriptionConfig, Unit
from penstock.errors import ConfigError
from penstock.records.publication import is_abandoned

#: The bound of a subscription without one.
UNBOUNDED = -1


@dataclass(frozen=True, slots=True)
class Policy:
    """The bound of staleness, and what happens to groups beyond it."""

    mode: Mode | Asked
    #: h: most versions between generating a token and the first optimizer step on it; below 0: unlimited.
    bound: int
    on_expiry: OnExpiry
    sampler: Sampler

    @classmethod
    def of(cls, staleness: StalenessConfig, *, filtered: bool = False) -> "Policy":
        """Make the policy of a configuration; a subscription made of it refuses what cannot work.

        ``filtered``: the subscription has filters.
        """
        rules = staleness.rules
        default = rules.filtered_sampler if filtered else rules.sampler
        return cls(staleness.mode, staleness.bound, staleness.on_expiry or rules.on_expiry, default)

    @property
    def waits(self) -> bool:
        """True if the cut waits for groups that are due first, so that none is disposed of (T4)."""
        return self.bound >= 0 and self.on_expiry == OnExpiry.WAIT

    @property
    def masks(self) -> bool:
        """True if tokens beyond the bound are masked, and their group is trained."""
        return self.bound >= 0 and self.on_expiry == OnExpiry.MASK

    def floor(self, lineage: "Lineage", train_version: int) -> int:
        """Return the oldest version that may bear loss at ``train_version``; 0 if any may."""
        return lineage.floor(train_version, self.bound) if self.bound >= 0 else 0

    def mask_below(self, floor: int) -> int:
        """Return the version below which tokens are masked in a batch with this ``floor``; -1: none are."""
        return floor if self.masks else -1

    def oldest_allowed(self, floor: int) -> int:
        """Return the oldest version that a group in a batch with this ``floor`` may hold, as cut checks; -1: any."""
        return floor if self.bound >= 0 and not self.masks else -1

    def gives_up(self, oldest: int, newest: int, floor: int) -> bool:
        """Return whether a group can no longer be trained.

        Args:
            oldest, newest: versions of its tokens; -1 if it has none, which never expires.
            floor: oldest version that may bear loss; it only rises.
        """
        # Masked token by token, a group expires only if none of its tokens would bear loss.
        youngest = newest if self.masks else oldest
        return 0 <= oldest < floor and 0 <= youngest < floor

    def overdue(
        self,
        *,
        lineage: "Lineage",
        train_version: int,
        group_budget: int,
        remaining: int,
        untrained: Mapping[int, int],
        in_batch: Mapping[int, int],
    ) -> list[tuple[int, int]]:
        """Return the versions d whose groups could not all be trained before they expire if this batch were cut (T4).

        For every living d within the bound, counting groups by their oldest version o, running ones included:

            untrained(o <= d) - in_batch(o <= d) <= (bound - lag(d)) * group_budget + remaining

        Args:
            group_budget: B, groups that one version consumes.
            remaining: R, groups that ``train_version`` still trains after this batch.
            untrained: oldest version -> groups not in any batch.
            in_batch: oldest version -> groups of the batch in question.

        Returns:
            (d, groups too many) for each, ascending; empty when the batch may be cut.
        """
        late = []
        for d in range(self.floor(lineage, train_version), train_version):
            if not lineage.lives(d):
                continue
            left = sum(c for o, c in untrained.items() if o <= d) - sum(c for o, c in in_batch.items() if o <= d)
            allowed = (self.bound - lineage.lag(d, train_version)) * group_budget + remaining
            if left > allowed:
                late.append((d, left - allowed))
        return late

    def definition(
        self,
        trainer: TrainerConfig,
        *,
        model: str,
        seed: int = 0,
        subscription: SubscriptionConfig | None = None,
        roles: Sequence[str] = (),
    ) -> Definition:
        """Make a trainer's subscription: this policy, changed by ``subscription``.

        A subscription that does not drive the clock is bounded only if it sets a bound. Raises ConfigError if the
        definition is invalid.
        """
        wanted = subscription or trainer.subscription
        given = wanted.model_dump(exclude_none=True)
        if wanted.size is None and wanted.unit is not Unit.GROUPS:
            raise ConfigError(f"A batch in {wanted.unit} needs its size: set trainer.subscription.size.")
        values = {
            "size": trainer.batch_groups,
            "seed": seed,
            "filters": trainer.filter.functions,
            "on_filter_error": trainer.filter.on_error,
            "keep_when_few": trainer.filter.keep_when_few,
            "roles": roles,
        }
        if wanted.driving or wanted.bound is not None:
            values |= {"model": model, "bound": self.bound}
        if wanted.driving:
            values |= {
                "mode": self.mode,
                "on_expiry": self.on_expiry,
                "sampler": self.sampler,
                "per_version": trainer.batches_per_version,
                "minibatches": trainer.minibatches,
                "over": trainer.over_sampling_groups,
                "min_first": trainer.min_groups_before_first_batch,
            }
        return Definition.of({**values, **given}, trainer.name)


def definition_of(
    config: Config, *, subscription: SubscriptionConfig | None = None, roles: Sequence[str] = ()
) -> Definition:
    """Make the subscription of a configuration's trainer; arguments and errors as for ``Policy.definition``."""
    policy = Policy.of(config.staleness, filtered=bool(config.trainer.filter.functions))
    return policy.definition(
        config.trainer, model=config.model.name, seed=config.seed, subscription=subscription, roles=roles
    )


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which versions are not abandoned, and which of these age tokens.

    Args:
        abandoned: ranges (first, last) of versions that a rewind abandoned.
        repeats: versions that published the weights of their predecessor again.
    """

    abandoned: tuple[tuple[int, int], ...] = ()
    repeats: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, abandoned: str, repeats: str = "") -> "Lineage":
        """Read ``3-5,9-9`` and ``6,10``."""
        spans = [part.split("-") for part in abandoned.split(",") if part]
        again = frozenset(int(part) for part in repeats.split(",") if part)
        return cls(tuple((int(first), int(last)) for first, last in spans), again)

    @classmethod
    def merge(cls, lineages: "Iterable[Lineage]") -> "Lineage":
        """Merge lineages: what any of them abandoned or repeated."""
        every = list(lineages)
        spans = sorted({span for one in every for span in one.abandoned})
        return cls(tuple(spans), frozenset().union(*(one.repeats for one in every)))

    def lives(self, version: int) -> bool:
        return not is_abandoned(version, self.abandoned)

    def ages(self, version: int) -> bool:
        """Return whether ``version`` makes tokens generated before it one step older."""
        return version not in self.repeats and self.lives(version)

    def lag(self, version: int, train_version: int) -> int:
        """Return the steps from ``version`` to ``train_version``; 0 for version -1 (no tokens)."""
        if version < 0:
            return 0
        return sum(1 for v in range(version + 1, train_version + 1) if self.ages(v))

    def uncounted(self, version: int, train_version: int) -> list[list[int]]:
        """Return the versions in (version, train_version] that age nothing, as ranges [first, last]."""
        ranges: list[list[int]] = []
        for v in range(version + 1, train_version + 1):
            if self.ages(v):
                continue
            if ranges and ranges[-1][1] == v - 1:
                ranges[-1][1] = v
            else:
                ranges.append([v, v])
        return ranges

    def floor(self, train_version: int, bound: int) -> int:
        """Return the oldest version whose lag at ``train_version`` is within ``bound``."""
        version = train_version
        left = bound
        while version > 0:
            if self.ages(version):
                if left == 0:
                    return version
                left -= 1
            version -= 1
        return 0


def train_version(clock: int, n: int, through: int, per_version: int) -> int:
    """Return the version that a trainer holds at the first optimizer step of batch ``n`` (T2).

    A trainer publishes after every batch whose number is a multiple of ``per_version``; a checkpoint between two
    publications does not change that.

    Args:
        clock: version of the last publication, which consumed batches up to ``through``.
        per_version: batches between two publications.
    """
    return clock + (n - 1) // per_version - through // per_version


def remaining_batches(n: int, per_version: int) -> int:
    """Return the number of batches that the version of batch ``n`` trains after it."""
    return per_version - 1 - (n - 1) % per_version
