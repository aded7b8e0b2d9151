"""Where rewards are computed."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.config.code_names import RewardName
from penstock.config.section import Positive, Section


class PoolConfig(Section):
    """Processes that compute rewards."""

    #: process: in the worker (async functions in its loop, others in a thread, slow ones by name in
    #: processes of their own).
    #: rq: by ``penstock verifiers``, on this machine or others, a process for each check; rewards of
    #: penstock's own that take a moment (exact_match, f1) stay in the worker.
    kind: Literal["process", "rq"] = "process"
    #: rq: checks that one ``penstock verifiers`` makes at once; `penstock run` starts one.
    workers: Positive = 2
    #: rq: rewards that jobs may name beside those of this configuration. No other is run.
    functions: list[RewardName] = Field(default_factory=list)
    #: rq: most bytes of a sample on its way to a verifier, and of the answer, as JSON.
    max_bytes: Annotated[int, Field(ge=1024, le=32 * 1024**2)] = 4 * 1024**2
    #: rq: address space of a check in bytes; None: no limit but that of math_verify.
    memory_bytes: Positive | None = None

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        given = [key for key in ("workers", "max_bytes", "memory_bytes") if not self.is_default(key)]
        if given and self.kind != "rq":
            names, are = ", ".join(given), "are" if given[1:] else "is"
            raise ValueError(f"{names} {are} of kind rq, and kind is {self.kind}: set it, or remove {names}")
        return self
