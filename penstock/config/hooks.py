"""Section ``hooks``: functions of the user's at named places of a run (docs/adapters.md)."""

import difflib
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from penstock.config.section import Seconds, Section
from penstock.config.transport import TRANSPORTS
from penstock.names import AGENT

# Names of code in a configuration (rewards, filters, transports, ...): penstock's own, or ``module:name`` of a
# user's.
#
# Only their form is checked here, without an import; user_imports.py imports them before a start.

#: Penstock's own rewards and filters.
REWARDS = ("exact_match", "math_verify", "math", "deepscaler", "dapo", "f1", "gpqa", "ifbench", "code", "random",
           "remote_rm")  # fmt: skip
#: The reward that runs programs in answers.
CODE = "code"
#: Rewards of complete groups.
GROUP_REWARDS = ("ranks", "shortest_right")
#: The reward that a service of the user's computes.
REMOTE = "remote_rm"
#: Prefix of any of them: only the last box of an answer is scored.
BOXED = "boxed_"
FILTERS = ("nonzero_std",)


def _named(
    kind: str, own: tuple[str, ...] = (), like: str = "module:function", prefix: str = ""
) -> Callable[[str], str]:
    def check(name: str) -> str:
        module, colon, attribute = name.partition(":")
        if name.removeprefix(prefix) in own or (colon and module and attribute):
            return name
        near = difflib.get_close_matches(name.lower(), own, n=1)
        if not colon and all(part.isidentifier() for part in name.split(".")) and "." in name:
            near = [":".join(name.rsplit(".", 1))]
        remedy = f"did you mean {near[0]}?" if near else f"use {', '.join((*own, like))}"
        raise ValueError(f"there is no {kind} {name!r}: {remedy}")

    return check


#: Types of the configuration keys.
RewardName = Annotated[str, AfterValidator(_named("reward", REWARDS, prefix=BOXED))]
GroupRewardName = Annotated[str, AfterValidator(_named("group reward", GROUP_REWARDS))]
FilterName = Annotated[str, AfterValidator(_named("filter", FILTERS))]
TransportName = Annotated[str, AfterValidator(_named("transport", tuple(TRANSPORTS), like="module:Class"))]
EnvironmentName = Annotated[str, AfterValidator(_named("environment", (AGENT,), like="module:Class"))]
HookName = Annotated[str, AfterValidator(_named("hook"))]


class HooksConfig(Section):
    """Functions of the user's at named places of a run, each ``module:function`` (docs/adapters.md)."""

    #: Makes each sample in the worker, with its own requests to the engine; null: none.
    generate: HookName | None = None
    #: Makes all samples of a group together in the worker, instead of ``generate``; null: none.
    rollout: HookName | None = None
    #: Makes each sample of an evaluation, instead of ``generate`` or ``rollout``; null: these make them too.
    eval: HookName | None = None
    #: Longest run of one of these, on one sample or group; the job then fails as ``hook_timeout``.
    generate_timeout_s: Seconds = 3600.0
    #: Called in this order with each generated sample before its reward, in the worker.
    sample: list[HookName] = Field(default_factory=list)
    #: Longest run of such a function on one sample; the job then fails as ``hook_timeout``. Also that of one call of
    #: ``all_samples``.
    timeout_s: Seconds = 30.0
    #: In the trainer, on every rank: rewards of a batch become advantages, instead of ``trainer.advantage``;
    #: null: none.
    rewards: HookName | None = None
    #: In the trainer, on every rank: which samples of a batch bear no loss; null: none.
    samples: HookName | None = None
    #: In the trainer, on every rank: called with its samples, with the policy's logprobs, before they are trained, and
    #: removes loss from tokens or gives each its advantage; null: none.
    postprocess: HookName | None = None
    #: In a slime-shaped trainer (``penstock.RolloutManager``): converts a batch; null: none.
    convert: HookName | None = None
    #: In the trainer's rank 0: called after each trained step; null: none.
    rollout_log: HookName | None = None
    #: In the trainer's rank 0: called after each evaluation; null: none.
    eval_log: HookName | None = None
    #: In the recorder: called with every sample, whatever its fate; null: none.
    all_samples: HookName | None = None
    #: Attributes of the ``args`` that functions of slime's signature are given, beside those that follow from the run.
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def maker(self) -> str | None:
        """The hook that makes samples of training instead of turns of the engine; None: none does."""
        return next((key for key in ("generate", "rollout") if getattr(self, key) is not None), None)
