"""Section ``reward``: how a sample is scored."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.config.fleet import EngineUrl
from penstock.config.hooks import BOXED, CODE, REMOTE, GroupRewardName, RewardName
from penstock.config.section import Positive, Seconds, Section, is_a_name
from penstock.config.serving import can_be_posted_to


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is not absolute: use an absolute path")
    return path


class JailConfig(Section):
    """The jail in which programs written by a model run."""

    #: auto: bwrap if its test passes on this machine, else filters (docs/rewards.md). bwrap, filters: only that one. If
    #: no jail passes its test, the start is refused. none: no jail; programs have all permissions of the worker's user.
    #: sandbox: the service at ``url``.
    kind: Literal["auto", "bwrap", "filters", "none", "sandbox"] = "auto"
    #: Address of a service with SandboxFusion's API (``POST /run_code``), which isolates programs. The service enforces
    #: the memory limit below; penstock limits the output.
    url: str | None = None
    #: Address space of each process in bytes.
    memory_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 1024**3
    #: Maximum number of bytes that a program may print.
    output_bytes: Annotated[int, Field(ge=1024, le=64 * 1024**2)] = 4 * 1024**2
    #: Absolute paths of folders that programs may read, in addition to the system's libraries and the interpreter.
    readable: list[Annotated[str, AfterValidator(_absolute)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if (self.kind == "sandbox") != (self.url is not None):
            raise ValueError("kind sandbox and url belong together: set both, or neither")
        if self.url is not None and not can_be_posted_to(self.url):
            # It may hold a secret: it is not repeated.
            raise ValueError("url is not an HTTP address: use http://HOST:PORT or https://HOST:PORT")
        return self


class CodeConfig(Section):
    """Reward ``code``, which runs an answer's program against the tests in its label."""

    #: all: 1 if all tests pass, else 0. share: the share of tests that pass.
    score: Literal["all", "share"] = "all"
    #: Time limit in seconds for one test, excluding the wait for a free core.
    test_s: Seconds = 4.0
    #: Time limit in seconds for all tests of an answer; the remaining tests then count as failed.
    total_s: Seconds = 20.0
    #: Maximum difference at which two numbers count as equal, relative to the larger one or to 1.
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: Path of the interpreter that runs answers; programs can import the packages installed there. None: penstock's own
    #: interpreter, with only Python's standard library.
    python: str | None = None


class PoolConfig(Section):
    """Processes that compute rewards."""

    #: process: rewards run in the worker (async functions in its event loop, others in a thread, slow built-in ones in
    #: separate processes). rq: ``penstock verifiers``, on this machine or others, run a process for each check; fast
    #: built-in rewards (exact_match, f1) stay in the worker.
    kind: Literal["process", "rq"] = "process"
    #: process: number of processes per worker for slow built-in rewards. rq: number of concurrent checks of one
    #: ``penstock verifiers``; ``penstock run`` starts one.
    workers: Positive = 2
    #: rq: limit on the address space of a check in bytes; None: no limit, except for math_verify.
    memory_bytes: Positive | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.memory_bytes is not None and self.kind != "rq":
            raise ValueError(
                f"memory_bytes requires kind rq, but kind is {self.kind}: set kind to rq, or remove memory_bytes"
            )
        return self


class RemoteConfig(Section):
    """The scoring service of reward ``remote_rm``."""

    #: Address to which ``{prompt, response, label}`` is posted as JSON; the service returns a number, or a map with
    #: ``key``. Redirects are refused. None: no service.
    url: str | None = None
    #: Time limit in seconds for an attempt.
    timeout_s: Seconds = 120.0
    #: Maximum number of attempts for a sample.
    max_attempts: Positive = 10
    #: Maximum number of concurrent requests of a worker.
    concurrency: Positive = 64

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not can_be_posted_to(url):
            # It may hold a secret: it is not repeated.
            raise ValueError("the value is not an HTTP address: use http://HOST/PATH or https://HOST/PATH")
        return url


class FrozenModelConfig(Section):
    """A frozen model that workers send requests to."""

    #: Name of the model.
    name: Annotated[str, is_a_name("frozen model")]
    #: Address of the model's SGLang server, http://HOST:PORT. None: the model of this name in ``fleet.models``; only
    #: the fleet's workers can use it.
    url: EngineUrl | None = None
    #: Time limit in seconds for an attempt.
    timeout_s: Seconds = 60.0
    #: Maximum number of attempts of a request; a judge's attempts must also fit into ``reward.timeout_s``. For a
    #: teacher or reference, attempts do not count while the model is unreachable.
    max_attempts: Positive = 5
    #: Maximum number of concurrent requests of a worker.
    concurrency: Positive = 32


class JudgeConfig(FrozenModelConfig):
    """A frozen model that rewards and environments call by name."""


