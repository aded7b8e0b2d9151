"""Stands for a part of a run in the launcher's tests: ``launch_parts.py COMMAND --config FILE [--name NAME]``.

Its behaviour is the file NAME.do beside the run's folder: ``wait`` (until SIGTERM), ``exit CODE``, ``exit-when FILE``,
``ignore`` (SIGTERM has no effect), ``vanish`` (exit 0 with a worker's record left in Redis), ``burn`` (20 jobs died of
user code).
Every start adds its pid to NAME.pids, and a clean end is noted in NAME.ended. Most need nothing of penstock, and are
spared its imports: these tests start hundreds.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path


def main() -> int:
    command, arguments = sys.argv[1], sys.argv[2:]
    name = arguments[arguments.index("--name") + 1] if "--name" in arguments else command
    config = Path(arguments[arguments.index("--config") + 1])
    desk = config.parent.parent.parent
    script = desk / f"{name}.do"
    what, _, argument = (script.read_text() if script.exists() else "wait").partition(" ")
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    # As an engine or a rank would be: in the part's own session.
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    with (desk / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()} {child}\n")
    settings = {key: value for key, value in os.environ.items() if key.startswith(("PENSTOCK_", "CUDA_"))}
    print(f"{name} says {what} {settings}", flush=True)
    if what == "exit":
        return int(argument)
    if what == "vanish":
        vanish(name, config.parent)
        return 0
    if what == "burn":
        burn(config.parent)
    while not (ended and what != "ignore") and not (what == "exit-when" and (desk / argument).exists()):
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    with (desk / "ended").open("a") as file:
        file.write(f"{name}\n")
    return 0


def vanish(name: str, run_dir: Path) -> None:
    """Show itself as a worker does."""
    from penstock.records.codec import pack
    from penstock.records.keys import Keys
    from penstock.redis.connect import connect
    from penstock.redis.server import read_address

    with connect(str(read_address(run_dir))) as client:
        client.hset(Keys("demo").workers, name, pack({"pid": os.getpid(), "host": socket.gethostname()}))


def burn(run_dir: Path) -> None:
    """Note jobs that died of their reward, as workers do."""
    from penstock.protocol.scripts import ended, run
    from penstock.records.keys import Keys
    from penstock.redis.connect import connect
    from penstock.redis.server import read_address

    with connect(str(read_address(run_dir))) as client:
        run(client, ended(Keys("demo"), [("dataset t with reward rewards:f", "1" * 20, "KeyError: 'gone'")], 100))


if __name__ == "__main__":
    sys.exit(main())
