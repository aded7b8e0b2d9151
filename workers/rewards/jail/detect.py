"""Find the jail of this machine. Each backend is probed with escape attempts before it is used.

``python -m penstock.workers.rewards.jail.detect CONFIG`` prints the result as JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache

from penstock.config.reward import JailConfig, RewardConfig
from penstock.errors import ConfigError
from penstock.system.processes import python_command, python_environment
from penstock.workers.rewards.jail.backends import BACKENDS, NO_BACKEND, Backend, walls
from penstock.workers.rewards.jail.jail import Jail, JailError
from penstock.workers.rewards.jail.sandbox import Sandbox
from penstock.workers.rewards.jail.task import Limits, Task

#: Longest wait for the result, even on a busy machine.
_ASK_S = 300
#: Probe program: prints the forbidden actions that succeeded.
_PROBE = """
import json, os, socket, sys
path, port, pid = json.loads(sys.stdin.read())
done = []
def tried(what, action):
    try:
        if action():
            done.append(what)
    except Exception:
        pass
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
tried("it is root", lambda: os.geteuid() == 0)
tried("it reads files of ours", lambda: open(path).read())
tried("it lists our folders", lambda: os.listdir(os.path.dirname(path)))
tried("it writes beside them", lambda: open(path + ".left", "w"))
tried("it reads environments of other processes", lambda: open(f"/proc/{pid}/environ", "rb").read())
tried("it signals other processes", lambda: os.kill(pid, 0) is None)
tried("it connects to this machine", lambda: socket.create_connection(("127.0.0.1", port), 2))
tried("it holds open files of ours", lambda: [number for number in range(3, 256) if is_open(number)])
print(json.dumps(done))
"""


@contextlib.contextmanager
def _targets() -> Iterator[tuple[str, int]]:
    """Create a file and a listening port that a jailed program must not reach."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bait-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        os.chmod(folder, 0o755)
        path = os.path.join(folder, "file")
        with open(path, "w") as file:
            file.write("words")
        os.chmod(path, 0o644)
        yield path, server.getsockname()[1]


def _holes(jail: Jail) -> list[str]:
    """Return the forbidden actions that succeeded in the jail. Raises JailError if no program runs."""
    with _targets() as (path, port):
        ended = jail.run(Task(_PROBE, stdin=json.dumps([path, port, os.getpid()])))
    try:
        found = json.loads(ended.output)
    except ValueError:
        raise JailError(f"a program in it ended as {ended.how}: {ended.errors.strip()[-200:]}") from None
    if not isinstance(found, list):
        raise JailError("the probe program in it printed something unexpected")
    return [str(one) for one in found]


def find_jail(config: RewardConfig) -> Jail | Sandbox:
    """Return the jail for ``reward.jail``, probed on this machine. Blocks for a moment the first time.

    Raises:
        ConfigError: none that it allows works here; the message says why for each.
    """
    return _found(config.jail.model_dump_json(), config.code.python, config.code.test_s)


@lru_cache(maxsize=8)
def _found(jail: str, python: str | None, test_s: float) -> Jail | Sandbox:
    config = JailConfig.model_validate_json(jail)
    built, limits = walls(python, config.readable), Limits.of(config, test_s)
    if config.url is not None:
        return Sandbox(config.url, limits)
    if config.kind == "none":
        return Jail(NO_BACKEND, built, limits)
    why = {}
    for backend in BACKENDS:
        if config.kind in ("auto", backend.name):
            why[backend.name] = reason = _why_not(backend, Jail(backend, built, limits))
            if not reason:
                return Jail(backend, built, limits)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
    raise ConfigError(
        f"reward.jail.kind {config.kind}: no jail for programs of answers holds on this machine ({reasons}). Install "
        "bubblewrap, or use an interpreter that every user can read (reward.code.python); "
        "reward.jail.kind none runs them without a jail."
    )


def _why_not(backend: Backend, jail: Jail) -> str:
    if lack := backend.lack():
        return lack
    try:
        holes = _holes(jail)
    except (JailError, OSError) as exc:
        return str(exc)
    return f"it is not tight: {', '.join(holes)}" if holes else ""


def check_jail(config: RewardConfig) -> str:
    """Describe the jail for programs of answers on this machine, from a process of its own: it forks, which a process
    with threads must not. Blocks for about a second.

    Raises:
        ConfigError: no jail that the configuration allows works here.
    """
    command = python_command("penstock.workers.rewards.jail.detect", config.model_dump_json(include={"code", "jail"}))
    try:
        done = subprocess.run(
            command, env=python_environment(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ASK_S, check=True,
        )  # fmt: skip
    except subprocess.SubprocessError as exc:
        raise ConfigError(f"reward.jail: failed to find out whether this machine has a jail ({exc}).") from exc
    found = json.loads(done.stdout)
    if "error" in found:
        raise ConfigError(found["error"])
    return str(found["jail"])


def main(config: RewardConfig) -> None:
    """Print the result."""
    try:
        found = {"jail": find_jail(config).describe()}
    except ConfigError as exc:
        found = {"error": str(exc)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(RewardConfig.model_validate_json(sys.argv[1]))