class ScoringModelConfig(FrozenModelConfig):
    """A frozen model that returns logprobs of the tokens of samples. Its token ids must be the policy's."""

    #: Folder of the model, whose config.json and tokenizer are compared with the policy's at the start. None: the
    #: folder of the model of this name in ``fleet.models``.
    path: str | None = None


class OverlongConfig(Section):
    """Penalty for long answers: none up to ``max_tokens - buffer_tokens``, then growing with each token."""

    #: Number of generated tokens at which the penalty reaches ``factor`` (DAPO's L_max); None: no penalty.
    max_tokens: Positive | None = None
    #: Number of generated tokens before ``max_tokens`` over which the penalty grows from 0 (DAPO's L_cache).
    buffer_tokens: Positive = 4096
    #: Maximum penalty.
    factor: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _check_penalty(self) -> Self:
        fields = type(self).model_fields
        given = [name for name in ("buffer_tokens", "factor") if getattr(self, name) != fields[name].default]
        if given and self.max_tokens is None:
            raise ValueError(
                f"{' and '.join(given)} {'say' if len(given) > 1 else 'says'} what long answers lose, and without "
                "max_tokens none loses anything: set it"
            )
        return self

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        if self.max_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens {self.buffer_tokens} is more than max_tokens {self.max_tokens}: an empty answer would "
                "lose something; lower it"
            )
        return self


class RewardConfig(Section):
    #: A built-in reward (listed in docs/rewards.md), or ``module:function``, sync or async, which returns a number, or
    #: a dict with ``key``.
    function: RewardName = "exact_match"
    #: Weights of several rewards by name, instead of ``function``: the reward is the weighted sum.
    parts: dict[RewardName, float] = Field(default_factory=dict)
    #: Let the entry ``rm_type`` of a prompt's metadata select a built-in reward; it takes precedence over a built-in
    #: ``function``.
    by_metadata: bool = False
    #: Penalty for long answers, in training.
    overlong: OverlongConfig = OverlongConfig()
    #: The service that ``remote_rm`` calls.
    remote: RemoteConfig = RemoteConfig()
    #: Frozen models that rewards and environments with a parameter ``judges`` call by name.
    judges: list[JudgeConfig] = Field(default_factory=list)
    #: Settings of reward ``code``, which runs the programs in answers.
    code: CodeConfig = CodeConfig()
    #: Sandbox for the programs in answers.
    jail: JailConfig = JailConfig()
    #: A reward computed over all samples of a group once each has its own reward: ``ranks``, ``shortest_right``, or
    #: ``module:function``, sync or async, which returns a number, or a dict with ``key``, for each sample. Used only in
    #: training. None: samples keep their own reward.
    group: GroupRewardName | None = None
    #: Entry that contains the number, if a reward returns a dict.
    key: str = "score"
    #: Time limit in seconds for the reward of one sample, and for ``group`` on one group.
    timeout_s: Seconds = 30.0
    #: Maximum number of attempts of a reward that raises.
    max_attempts: Positive = 2
    #: Admission stops when user code (reward, environment) caused more than this share of a dataset's last 100 jobs to
    #: fail, once at least 20 have ended. 1: never.
    max_died_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    #: Run rewards given by import path in one process beside the worker, so that they cannot harm the worker
    #: (docs/rewards.md). ``group``, and rewards that call judges, stay in the worker. This costs CPU time for each
    #: reward.
    own_process: bool = False
    #: Processes that compute rewards.
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.parts and not self.is_default("function"):
            raise ValueError(f"parts replace function {self.function}: add it to parts, or remove one of the two")
        return self

    @model_validator(mode="after")
    def _check_own_process(self) -> Self:
        if self.own_process and self.pool.kind == "rq":
            raise ValueError(
                "own_process: true has no effect with pool.kind rq, which uses the pool's processes: remove one"
            )
        return self

    @model_validator(mode="after")
    def _check_remote(self) -> Self:
        if self.remote.url is None and any(name.removeprefix(BOXED) == REMOTE for name in self.names):
            raise ValueError(f"reward {REMOTE} requires remote.url: set it to the address of the scoring service")
        return self

    @field_validator("judges")
    @classmethod
    def _check_judges(cls, judges: list[JudgeConfig]) -> list[JudgeConfig]:
        names = [one.name for one in judges]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"judge {twice} is listed twice: list each once")
        return judges

    @model_validator(mode="after")
    def _check_code_timeout(self) -> Self:
        if any(name.removeprefix(BOXED) == CODE for name in self.names) and self.code.total_s >= self.timeout_s:
            raise ValueError(
                f"code.total_s {self.code.total_s:g} is not below timeout_s {self.timeout_s:g}: a slow answer would "
                "fail with reward_timeout instead of a lower reward; raise timeout_s"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards of samples whose jobs name none."""
        return tuple(self.parts) or (self.function,)
