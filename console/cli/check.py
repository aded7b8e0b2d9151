"""``penstock check``: all that can be known before a run, each thing by itself, where a start stops at the first."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from console.cli.doctor import told
from console.launch.placement import place
from console.launch.preflight import steps
from console.launch.run_parts import check_parts
from console.read.health import Check, Finding, Level, look_at_disk, passes, run_checks
from penstock.config import Config
from penstock.config.load import load_config
from penstock.system.gpus import numbered, visible_gpus
from penstock.system.run_folder import RunFolder


def check_run(path: Path, overrides: list[str], without: frozenset[str], gpus: int | None, as_json: bool) -> int:
    """Print what was found; how many errors. Blocks for seconds. Raises ConfigError where the file cannot be read."""
    check_parts(without)
    config = load_config(path, overrides)
    names = visible_gpus() if gpus is None else numbered(gpus)
    return told(_once(run_checks(_checks(config, without, names))), as_json)


def _checks(config: Config, without: frozenset[str], gpus: tuple[str, ...]) -> Iterator[tuple[str, Check]]:
    for what, step in steps(config, trains="trainer" not in without, claims=False):
        yield what, partial(_passed, what, step)
    yield "placement", partial(_passed, "placement", lambda: place(config, gpus, without))
    yield "run's folder", lambda: [look_at_disk("run's folder", config.run_dir), _earlier(config)]


def _passed(what: str, step: Callable[[], object]) -> list[Finding]:
    return [passes(what, step, "fine")]


def _once(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Without errors that were told already: an interpreter that is not there has no packages either."""
    said: set[str] = set()
    for one in findings:
        if one.level is not Level.ERROR or one.found not in said:
            yield one
        said.add(one.found)


def _earlier(config: Config) -> Finding:
    """What a run of this name left, which a start goes on with or moves away."""
    folder = RunFolder(config.run_dir)
    if folder.is_held():
        return Finding("run", Level.ERROR, f"run {config.run} is under way", "wait for its end, or take another name")
    record = folder.record()
    if record is None:
        return Finding("run", Level.OK, f"{config.run} is new")
    if record.state == "finished":
        return Finding("run", Level.WARNING, f"{config.run} is finished", "a start begins anew, and moves it to .prev")
    return Finding("run", Level.OK, f"{config.run} is {record.state}; a start goes on with it, but for --fresh")
