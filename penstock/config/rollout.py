"""Section ``rollout``: how a prompt is answered."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.config.reward import ScoringModelConfig
from penstock.config.sampling import Sampling
from penstock.config.section import Positive, Seconds, Section
from penstock.names import MAX_ANSWERS, ROUTED_EXPERTS


class RolloutConfig(Section):
    """Settings for generating answers."""

    #: Answers per prompt, which is the size of a group.
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 8
    #: Sampling parameters, under SGLang's names. top_p < 1, top_k, min_p, penalties and grammars are refused for
    #: training (docs/internals/truth.md, T7).
    sampling: Sampling = Field(default_factory=lambda: {"max_new_tokens": 256, "temperature": 1.0})
    #: Overrides of ``sampling`` for evaluations.
    eval_sampling: Sampling = Field(default_factory=lambda: {"temperature": 0.0})
    #: Maximum number of tokens of prompt and answer together.
    max_context_tokens: Positive = 32768
    #: Maximum number of turns of a sample with an environment.
    max_turns: Positive = 8
    #: Side arrays (``sample.sides``) that every training sample must have; a sample without them fails
    #: (docs/internals/truth.md, T17).
    sides: list[str] = Field(default_factory=list)
    #: A frozen model that scores the generated tokens of every training sample; the logprobs are the side array
    #: ``teacher_logprobs`` (docs/trainer.md).
    teacher: ScoringModelConfig | None = None
    #: A reference policy for ``trainer.kl``, instead of the first policy; its logprobs are ``reference_logprobs``.
    reference: ScoringModelConfig | None = None
    #: Time in seconds from a group's first lease until the group times out; None: never.
    group_timeout_s: Seconds | None = None
    #: Handling of a group that timed out: wait for it (and report the wait), train on its committed samples, or drop
    #: it.
    on_group_timeout: Literal["wait", "train", "drop"] = "wait"
    #: Minimum number of committed samples for training on a group that timed out.
    min_group: Positive = 2
    #: Time limit in seconds for a reset or a step of an environment; after it the job fails as ``environment_timeout``.
    environment_timeout_s: Seconds = 300.0
    #: Maximum number of tokens that are generated for a sample under one lease. The sample is then handed back with its
    #: prefix, without charging an attempt, and any worker continues it. Not allowed with routed_experts among
    #: ``sides``, or if a hook or an agent makes the samples. None: no limit.
    lease_tokens: Positive | None = None

    #: Compared with ``n`` only if it is given.
    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"min_group"})

    def scoring_models(self) -> dict[str, ScoringModelConfig]:
        """Return key of this section -> frozen model that scores every training sample."""
        found = {"teacher": self.teacher, "reference": self.reference}
        return {key: model for key, model in found.items() if model is not None}

    @model_validator(mode="after")
    def _check_lease_tokens(self) -> Self:
        if self.lease_tokens is not None and ROUTED_EXPERTS in self.sides:
            raise ValueError(
                f"lease_tokens hands prefixes on, and the {ROUTED_EXPERTS} of sides do not go with them: remove one of "
                "the two"
            )
        return self

    @model_validator(mode="after")
    def _check_group_timeout(self) -> Self:
        if self.on_group_timeout != "wait" and self.group_timeout_s is None:
            raise ValueError(
                f"on_group_timeout {self.on_group_timeout} requires a time limit: set group_timeout_s, or remove it"
            )
        if not self.is_default("min_group") and self.on_group_timeout != "train":
            raise ValueError(
                f"min_group {self.min_group} requires on_group_timeout: train, but on_group_timeout is "
                f"{self.on_group_timeout}: set it to train, or remove min_group"
            )
        return self
