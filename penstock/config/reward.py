"""Section ``reward``: what scores a sample."""

from typing import Annotated

from pydantic import Field

from penstock.config.code_names import RewardName
from penstock.config.pool import PoolConfig
from penstock.config.section import Positive, Seconds, Section


class RewardConfig(Section):
    #: One of penstock's own (docs/rewards.md has the table), or ``module:function``: sync or async; gives a number,
    #: or a dict with ``key``.
    function: RewardName = "exact_match"
    #: Where a reward returns a dict, the entry that is the number.
    key: str = "score"
    #: Longest run of the reward on one sample.
    timeout_s: Seconds = 30.0
    #: Tries of a reward that raises.
    max_attempts: Positive = 2
    #: CPU time of one math_verify check; an answer that needs more is worth 0 (docs/truth.md, T11).
    check_cpu_s: Positive = 5
    #: Admission stops when more than this share of a dataset's jobs died of the user's code (reward, environment), of
    #: the last ``died_window`` that ended, from ``died_from`` on; 1: never.
    max_died_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    #: See ``max_died_share``.
    died_window: Annotated[int, Field(ge=1, le=10_000)] = 100
    #: See ``max_died_share``.
    died_from: Positive = 20
    #: Verifier processes of math_verify per worker, with pool.kind process.
    processes: Positive = 2
    #: Where rewards are computed.
    pool: PoolConfig = PoolConfig()
