"""Section ``reward``: how a sample is scored."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.config.fleet import EngineUrl
from penstock.config.hooks import BOXED, CODE, REMOTE, GroupRewardName, RewardName
from penstock.config.section import Positive, Seconds, Section, is_a_name
from penstock.config.serving import can_be_posted_to


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"it should be an absolute path, not {path!r}")
    return path


class JailConfig(Section):
    """The jail: where programs written by a model run."""

    #: auto: bwrap if it holds on this machine, else filters (docs/rewards.md), each tried before it is used; where
    #: none holds the start is refused. One of them: that one, or the start is refused.
    #: none: no jail; answers may do what the worker's user may. sandbox: the service at ``url``.
    kind: Literal["auto", "bwrap", "filters", "none", "sandbox"] = "auto"
    #: Address of a service with SandboxFusion's API (``POST /run_code``), which isolates programs. Of the limits below
    #: it gets the memory; output is bounded here.
    url: str | None = None
    #: Address space of each process in bytes.
    memory_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 1024**3
    #: Most bytes that a program prints.
    output_bytes: Annotated[int, Field(ge=1024, le=64 * 1024**2)] = 4 * 1024**2
    #: Folders that programs may read, beside the system's libraries and the interpreter: absolute paths.
    readable: list[Annotated[str, AfterValidator(_absolute)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _url_is_of_its_kind(self) -> Self:
        if (self.kind == "sandbox") != (self.url is not None):
            raise ValueError("kind sandbox and url belong together: set both, or neither")
        if self.url is not None and not can_be_posted_to(self.url):
            # It may hold a secret: it is not repeated.
            raise ValueError("url is no address that can be posted to: give http://HOST:PORT or https://HOST:PORT")
        return self


class CodeConfig(Section):
    """The reward ``code``: an answer's program against the tests in its label."""

    #: all: 1 where all tests pass, else 0. share: the share of tests that pass.
    score: Literal["all", "share"] = "all"
    #: Time of one test, the wait for a free core left out.
    test_s: Seconds = 4.0
    #: Time of an answer's tests together; those that are left then count as failed.
    total_s: Seconds = 20.0
    #: Largest difference of two numbers that still counts as none, relative to the larger or to 1.
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: Interpreter of answers: a path; what is installed there can be imported. null: penstock's own, with Python's
    #: library alone.
    python: str | None = None


class PoolConfig(Section):
    """Processes that compute rewards."""

    #: process: in the worker (async functions in its loop, others in a thread, slow ones by name in
    #: processes of their own).
    #: rq: by ``penstock verifiers``, on this machine or others, a process for each check; rewards of
    #: penstock's own that take a moment (exact_match, f1) stay in the worker.
    kind: Literal["process", "rq"] = "process"
    #: process: processes of slow rewards by name per worker. rq: checks that one ``penstock verifiers`` makes at once;
    #: `penstock run` starts one.
    workers: Positive = 2
    #: rq: address space of a check in bytes; None: no limit but that of math_verify.
    memory_bytes: Positive | None = None

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.memory_bytes is not None and self.kind != "rq":
            raise ValueError(f"memory_bytes is of kind rq, and kind is {self.kind}: set it, or remove memory_bytes")
        return self


class RemoteConfig(Section):
    """A service that scores: reward ``remote_rm``."""

    #: Address that gets ``{prompt, response, label}`` as JSON (POST); it answers with a number, or a map with ``key``.
    #: Redirects are refused. null: there is no service.
    url: str | None = None
    #: Longest attempt.
    timeout_s: Seconds = 120.0
    #: Attempts of a sample.
    max_attempts: Positive = 10
    #: Requests of a worker at once.
    concurrency: Positive = 64

    @field_validator("url")
    @classmethod
    def _url_can_be_posted_to(cls, url: str | None) -> str | None:
        if url is not None and not can_be_posted_to(url):
            # It may hold a secret: it is not repeated.
            raise ValueError("this is no address that can be posted to: give http://HOST/PATH or https://HOST/PATH")
        return url


class FrozenModelConfig(Section):
    """A frozen model that workers send requests to."""

    #: Its name.
    name: Annotated[str, is_a_name("frozen model")]
    #: Its server of SGLang, http://HOST:PORT. null: the model of this name in
    #: ``fleet.models``, for the fleet's workers.
    url: EngineUrl | None = None
    #: Longest attempt.
    timeout_s: Seconds = 60.0
    #: Attempts of a request; of a judge's within the time that a reward has (``reward.timeout_s``). While a model that
    #: scores samples is unreachable none counts.
    max_attempts: Positive = 5
    #: Concurrent requests of a worker.
    concurrency: Positive = 32


class JudgeConfig(FrozenModelConfig):
    """A frozen model that rewards and environments call by name."""


