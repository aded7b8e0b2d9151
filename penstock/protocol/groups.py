"""A completed group as filters see it: metadata and rewards, no tokens."""

from dataclasses import dataclass

from penstock.protocol.records.sample_meta import SampleMeta


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """The argument of a group filter.

    A filter is ``module:function`` of the user's: ``function(group) -> bool``, or ``(bool, reason)``; true keeps the
    group. It is called when the group completes, and again if another buffer becomes leader, so its result should
    depend on the group alone.
    """

    #: ``DATASET/EPOCH/INDEX``
    job: str
    #: train, eval or score
    lane: str
    #: Samples requested; ``samples`` has fewer if a partial group was closed.
    num_wanted: int
    #: Records of the committed samples, in the order of k.
    samples: tuple[SampleMeta, ...]

    @property
    def rewards(self) -> list[float]:
        """Reward of each sample."""
        return [sample.reward for sample in self.samples]

    @property
    def rewards_with_loss(self) -> list[float]:
        """Reward of each sample that bears loss; fully masked samples are left out."""
        return [sample.reward for sample in self.samples if sample.num_loss]

    @property
    def lengths(self) -> list[int]:
        """Generated tokens of each sample."""
        return [sample.num_generated for sample in self.samples]
