"""A completed group as filters see it: metadata and rewards, never tokens."""

from dataclasses import dataclass

from penstock.protocol.records.sample_meta import SampleMeta


@dataclass(frozen=True, slots=True)
class CompletedGroup:
    """What a group filter is given.

    A filter is ``module:function`` of the user's: ``function(group) -> bool``, or ``(bool, reason)``; true keeps the
    group. It is asked when the group completes, and perhaps again when another buffer takes the lead, so its answer
    should depend on the group alone.
    """

    #: ``DATASET/EPOCH/INDEX``
    job: str
    #: train, eval or score
    lane: str
    #: Samples wanted; fewer are there where a partial group was closed.
    num_wanted: int
    #: Records of the samples that are there, in the order of k.
    samples: tuple[SampleMeta, ...]

    @property
    def rewards(self) -> list[float]:
        """Reward of each sample."""
        return [sample.reward for sample in self.samples]

    @property
    def rewards_with_loss(self) -> list[float]:
        """Reward of each sample that bears loss: those that are masked altogether are left out."""
        return [sample.reward for sample in self.samples if sample.num_loss]

    @property
    def lengths(self) -> list[int]:
        """Generated tokens of each sample."""
        return [sample.num_generated for sample in self.samples]
