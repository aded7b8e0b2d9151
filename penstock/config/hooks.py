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
        raise ValueError(f"unknown {kind} {name!r}: {remedy}")

    return check


#: Types of the configuration keys.
RewardName = Annotated[str, AfterValidator(_named("reward", REWARDS, prefix=BOXED))]
GroupRewardName = Annotated[str, AfterValidator(_named("group reward", GROUP_REWARDS))]
FilterName = Annotated[str, AfterValidator(_named("filter", FILTERS))]
TransportName = Annotated[str, AfterValidator(_named("transport", tuple(TRANSPORTS), like="module:Class"))]
EnvironmentName = Annotated[str, AfterValidator(_named("environment", (AGENT,), like="module:Class"))]
HookName = Annotated[str, AfterValidator(_named("hook"))]


class HooksConfig(Section):
    """User functions that are called at fixed points of a run, each ``module:function`` (docs/adapters.md)."""

    #: Generates each sample in the worker, with its own requests to the engine; None: no hook.
    generate: HookName | None = None
    #: Generates all samples of a group together in the worker, instead of ``generate``; None: no hook.
    rollout: HookName | None = None
    #: Generates each sample of an evaluation, instead of ``generate`` or ``rollout``; None: those two also generate
    #: evaluations.
    eval: HookName | None = None
    #: Time limit in seconds for one of the hooks above, on one sample or group; after it the job fails as
    #: ``hook_timeout``.
    generate_timeout_s: Seconds = 3600.0
    #: Functions that the worker calls, in this order, with each generated sample before its reward.
    sample: list[HookName] = Field(default_factory=list)
    #: Time limit in seconds for one function of ``sample`` on one sample; after it the job fails as ``hook_timeout``.
    #: Also the time limit for one call of ``all_samples``.
    timeout_s: Seconds = 30.0
    #: In the trainer, on every rank: computes advantages from the rewards of a batch, instead of ``trainer.advantage``;
    #: None: no hook.
    rewards: HookName | None = None
    #: In the trainer, on every rank: selects samples of a batch that bear no loss; None: no hook.
    samples: HookName | None = None
    #: In the trainer, on every rank: receives the rank's samples with the policy's logprobs before training, and may
    #: mask tokens or set the advantage of each; None: no hook.
    postprocess: HookName | None = None
    #: In a slime-shaped trainer (``penstock.RolloutManager``): converts a batch; None: no hook.
    convert: HookName | None = None
    #: In the trainer's rank 0: called after each step; None: no hook.
    rollout_log: HookName | None = None
    #: In the trainer's rank 0: called after each evaluation; None: no hook.
    eval_log: HookName | None = None
    #: In the recorder: called with every sample, whatever its fate; None: no hook.
    all_samples: HookName | None = None
    #: Attributes of the ``args`` that functions with slime's signature receive, in addition to those that follow from
    #: the run.
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def maker(self) -> str | None:
        """Return the hook that generates training samples instead of the worker; None if there is none."""
        return next((key for key in ("generate", "rollout") if getattr(self, key) is not None), None)
