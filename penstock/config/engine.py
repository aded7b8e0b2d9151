"""Section ``engine``: start and supervision of SGLang."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config.fleet import RouterConfig
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.config.section import Positive, Seconds, Section
from penstock.text import MASK

#: How SGLang reads ``ORIGINAL_LOGPROB``.
_IS_ORIGINAL = {"1": True, "true": True, "0": False, "false": False}


class EngineConfig(Section):
    """The SGLang server under a worker."""

    #: Address of an external server (http://HOST:PORT); None spawns one. It is never started, stopped or killed.
    url: str | None = None
    #: Engines behind an sglang-router of the worker's own, which act as one; set neither url nor args with it.
    router: RouterConfig | None = None
    #: Address that a spawned server listens at.
    host: str = "127.0.0.1"
    #: Port of a spawned server; 0 takes a free one.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Interpreter of the environment that has sglang; spawned servers only.
    python: str = ".engine/bin/python"
    #: Arguments of sglang.launch_server, names without dashes in front; true stands for a bare flag. They are checked
    #: against the installed release before anything starts.
    args: dict[str, Any] = Field(default_factory=dict)
    #: Environment variables of the server. Their values are masked wherever the configuration is shown, saved or sent.
    env: dict[str, str] = Field(default_factory=dict)
    #: Longest start.
    start_timeout_s: Seconds = 600.0
    #: Longest load of new weights; after it the engine counts as dead.
    load_timeout_s: Seconds = 300.0
    #: No health check for so long after a start.
    health_first_wait_s: Annotated[float, Field(ge=0)] = 0.0
    #: Between two health checks; none are made while weights change or memory is released.
    health_interval_s: Seconds = 2.0
    #: Longest answer to a health check.
    health_timeout_s: Seconds = 10.0
    #: Failures in a row until the engine is restarted.
    health_failures: Positive = 3
    #: A lost engine is restarted at once; after a second failure in a row after this wait, which doubles with each.
    restart_wait_s: Seconds = 1.0
    #: The longest such wait.
    max_restart_wait_s: Seconds = 30.0
    #: So many failures (crashes before anything was finished, failed starts) within the window are a crash loop: the
    #: worker hands its jobs back, leases none, reports why, and retries every ``max_restart_wait_s``.
    crash_loop_failures: Annotated[int, Field(ge=2)] = 5
    #: See ``crash_loop_failures``.
    crash_loop_window_s: Seconds = 600.0
    #: Longest wait for one answer.
    request_timeout_s: Seconds = 3600.0
    #: `penstock why` reports a request without progress for so long, with its worker and job. null: one
    #: that is older than 10 s and than three times max_new_tokens / (tokens/s of one request, as measured).
    slow_request_s: Seconds | None = None
    #: None: as the server reports. false: treat it as a server that does not report version spans.
    reports_spans: bool | None = None
    #: Whether logprobs are after temperature (scaled) or before it. None: as ``env`` sets it, else scaled; for a server
    #: at a URL as a test request shows. A server that returns another kind than set here is refused.
    logprob_kind: Literal["scaled", "original"] | None = None

    @model_validator(mode="after")
    def _one_logprob_kind(self) -> Self:
        given = self.env.get(ORIGINAL_LOGPROB)
        if given is None or given == MASK:  # a saved file holds logprob_kind beside it
            return self
        if given.lower() not in _IS_ORIGINAL:
            raise ValueError(f"env.{ORIGINAL_LOGPROB} is neither: write 1 or 0, or set logprob_kind instead")
        kind = "original" if _IS_ORIGINAL[given.lower()] else "scaled"
        if self.logprob_kind not in (None, kind):
            raise ValueError(
                f"logprob_kind is {self.logprob_kind}, and env.{ORIGINAL_LOGPROB} says {kind}: remove the variable"
            )
        self._follow(logprob_kind=kind)
        return self

    @model_validator(mode="after")
    def _router_has_its_engines(self) -> Self:
        given = [name for name in ("url", "args", "env", "port") if getattr(self, name)]
        if self.router is not None and given:
            raise ValueError(
                f"{' and '.join(given)} are of one engine, and router names several that run already: give them "
                "to those servers, or remove router"
            )
        return self

    @model_validator(mode="after")
    def _external_is_not_ours_to_start(self) -> Self:
        if self.url is None:
            return self
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} is not the address of a server; write http://HOST:PORT")
        given = [name for name in ("args", "env") if getattr(self, name)]
        if given:
            raise ValueError(
                f"{' and '.join(given)} are for a server that penstock starts, and url names one that runs "
                "already: give them to that server, or remove url"
            )
        return self
