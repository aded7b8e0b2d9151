"""Names chosen by users, and the lanes: parts of keys, paths and job ids."""

import re
import secrets
from enum import StrEnum

from penstock.errors import ConfigError

__version__ = "0.1.0"


def new_token() -> str:
    """Return 96 random bits: a counter could repeat a value after a failover, but this cannot."""
    return secrets.token_hex(12)


class Lane(StrEnum):
    """A job stream with a priority; workers lease from them in this order."""

    #: Jobs that crashed two workers.
    SUSPECT = "suspect"
    #: Jobs that were begun, and are to be continued.
    RESUME = "resume"
    EVAL = "eval"
    SCORE = "score"
    TRAIN = "train"


#: In the order in which workers lease from them.
LANES = tuple(Lane)

#: Lanes that jobs may be admitted to.
HOME_LANES = (Lane.EVAL, Lane.SCORE, Lane.TRAIN)

#: The environment of samples that an agent outside the workers runs (docs/agents.md). All others are the user's.
AGENT = "agent"

#: Side array of a sample: log-probabilities of a teacher, float32 [tokens after the prompt].
TEACHER_LOGPROBS = "teacher_logprobs"
#: Likewise of a reference policy.
REFERENCE_LOGPROBS = "reference_logprobs"
#: Model inputs of the images of a sample's prompt, side arrays shared by its group: float32 [patches,
#: values], and int64 [images, 3], patches of each in time, height and width.
PIXEL_VALUES, IMAGE_GRID = "pixel_values", "image_grid_thw"
#: Side array of a reward: float32 [steps, 2], index of the token of the response that ends a step, and its reward.
STEP_REWARDS = "step_rewards"
#: Side array of a sample of several parts: the reward of each, float64 [parts], if its generate function set them.
PART_REWARDS = "part_rewards"
#: Side array of a mixture of experts: the experts of each position, uint8 or int16 [tokens - 1, layers, top_k] (T17).
ROUTED_EXPERTS = "routed_experts"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_name(kind: str, name: str) -> str:
    """Return ``name``, or raise ConfigError: names go into keys, paths and job ids."""
    if not is_name(name):
        raise ConfigError(
            f"{kind} {name!r} is not a name: use 1 to 64 letters, digits, '_.-', and begin with a letter or digit."
        )
    return name


def is_name(name: str) -> bool:
    """Return whether it can be part of keys, paths and job ids."""
    return _NAME.fullmatch(name) is not None


#: Most answers of one prompt.
MAX_ANSWERS = 64 * 1024
