"""Check arguments of ``sglang.launch_server`` against the installed release before a server is started.

SGLang's parser is run once per installation. The result is cached in ``$XDG_CACHE_HOME/penstock``
(``~/.cache/penstock``), because importing sglang takes seconds.
"""

import difflib
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config import EngineConfig, ModelConfig
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.errors import ConfigError
from penstock.system.disk import put
from penstock.text import MASK
from penstock.workers.sglang.server_info import RENAMED, reports_spans

log = logging.getLogger(__name__)

#: Arguments that penstock sets -> what to set instead.
_SET_BY_PENSTOCK = {
    "model": "model.path",
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "model.dtype",
    "weight_version": "nothing; it is the number of the publication",
    "host": "engine.url for an external server",
    "port": "engine.url for an external server",
    "api_key": "nothing; the server listens only on loopback",
    "ssl_keyfile": "nothing; the server listens only on loopback",
    "ssl_certfile": "nothing; the server listens only on loopback",
    "config": "engine.args for the contents of that file",
    "preferred_sampling_params": "rollout.sampling and rollout.eval_sampling",
}

#: Weight updates clear all caches except that of the vision tower, whose images would keep the embeddings of old
#: weights (T6; SGLang 0.5.20), so it is disabled.
_NO_OLD_IMAGES = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}

#: Thresholds that, below 1, accept draft tokens more often than the model would sample them.
_ACCEPTS_DRAFTS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def build_command(config: EngineConfig, model: ModelConfig, *, path: str, version: int, port: int) -> list[str]:
    """Build the command line of the server.

    Args:
        path: folder of the initial weights.
        version: publication number of these weights; -1 for unpublished ones, which the server reports as "default".

    Raises:
        ConfigError: ``engine.args`` has an argument that penstock sets.
    """
    refuse_reserved(config)
    arguments: dict[str, Any] = {
        "model_path": path,
        "tokenizer_path": model.path,
        "host": config.host,
        "port": port,
        "dtype": model.dtype,
    }
    if version >= 0:
        arguments["weight_version"] = str(version)
    return [config.python, "-m", "sglang.launch_server", *flags_of(arguments | with_underscores(config.server_args))]


