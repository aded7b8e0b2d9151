"""Section ``rollout``: how a prompt is answered."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.config.reward import ScoringModelConfig
from penstock.config.sampling import Sampling
from penstock.config.section import Positive, Seconds, Section
from penstock.names import MAX_ANSWERS, ROUTED_EXPERTS


class RolloutConfig(Section):
    """How answers are generated."""

    #: Answers per prompt (size of a group).
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 8
    #: SGLang names. top_p < 1, top_k, min_p, penalties and grammars are refused for training
    #: (docs/internals/truth.md, T7).
    sampling: Sampling = Field(default_factory=lambda: {"max_new_tokens": 256, "temperature": 1.0})
    #: Overrides of ``sampling`` for evaluations.
    eval_sampling: Sampling = Field(default_factory=lambda: {"temperature": 0.0})
    #: Most tokens of prompt and answer together.
    max_context_tokens: Positive = 32768
    #: Most turns of a sample with an environment.
    max_turns: Positive = 8
    #: Side arrays (``sample.sides``) that every sample of training must have; one without fails
    #: (docs/internals/truth.md, T17).
    sides: list[str] = Field(default_factory=list)
    #: A frozen model whose logprobs of the generated tokens every sample of training has, as side array
    #: ``teacher_logprobs`` (docs/trainer.md).
    teacher: ScoringModelConfig | None = None
    #: A reference policy whose logprobs are ``reference_logprobs``: for ``trainer.kl``, instead of the first policy.
    reference: ScoringModelConfig | None = None
    #: A group times out so long after its first lease; None: never.
    group_timeout_s: Seconds | None = None
    #: A group that timed out: wait for it (and report it), train its committed samples, or drop it.
    on_group_timeout: Literal["wait", "train", "drop"] = "wait"
    #: Fewest samples of a group that is trained without the rest.
    min_group: Positive = 2
    #: Longest wait for a reset or a step of an environment; the job then fails as ``environment_timeout``.
    environment_timeout_s: Seconds = 300.0
    #: Most tokens of a sample under one lease; then it is handed back with its prefix, without a charge,
    #: and any worker continues it; not with routed_experts among ``sides``, and not if a hook or an agent
    #: makes the samples. None: no limit.
    lease_tokens: Positive | None = None

    #: Compared with ``n`` only if it is given.
    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"min_group"})

    def scoring_models(self) -> dict[str, ScoringModelConfig]:
        """Return the frozen models that score every sample of training, by their key here."""
        found = {"teacher": self.teacher, "reference": self.reference}
        return {key: model for key, model in found.items() if model is not None}

    @model_validator(mode="after")
    def _prefixes_have_their_routing(self) -> Self:
        if self.lease_tokens is not None and ROUTED_EXPERTS in self.sides:
            raise ValueError(
                f"lease_tokens hands prefixes on, and the {ROUTED_EXPERTS} of sides do not go with them: remove one of "
                "the two"
            )
        return self

    @model_validator(mode="after")
    def _groups_time_out(self) -> Self:
        if self.on_group_timeout != "wait" and self.group_timeout_s is None:
            raise ValueError(
                f"on_group_timeout {self.on_group_timeout} needs to know how long is too long: set group_timeout_s, or "
                "remove it"
            )
        if not self.is_default("min_group") and self.on_group_timeout != "train":
            raise ValueError(
                f"min_group {self.min_group} is of groups that are trained without the rest, and on_group_timeout is "
                f"{self.on_group_timeout}: set that to train, or remove min_group"
            )
        return self
