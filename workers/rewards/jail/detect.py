"""Find the jail of this machine. Each backend is probed with escape attempts before it is used."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from functools import lru_cache

from penstock.config.reward import JailConfig, RewardConfig
from penstock.errors import ConfigError
from penstock.workers.rewards.jail.backends import NO_WARDEN, WARDENS, Warden
from penstock.workers.rewards.jail.jail import Jail, JailError
from penstock.workers.rewards.jail.mounts import walls
from penstock.workers.rewards.jail.sandbox import Sandbox
from penstock.workers.rewards.jail.task import Limits, Task

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
        return Jail(NO_WARDEN, built, limits)
    why = {}
    for warden in WARDENS:
        if config.kind in ("auto", warden.name):
            why[warden.name] = reason = _why_not(warden, Jail(warden, built, limits))
            if not reason:
                return Jail(warden, built, limits)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why.items())
    raise ConfigError(
        f"reward.jail.kind {config.kind}: no jail for programs of answers holds on this machine ({reasons}). Install "
        "bubblewrap, allow namespaces, or use an interpreter that every user can read (reward.code.python); "
        "reward.jail.kind none runs them without a jail."
    )


def _why_not(warden: Warden, jail: Jail) -> str:
    if lack := warden.lack():
        return lack
    try:
        holes = _holes(jail)
    except (JailError, OSError) as exc:
        return str(exc)
    finally:
        jail.close()
    return f"it is not tight: {', '.join(holes)}" if holes else ""
