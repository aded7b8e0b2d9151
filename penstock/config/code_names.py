"""Names of code in a configuration (rewards, filters, transports, ...): penstock's own, or ``module:name`` of a user's.

Only their form is checked here, without an import; user_imports.py imports them before a start.
"""

import difflib
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

from penstock.weights.transport import TRANSPORTS

#: Penstock's own rewards and filters. All environments are the user's.
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
        remedy = f"did you mean {near[0]}?" if near else f"use {', '.join((*own, like))}"
        raise ValueError(f"there is no {kind} {name!r}: {remedy}")

    return check


#: Types of the configuration keys.
RewardName = Annotated[str, AfterValidator(_named("reward", REWARDS, prefix=BOXED))]
GroupRewardName = Annotated[str, AfterValidator(_named("group reward", GROUP_REWARDS))]
FilterName = Annotated[str, AfterValidator(_named("filter", FILTERS))]
TransportName = Annotated[str, AfterValidator(_named("transport", tuple(TRANSPORTS), like="module:Class"))]
EnvironmentName = Annotated[str, AfterValidator(_named("environment", like="module:Class"))]
HookName = Annotated[str, AfterValidator(_named("hook"))]