def with_underscores(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return server arguments with underscores in their names."""
    return {name.replace("-", "_"): value for name, value in args.items()}


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments to a command line; true becomes a bare flag, false and null are omitted."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, *map(_text, value)]
        elif value is not None and value is not False:
            words += [flag, _text(value)]
    return words


def refuse_set(where: str, args: Mapping[str, Any], instead: Mapping[str, str], decides: str = "penstock") -> None:
    """Raise ConfigError if arguments (with underscores) include one that ``decides`` sets.

    Args:
        where: origin of the arguments.
        instead: refused argument -> what to set instead.
    """
    for name, other in instead.items():
        if name in args:
            raise ConfigError(f"{where}{name} cannot be set, because {decides} sets it: use {other}.")


def with_switch(config: EngineConfig, flag: str) -> EngineConfig:
    """Return the configuration with a server switch enabled, unless the server is external or the switch is set."""
    if config.url is not None or flag in config.server_args:
        return config
    return config.model_copy(update={"args": config.args | {flag: True}})


def refuse_reserved(config: EngineConfig) -> None:
    """Raise ConfigError if ``engine.args`` has an argument that penstock sets."""
    given = with_underscores(config.args)
    refuse_set("engine.args.", given, _SET_BY_PENSTOCK)
    refuse_hiding("engine.args", given)


def refuse_masked(config: EngineConfig) -> None:
    """Raise ConfigError if an environment variable in a saved configuration is masked."""
    if masked := [name for name, value in config.env.items() if value == MASK]:
        raise ConfigError(
            f"engine.env.{masked[0]} is masked in this file: set "
            f"PENSTOCK_ENGINE__ENV='{{{masked[0]}: VALUE}}', or use the original configuration file."
        )


def refuse_hiding(where: str, args: Mapping[str, Any]) -> None:
    """Raise ConfigError if server arguments (with underscores) make logprobs differ from the sampling (T7).

    Args:
        where: origin of the arguments, for the error.
    """
    for name in _ACCEPTS_DRAFTS:
        value = args.get(name)
        if value not in (None, 1):
            raise ConfigError(
                f"{where}: {name.replace('_', '-')} {value} accepts draft tokens that the model would not sample, "
                "which the logprobs do not show: remove it."
            )


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def build_environment(config: EngineConfig) -> dict[str, str]:
    """Return the server's environment: the worker's, overridden by ``engine.env``, without masked variables."""
    return server_environment(config.python) | engine_variables(config)


def engine_variables(config: EngineConfig) -> dict[str, str]:
    """Return the variables added for a server."""
    environment: dict[str, str] = {}
    # Makes /health answer at once; penstock queries the scheduler instead (Engine.healthy).
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if config.server_args.get("device") == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    # Override the shell's variable: the recorded kind must match the engine's.
    original = {ORIGINAL_LOGPROB: str(int(config.logprob_kind == "original"))}
    given = {name: value for name, value in config.server_env.items() if value != MASK}
    return environment | given | original | _NO_OLD_IMAGES


def server_environment(python: str) -> dict[str, str]:
    """Return this process's environment, adapted to a server with interpreter ``python``.

    Variables of this Python are omitted for the interpreter of another environment, which would otherwise import this
    environment's packages.
    """
    hidden = set() if is_own_python(python) else {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # Tools of the environment (ninja, ...) are next to its interpreter.
    environment["PATH"] = str(Path(python).absolute().parent) + os.pathsep + environment.get("PATH", "")
    return environment


def is_own_python(python: str) -> bool:
    """Return whether ``python`` is the current interpreter in the same folder (environments link interpreters)."""
    mine, other = Path(sys.executable).absolute(), Path(python).absolute()
    return mine.parent == other.parent and mine.resolve() == other.resolve()


def check_python(python: str) -> None:
    """Raise ConfigError unless ``engine.python`` is a working interpreter."""
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine.python {python!r} is not an interpreter: run `penstock engine install` to create one for "
            "CPUs, set the interpreter of an environment with sglang, or set engine.url."
        )


#: Longest import of sglang, in seconds; a cold network file system takes minutes.
PROBE_TIMEOUT_S = 600.0
#: Largest probe output, in bytes; 0.5.20 has 495 arguments in 60 kB.
MAX_BYTES = 4 << 20

_MARK = "penstock-arguments:"

#: Script that identifies the installation without importing it.
_WHICH = """
import importlib.metadata, importlib.util, os
spec = importlib.util.find_spec("sglang")
if not (spec and spec.origin):
    raise SystemExit("No module named sglang")
path = os.path.join(os.path.dirname(spec.origin), "srt", "server_args.py")
print(MARK, importlib.metadata.version("sglang"), path, os.stat(path).st_mtime_ns)
"""

#: Script that prints the parser's arguments as JSON: [names, takes, type, choices].
_LIST = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
found = []
for action in parser._actions:
    names = [name[2:] for name in action.option_strings if name.startswith("--")]
    takes = {0: "nothing", None: "one", "?": "optional"}.get(action.nargs, "many")
    kind = getattr(action.type, "__name__", "str") if action.type else "str"
    choices = sorted(map(str, action.choices)) if action.choices else []
    found.append([names, takes, kind, choices])
print(MARK, json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Argument:
    """Describe one argument of the parser."""

    takes: Literal["nothing", "one", "optional", "many"]
    #: Name of the conversion type: int, float, str, or a function of SGLang.
    kind: str
    #: Allowed values; empty if unrestricted.
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Installation:
    """Describe an installed SGLang and its command-line arguments, by name without leading dashes."""

    version: str
    arguments: Mapping[str, Argument]


_known: dict[str, Installation] = {}


def check_arguments(config: EngineConfig) -> Installation:
    """Refuse ``engine.args`` that the installed SGLang would reject. Blocks for 0.1 s, the first time for seconds.

    Raises:
        ConfigError: the interpreter or sglang is missing, the release is too old, a variable is masked, or an argument
        is set by penstock, unknown to SGLang (with the closest name), or invalid.
    """
    refuse_reserved(config)
    refuse_masked(config)
    installed = installation(config)
    reports_spans(installed.version)
    mistakes = [
        mistake
        for name, value in config.server_args.items()
        if (mistake := _mistake(name, value, installed)) is not None
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return installed


def installation(config: EngineConfig) -> Installation:
    """Return the SGLang installation of ``engine.python``. Blocks and raises like :func:`check_arguments`."""
    check_python(config.python)
    which = _run_script(config, _WHICH, 180.0)
    # Arguments may depend on the platform, which environment variables select.
    platform = build_environment(config).get("SGLANG_USE_CPU_ENGINE", "")
    key = hashlib.sha256(f"{Path(config.python).absolute()} {which} {platform}".encode()).hexdigest()[:32]
    if key not in _known:
        version = which.split()[0]
        _known[key] = Installation(version, _list_arguments(config, version, key))
    return _known[key]


def lacks_sglang(text: str) -> ConfigError | None:
    """Return the error for a missing sglang if the interpreter's output reports it."""
    if "No module named 'sglang'" not in text and "No module named sglang" not in text:
        return None
    return ConfigError(
        "engine.python has no sglang: run `penstock engine install`, or set the interpreter of an environment with "
        "sglang."
    )


def _run_script(config: EngineConfig, script: str, timeout_s: float) -> str:
    """Run a script in the engine's environment; return its output after the mark."""
    command = [str(Path(config.python).absolute()), "-P", "-c", f"MARK = {_MARK!r}\n{script}"]
    try:
        done = subprocess.run(
            command,
            env=build_environment(config),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigError(f"engine.python {config.python} failed to list the arguments of SGLang: {exc}.") from exc
    errors = done.stderr.decode(errors="replace").strip()
    if (mistake := lacks_sglang(errors)) is not None:
        raise mistake
    lines = [line for line in done.stdout[:MAX_BYTES].decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not lines:
        tail = "\n".join(errors.splitlines()[-5:])
        raise ConfigError(
            f"engine.python {config.python} failed to import sglang (exit code {done.returncode}); repair the "
            f"environment:\n{tail}"
        )
    return lines[-1].removeprefix(_MARK).strip()


def _list_arguments(config: EngineConfig, version: str, key: str) -> Mapping[str, Argument]:
    """Return the arguments by name, from the cache or else the parser, which takes seconds."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    cached = Path(home, "penstock", f"sglang-arguments-{key}.json")
    try:
        return _parse_arguments(cached.read_text(encoding="utf-8"))
    except FileNotFoundError:
        log.info("reading the arguments of SGLang %s", version)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        log.warning("failed to read argument cache %s, rewriting it: %r", cached, exc)
    text = _run_script(config, _LIST, PROBE_TIMEOUT_S)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        put(cached, text)
    except OSError as exc:
        log.warning("failed to cache the arguments of SGLang in %s: %s", cached, exc)
    return _parse_arguments(text)


def _parse_arguments(text: str) -> Mapping[str, Argument]:
    """Parse the output of ``_LIST``. Raises ValueError if it has no arguments."""
    found = {
        str(name): Argument(takes, str(kind), tuple(map(str, choices)))
        for names, takes, kind, choices in json.loads(text)
        for name in names
    }
    if not found:
        raise ValueError("it lists no arguments")
    return found


def _mistake(name: str, value: Any, installed: Installation) -> str | None:
    """Return the error of one argument, or None."""
    key = f"engine.args.{name}"
    argument = installed.arguments.get(name)
    if argument is None:
        return f"{key}: SGLang {installed.version} has no such argument{_suggestion(name, installed)}"
    if value is None or value is False:
        if f"no-{name}" in installed.arguments:
            return f"{key}: to disable it, write `no-{name}: true`."
        return None
    if argument.takes == "nothing":
        return None if value is True else f"{key} is a switch: write true or false, not {value!r}."
    if value is True:
        return None if argument.takes == "optional" else f"{key} needs a value, not true."
    values = list(value) if isinstance(value, list | tuple) else [value]
    if len(values) != 1 and argument.takes != "many":
        return f"{key} takes one value, not {len(values)}: {value!r}."
    for one in values:
        if wrong := _wrong_value(argument, one):
            return f"{key}: {one!r} {wrong}"
    return None


def _wrong_value(argument: Argument, value: Any) -> str | None:
    if argument.choices and str(value) not in argument.choices:
        close = difflib.get_close_matches(str(value), argument.choices, 1, 0.5)
        return f"is not one of {', '.join(argument.choices)}" + (f"; did you mean {close[0]}?" if close else ".")
    reader = {"int": int, "float": float}.get(argument.kind)
    if reader is None:
        return None
    try:
        reader(str(value))
    except ValueError:
        return "is not an integer." if reader is int else "is not a number."
    return None


def _suggestion(name: str, installed: Installation) -> str:
    if (renamed := RENAMED.get(name)) in installed.arguments:
        return f"; it was renamed to {renamed}."
    # Prefer names that it abbreviates, as argparse does, then similar names.
    close = [one for one in installed.arguments if one.startswith(name)][:3]
    close = close or difflib.get_close_matches(name, installed.arguments, 3, 0.6)
    return f"; did you mean {' or '.join(close)}?" if close else "."
