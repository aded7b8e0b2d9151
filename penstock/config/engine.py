"""Section ``engine``: start and supervision of SGLang."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.config.fleet import RouterConfig
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.config.section import Positive, Seconds, Section
from penstock.text import MASK

#: How SGLang reads ``ORIGINAL_LOGPROB``.
_IS_ORIGINAL = {"1": True, "true": True, "0": False, "false": False}

#: Arguments of sglang.launch_server by preset, and its environment variables.
PRESET_ARGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none",
        "disable-cuda-graph": True, "disable-overlap-schedule": True, "max-total-tokens": 20000,
        "mem-fraction-static": 0.3,
        # Keys and values cached under old weights would be reused under new ones.
        "disable-radix-cache": True,
        # Otherwise an idle scheduler occupies a core.
        "sleep-on-idle": True,
    },
    "cuda": {"disable-radix-cache": True},
}  # fmt: skip
PRESET_ENV = {"cpu": {"OMP_NUM_THREADS": "1"}, "cuda": {}}
#: Devices of NVIDIA's driver.
_DEVICES = Path("/dev")


def engine_folders() -> list[Path]:
    """Return the folders in which SGLang's environment may be, preferred first; the last one is used to install it."""
    data = Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"))
    return [Path(".engine").absolute(), Path(sys.prefix).parent / ".engine", data / "penstock" / "engine"]


def default_python() -> str:
    """Return the interpreter of the first existing SGLang environment, else that of the one to install."""
    found = [folder / "bin" / "python" for folder in engine_folders()]
    return str(next((python for python in found if python.exists()), found[-1]))


def preset_of_machine() -> Literal["cpu", "cuda"]:
    """Return "cuda" if an NVIDIA GPU is visible to this process, else "cpu"."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1")
    return "cuda" if visible and any(_DEVICES.glob("nvidia[0-9]*")) else "cpu"


class EngineConfig(Section):
    """The SGLang server of a worker."""

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"preset"})

    #: Address of an external server (http://HOST:PORT), which penstock never starts, stops or kills. None: spawn a
    #: server.
    url: str | None = None
    #: Engines behind the worker's own sglang-router, which act as one engine; do not set url or args with it.
    router: RouterConfig | None = None
    #: Address on which a spawned server listens.
    host: str = "127.0.0.1"
    #: Port of a spawned server; 0: a free port.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Interpreter of the environment that contains sglang, for spawned servers. '': use the first folder that exists:
    #: .engine in the current folder, .engine beside penstock's own environment, and the folder that ``penstock engine
    #: install`` creates (``penstock/engine`` in ``$XDG_DATA_HOME`` or ``~/.local/share``).
    python: str = ""
    #: Default arguments and environment variables for a device, which ``args`` and ``env`` override. cpu: small, and
    #: without threads of its own; cuda: without the prefix cache, which would reuse keys and values of old weights.
    #: None: cuda if this machine has an NVIDIA GPU or ``trainer.device`` is one, otherwise cpu; no preset for the
    #: engines of a fleet, or if ``args`` sets a device.
    preset: Literal["cpu", "cuda"] | None = None
    #: Arguments of sglang.launch_server, without leading dashes; true means a flag without a value. They are checked
    #: against the installed release before any process starts.
    args: dict[str, Any] = Field(default_factory=dict)
    #: Environment variables of the server. Their values are masked whenever the configuration is shown, saved or sent.
    env: dict[str, str] = Field(default_factory=dict)
    #: Time limit in seconds for a start.
    start_timeout_s: Seconds = 600.0
    #: Time limit in seconds for loading new weights; after it the engine counts as dead.
    load_timeout_s: Seconds = 300.0
    #: Seconds between two health checks; none are made while weights change or memory is released.
    health_interval_s: Seconds = 2.0
    #: Time limit in seconds for a health check.
    health_timeout_s: Seconds = 10.0
    #: Number of consecutive failed health checks after which the engine is restarted.
    health_failures: Positive = 3
    #: Wait in seconds before the second consecutive restart of a lost engine; the first is immediate. The wait doubles
    #: with each further failure, up to 30 times this value.
    restart_wait_s: Seconds = 1.0
    #: Number of failures (failed starts, and crashes before any request finished) within 600 s that make a crash loop.
    #: The worker then hands its jobs back, leases none, reports the reason, and retries after the longest of these
    #: waits.
    crash_loop_failures: Annotated[int, Field(ge=2)] = 5
    #: Time limit in seconds for one request.
    request_timeout_s: Seconds = 3600.0
    #: Whether logprobs are computed after temperature (scaled) or before it (original). None: as ``env`` sets it,
    #: otherwise scaled; for a server at a URL, as a test request shows. A server that returns another kind is refused.
    logprob_kind: Literal["scaled", "original"] | None = None

    @property
    def server_args(self) -> dict[str, Any]:
        """Return the arguments of the server, with dashes: those of the preset, overridden by ``args``."""
        given = {name.replace("_", "-"): value for name, value in self.args.items()}
        return PRESET_ARGS.get(self.preset or "", {}) | given

    @property
    def server_env(self) -> dict[str, str]:
        """Return the variables of the server: those of the preset, overridden by ``env``."""
        return PRESET_ENV.get(self.preset or "", {}) | self.env

    @model_validator(mode="after")
    def _check_logprob_kind(self) -> Self:
        given = self.env.get(ORIGINAL_LOGPROB)
        if given is None or given == MASK:  # a saved file holds logprob_kind beside it
            return self
        if given.lower() not in _IS_ORIGINAL:
            raise ValueError(f"env.{ORIGINAL_LOGPROB} is neither 1 nor 0: correct it, or set logprob_kind instead")
        kind = "original" if _IS_ORIGINAL[given.lower()] else "scaled"
        if self.logprob_kind not in (None, kind):
            raise ValueError(
                f"logprob_kind is {self.logprob_kind}, but env.{ORIGINAL_LOGPROB} means {kind}: remove the variable"
            )
        self._follow(logprob_kind=kind)
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        given = [name for name in ("url", "preset", "args", "env", "port") if getattr(self, name)]
        if self.router is not None and given:
            raise ValueError(
                f"{' and '.join(given)} are of one engine, and router names several that run already: give them "
                "to those servers, or remove router"
            )
        return self

    @model_validator(mode="after")
    def _check_external(self) -> Self:
        if self.url is None:
            return self
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} is not the address of a server: write http://HOST:PORT")
        given = [name for name in ("preset", "args", "env") if getattr(self, name)]
        if given:
            raise ValueError(
                f"{' and '.join(given)} are for a server that penstock starts, and url names one that runs "
                "already: give them to that server, or remove url"
            )
        return self
