"""Build the start of an SGLang server: its command line, its environment variables, its interpreter."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, ModelConfig
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.errors import ConfigError
from penstock.redaction import MASK

#: Arguments that penstock sets itself, and what to set instead.
_OURS = {
    "model": "model.path",
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "model.dtype",
    "weight_version": "nothing; it is the number of the publication",
    "host": "engine.url for a server of your own",
    "port": "engine.url for a server of your own",
    "api_key": "nothing; the server listens on loopback alone",
    "ssl_keyfile": "nothing; the server listens on loopback alone",
    "ssl_certfile": "nothing; the server listens on loopback alone",
    "config": "engine.args for what is in that file",
    "preferred_sampling_params": "rollout.sampling and rollout.eval_sampling",
}

#: The vision tower's cache would survive weight updates, which clear all other caches: cached images would keep the
#: embeddings of old weights (T6; SGLang 0.5.20).
_NO_OLD_IMAGES = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}

#: Below 1 these accept tokens of a draft model more often than the model would sample them.
_ACCEPTS_DRAFTS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def build_command(config: EngineConfig, model: ModelConfig, *, path: str, version: int, port: int) -> list[str]:
    """Build the command line of the server.

    Args:
        path: folder of the initial weights.
        version: their publication number; -1: none, the server then reports "default".

    Raises:
        ConfigError: ``engine.args`` has an argument that penstock sets itself.
    """
    refuse_ours(config)
    given = {name.replace("-", "_"): value for name, value in config.args.items()}
    arguments: dict[str, Any] = {
        "model_path": path,
        "tokenizer_path": model.path,
        "host": config.host,
        "port": port,
        "dtype": model.dtype,
    }
    if version >= 0:
        arguments["weight_version"] = str(version)
    command = [config.python, "-m", "sglang.launch_server"]
    for name, value in (arguments | given).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif isinstance(value, list | tuple):
            command += [flag, *map(_text, value)]
        elif value is not None and value is not False:
            command += [flag, _text(value)]
    return command


def with_switch(config: EngineConfig, flag: str) -> EngineConfig:
    """Return the configuration with a server switch on, unless the server is external or the switch is set."""
    names = {name.replace("_", "-") for name in config.args}
    if config.url is not None or flag in names:
        return config
    return config.model_copy(update={"args": config.args | {flag: True}})


def refuse_ours(config: EngineConfig) -> None:
    """Raise ConfigError if ``engine.args`` has an argument that penstock sets itself."""
    given = {name.replace("-", "_") for name in config.args}
    for name, instead in _OURS.items():
        if name in given:
            raise ConfigError(f"engine.args.{name} cannot be set: penstock decides it; use {instead}.")
    refuse_hiding("engine.args", {name.replace("-", "_"): value for name, value in config.args.items()})


def refuse_masked(config: EngineConfig) -> None:
    """Raise ConfigError if a saved configuration has a masked environment variable instead of its value."""
    if masked := [name for name, value in config.env.items() if value == MASK]:
        raise ConfigError(
            f"engine.env.{masked[0]} is masked in this file: give it again, as "
            f"PENSTOCK_ENGINE__ENV='{{{masked[0]}: VALUE}}', or start with the file that the run was configured by."
        )


def refuse_hiding(where: str, args: Mapping[str, Any]) -> None:
    """Raise ConfigError if a server's arguments (with underscores) make its logprobs differ from its sampling (T7).

    Args:
        where: origin of the arguments, for the error.
    """
    for name in _ACCEPTS_DRAFTS:
        value = args.get(name)
        if value not in (None, 1):
            raise ConfigError(
                f"{where}: {name.replace('_', '-')} {value} accepts drafts that the model would not have sampled, and "
                "the logprobs do not show it: remove it."
            )


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def build_environment(config: EngineConfig) -> dict[str, str]:
    """Return the environment variables of the server: the worker's, overridden by ``engine.env``, without masked ones.

    Variables of the worker's Python are omitted for an interpreter of another environment: it would find our packages
    before its own.
    """
    hidden = set() if is_own_python(config.python) else {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # Its own tools (ninja, ...) are next to its interpreter.
    environment["PATH"] = str(Path(config.python).absolute().parent) + os.pathsep + environment.get("PATH", "")
    # /health then answers at once; penstock queries the scheduler itself (Engine.healthy).
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if str(config.args.get("device", "")) == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    # Not the variable of the shell that started the worker: the recorded kind must be the one the engine returns.
    original = {ORIGINAL_LOGPROB: str(int(config.logprob_kind == "original"))}
    given = {name: value for name, value in config.env.items() if value != MASK}
    return environment | given | original | _NO_OLD_IMAGES


def is_own_python(python: str) -> bool:
    """Return whether an interpreter is this one: the same file in the same folder (environments link theirs)."""
    mine, other = Path(sys.executable).absolute(), Path(python).absolute()
    return mine.parent == other.parent and mine.resolve() == other.resolve()


def check_python(config: EngineConfig) -> None:
    """Raise ConfigError unless ``engine.python`` is an interpreter that can be started."""
    if not os.access(config.python, os.X_OK):
        raise ConfigError(
            f"engine.python {config.python!r} is not an interpreter: run `make engine` to build the environment of "
            "SGLang on CPU, or name the interpreter of an environment that has sglang, or set engine.url."
        )
