"""The processes that ``penstock run`` starts besides Redis."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config
from penstock.console.launch.placement import Placement, count_gpus, serves_agents, sizes_of
from penstock.errors import ConfigError
from penstock.system.processes import Child

#: Seconds between two checks of the command.
TICK_S = 0.1


def prepare(config: Config) -> None:
    """Run the command alone, with our output. Blocks.

    Raises:
        ConfigError: no command is configured, or it failed.
    """
    if config.prepare is None:
        raise ConfigError("prepare: the configuration has no such key, so there is nothing to prepare.")
    folder = Path(config.prepare[0]).parent
    try:
        code = subprocess.run([sys.executable, *config.prepare], cwd=folder, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(f"prepare: there is no folder {folder}; correct the path, or remove the key.") from None
    if code != 0:
        raise ConfigError(f"prepare: {' '.join(config.prepare)} ended with exit code {code}; its output says why.")


def prepare_logged(script: str, arguments: list[str], log_path: Path, meanwhile: Callable[[], None]) -> str:
    """Run the script with its output in a log; return the last line of the log. Blocks.

    Args:
        meanwhile: called repeatedly while it runs; if it raises, the command is killed.

    Raises:
        ConfigError: it failed.
    """
    child = Child("prepare", [sys.executable, script, *arguments], dict(os.environ), log_path, Path(script).parent)
    try:
        child.start()
        while not child.ended():
            meanwhile()
            time.sleep(TICK_S)
    except BaseException:
        child.kill()
        raise
    if child.code != 0:
        raise ConfigError(f"prepare: {script} ended with {child.how()}, its last lines:\n{child.last_words()}")
    return child.last_words(1)


#: Parts that may be left out, to be started separately.
PARTS = ("buffer", "trainer", "producer", "worker", "verifiers", "gateway", "recorder")


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    #: Words of its command before and after the configuration.
    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    #: Visible GPUs; None: all.
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return additions to its environment."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def check_parts(without: Collection[str]) -> None:
    """Raise ConfigError for names that are not parts."""
    if unknown := sorted(set(without) - set(PARTS)):
        raise ConfigError(f"--without {unknown[0]}: a run has the parts {', '.join(PARTS)}.")


def parts_of(config: Config, placement: Placement, without: Collection[str] = ()) -> list[Part]:
    """Return the processes of a run, in start order."""
    parts = [Part(name, (name,)) for name in ("buffer", "trainer", "producer")]
    if config.history.enabled:
        # First, because groups that retire without a recorder are not recorded.
        parts.insert(1, Part("recorder", ("recorder",)))
    if config.reward.pool.kind == "rq":
        parts.append(Part("verifiers", ("verifiers",), ("--name", "verifiers")))
    if serves_agents(config):
        parts.append(Part("gateway", ("serve",)))
    parts = [part for part in parts if part.name not in without]
    if "worker" in without:
        return parts
    if config.fleet.models:
        return [*parts, Part("fleet", ("fleet", "up"), gpus=placement.fleet_gpus)]
    for index, gpus in enumerate(placement.workers):
        parts.append(Part(f"worker-{index}", ("worker",), ("--name", f"worker-{index}"), gpus or None))
    return parts


def as_text(config: Config, placement: Placement, without: Collection[str] = ()) -> str:
    """Format the plan of a run: a line per process, then the fleet's."""
    trainer, ranks = config.trainer, "s" if config.trainer.dp_size > 1 else ""
    engine = f"engine {config.engine.url}" if config.engine.url else f"an engine ({sizes_of(config)})"
    what = {
        "redis": "given" if config.redis.url else "a server of its own",
        "trainer": f"{trainer.dp_size} rank{ranks} on {trainer.device}, weights by {trainer.transport}",
        "fleet": "penstock fleet up",
    }
    gpus = {
        "trainer": _gpus(placement.trainer),
        "worker": "",
        "fleet": "by Ray" if config.fleet.launcher == "ray" else "as below",
        **{f"worker-{index}": _gpus(names) for index, names in enumerate(placement.workers)},
    }
    kept = {"worker"} & set(without)
    lines = [f"run {config.run}, {count_gpus(len(placement.gpus))} on this machine"]
    for name in ("redis", *(part.name for part in parts_of(config, placement, kept)), *kept):
        about = "left out, to be started separately" if name in without else what.get(name, "")
        about = engine if name.startswith("worker-") else about
        lines.append(f"  {name:<10}  {gpus.get(name, 'no GPU'):<14}  {about}".rstrip())
    if placement.free:
        lines.append(f"  {'(free)':<10}  {_gpus(placement.free)}")
    if placement.fleet is not None:
        from penstock.workers.fleet.show import as_text as fleet_as_text

        lines.append(fleet_as_text(placement.fleet))
    return "\n".join(lines)


def _gpus(names: Sequence[str]) -> str:
    return ("GPU " if len(names) == 1 else "GPUs ") + ",".join(names) if names else "no GPU"
