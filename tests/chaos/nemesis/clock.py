"""Clocks that jump: a process that is started with a false clock, and told another time while it runs.

Redis runs under libfaketime (Debian: faketime), where that is installed; parts in Python by false_clock.py.
"""

import os
import subprocess
import time
from functools import cache, partial
from pathlib import Path
from random import Random

from tests.chaos.nemesis.act import Facts, Ground, Kind, own_names, pick

#: Where Debian has it; ``CHAOS_FAKETIME`` names another place.
LIBRARIES = tuple(f"/usr/lib/{machine}-linux-gnu/faketime/libfaketimeMT.so.1" for machine in ("x86_64", "aarch64"))
#: Jumps, in seconds.
JUMPS = (-86400, -3600, -20, -3, 3, 20, 3600, 86400)
#: Longest wait for a server to say which one it is, which takes it milliseconds.
START_S = 20.0
PARTS = ("redis", "producer", "worker", "buffer", "trainer")


def library() -> Path | None:
    """libfaketime, where it is installed."""
    places = [os.environ.get("CHAOS_FAKETIME", ""), *LIBRARIES]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


@cache
def starts_under(clocks: Path, binary: Path) -> bool:
    """Whether a server goes on with the library loaded: with jemalloc one hangs in libfaketime 0.9, now or later."""
    try:
        done = subprocess.run(
            [str(binary), "--version"], env={**os.environ, "LD_PRELOAD": str(clocks)}, capture_output=True, text=True,
            timeout=START_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and "malloc=jemalloc" not in done.stdout


def _choose(kind: str, ground: Ground, rng: Random) -> Facts | None:
    if kind == "redis" and (ground.clocks is None or not starts_under(ground.clocks, ground.cluster.binary)):
        return None
    name = pick(rng, own_names(ground, kind))
    jumps = [rng.choice(JUMPS) for _ in range(rng.randint(1, 2))]
    return name and {"part": name, "jumps_s": jumps, "apart_s": round(rng.uniform(0.5, 3.0), 3)}


def _strike(ground: Ground, facts: Facts) -> None:
    """A part that has its true clock is started again under a false one, which then jumps, and is right in the end."""
    cluster = ground.cluster
    part = cluster.parts[facts["part"]]
    told = cluster.folder / "clocks" / part.name
    told.parent.mkdir(exist_ok=True)
    tell(told, 0)
    false = _environment(ground, part.kind, told)
    if not false.keys() <= part.environment.keys():
        part.environment = {**part.environment, **false}
        lives = part.lives
        cluster.kill(part)
        cluster.wait(f"{part.name} to be started again", lambda: part.lives > lives)
        time.sleep(facts["apart_s"])
    for jump in [*facts["jumps_s"], 0]:
        tell(told, jump)
        time.sleep(facts["apart_s"])


def tell(told: Path, seconds: float) -> None:
    """The clock of whoever reads ``told`` is off by so much from now on."""
    temporary = told.with_name(f".{told.name}")
    temporary.write_text(f"{seconds:+g}\n")
    temporary.replace(told)


def _environment(ground: Ground, kind: str, told: Path) -> dict[str, str]:
    """What has a part read its clock by ``told``; the monotonic one stays as it is."""
    if kind != "redis":
        return {"CHAOS_CLOCK": str(told)}
    return {
        "LD_PRELOAD": str(ground.clocks),
        "FAKETIME_TIMESTAMP_FILE": str(told),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def kinds() -> dict[str, Kind]:
    """By name."""
    return {f"clock:{part}": Kind(partial(_choose, part), _strike, weight=0.7) for part in PARTS}