class ScoringModelConfig(FrozenModelConfig):
    """A frozen model that returns logprobs of the tokens of samples. Its token ids must be the policy's."""

    #: Its folder, with config.json and tokenizer, which are compared with the policy's at the start. null: that of the
    #: model of this name in ``fleet.models``.
    path: str | None = None


class OverlongConfig(Section):
    """Penalty for long answers: none up to ``max_tokens - buffer_tokens``, then growing with each token."""

    #: Generated tokens from which the penalty is ``factor`` (DAPO's L_max); null: no penalty.
    max_tokens: Positive | None = None
    #: Generated tokens before that over which the penalty grows from 0 (DAPO's L_cache).
    buffer_tokens: Positive = 4096
    #: The largest penalty.
    factor: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _something_is_lost(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in ("buffer_tokens", "factor") if getattr(self, name) != fields[name].default]
        if given and self.max_tokens is None:
            raise ValueError(
                f"{' and '.join(given)} {'say' if len(given) > 1 else 'says'} what long answers lose, and without "
                "max_tokens none loses anything: set it"
            )
        return self

    @model_validator(mode="after")
    def _buffer_is_within(self) -> Self:
        if self.max_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} is more than max_tokens {self.max_tokens}: an empty answer would "
                "lose something; lower it"
            )
        return self


class RewardConfig(Section):
    #: One of penstock's own (docs/rewards.md has the table), or ``module:function``: sync or async; returns a number,
    #: or a dict with ``key``.
    function: RewardName = "exact_match"
    #: Instead of ``function``, reward -> weight: the reward is the weighted sum.
    parts: dict[RewardName, float] = Field(default_factory=dict)
    #: The entry ``rm_type`` of a prompt's metadata names one of penstock's own rewards, which takes precedence over a
    #: ``function`` of penstock's own.
    by_metadata: bool = False
    #: Penalty for long answers, in training.
    overlong: OverlongConfig = OverlongConfig()
    #: The service that ``remote_rm`` calls.
    remote: RemoteConfig = RemoteConfig()
    #: Frozen models that rewards and environments with a parameter ``judges`` call by name.
    judges: list[JudgeConfig] = Field(default_factory=list)
    #: Scores of programs in answers: reward ``code``.
    code: CodeConfig = CodeConfig()
    #: Sandbox of these programs.
    jail: JailConfig = JailConfig()
    #: A reward of all samples of a group, each with its own reward, once all are generated:
    #: ``ranks``, ``shortest_right``, or ``module:function``: sync or async; returns a number, or a dict with ``key``,
    #: for
    #: each. In training only; null: samples keep their own reward.
    group: GroupRewardName | None = None
    #: The entry with the number, if a reward returns a dict.
    key: str = "score"
    #: Longest run of the reward on one sample, and of ``group`` on one group.
    timeout_s: Seconds = 30.0
    #: Attempts of a reward that raises.
    max_attempts: Positive = 2
    #: Admission stops when more than this share of a dataset's jobs failed in the user's code (reward, environment), of
    #: the last 100 that ended, from 20 on; 1: never.
    max_died_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    #: Rewards given by import path run in one process beside the worker, which a reward cannot harm (docs/rewards.md);
    #: those that call judges, and ``group``, stay in the worker. Costs CPU time per reward.
    own_process: bool = False
    #: Processes that compute rewards.
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _parts_stand_alone(self) -> Self:
        if self.parts and not self.is_default("function"):
            raise ValueError(f"parts take the place of function {self.function}: name it among them, or remove one")
        return self

    @model_validator(mode="after")
    def _own_process_is_used(self) -> Self:
        if self.own_process and self.pool.kind == "rq":
            raise ValueError("own_process: true has no effect with pool.kind rq, which runs rewards apart: remove one")
        return self

    @model_validator(mode="after")
    def _remote_has_an_address(self) -> Self:
        if self.remote.url is None and any(name.removeprefix(BOXED) == REMOTE for name in self.names):
            raise ValueError(f"{REMOTE} needs remote.url: the address of the service that scores")
        return self

    @field_validator("judges")
    @classmethod
    def _judges_are_named_once(cls, judges: list[JudgeConfig]) -> list[JudgeConfig]:
        names = [one.name for one in judges]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"judge {twice} is listed twice: list each once")
        return judges

    @model_validator(mode="after")
    def _code_ends_in_time(self) -> Self:
        if any(name.removeprefix(BOXED) == CODE for name in self.names) and self.code.total_s >= self.timeout_s:
            raise ValueError(
                f"code.total_s {self.code.total_s:g} is not below timeout_s {self.timeout_s:g}: a slow answer would "
                "fail as reward_timeout in place of being worth less; raise timeout_s"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards of a sample whose job names none."""
        return tuple(self.parts) or (self.function,)
