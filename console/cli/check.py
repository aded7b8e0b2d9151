"""``penstock check``: run all checks of a start, reporting every failure instead of the first."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path

from penstock.config import Config
from penstock.config.load import load_config
from penstock.config.reading.dataset_path import code_name
from penstock.console.cli.command import many
from penstock.console.cli.doctor import tell
from penstock.console.cli.nouns import show_table
from penstock.console.launch.placement import place
from penstock.console.launch.preflight import check_data, check_ports, check_url, steps
from penstock.console.launch.run_parts import check_parts
from penstock.console.launch.trainable import unheeded
from penstock.console.progress import Steps
from penstock.console.resources import TRIED, Row
from penstock.console.terminal import print_json, say
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import numbered, visible_gpus
from penstock.metrics.probes import Check, Finding, Level, look_at_disk, passes, run_checks
from penstock.system.run_folder import RunFolder
from penstock.workers.rewards.jail.detect import check_jail

#: Time limit for reading rows of a user's source.
_LOOK_S = 60.0
#: A check -> the one that finds the same mistake first.
_AFTER = {"engine": "engine's interpreter", "engine.args": "engine", "placement": "device"}


def check_run(
    path: Path,
    overrides: list[str],
    without: frozenset[str],
    gpus: int | None,
    as_json: bool,
    num_tries: int = 0,
    *,
    verbose: bool = False,
) -> int:
    """Print findings, errors first, and the results of ``num_tries`` prompts; return the number of errors.

    Blocks for seconds, and for the engine if prompts are tried. Raises ConfigError if the file cannot be read.
    """
    check_parts(without)
    config = load_config(path, overrides)
    names = visible_gpus() if gpus is None else numbered(gpus)
    with Steps("checking", hidden=as_json) as progress:
        progress.at(0, "the environment of SGLang is read once, within a minute")
        findings = _ordered(once(run_checks(checks_of(config, without, names))), verbose or as_json)
    if not num_tries:
        return tell(findings, as_json)
    found = list(findings) if as_json else []
    errors = sum(one.level is Level.ERROR for one in found) if as_json else tell(findings, as_json)
    rows = () if errors else _try(path, config, place(config, names, without).workers, num_tries, as_json)
    if as_json:
        print_json({"findings": [asdict(one) for one in found], "samples": rows})
    elif errors:
        say(f"No prompt is tried until {'this error is' if errors == 1 else 'these errors are'} fixed.", err=True)
    else:
        _show(rows)
    return errors + sum(bool(row["error"]) for row in rows)


def _try(path: Path, config: Config, gpus: Sequence[tuple[str, ...]], count: int, as_json: bool) -> Sequence[Row]:
    """Try the first prompts and return the results. Raises ConfigError, EngineError."""
    from penstock.console.launch.trials import try_prompts

    try:
        check_data(config)
    except ConfigError as exc:
        if config.prepare is None:
            raise
        raise ConfigError(f"{exc} `penstock prepare --config {path}` runs what the key prepare names.") from exc
    # Keep the output of rewards and environments apart from the results.
    with Steps("trying prompts", count, hidden=as_json) as steps, redirect_stdout(sys.stderr):
        return try_prompts(config, count, next(iter(gpus), ()), steps.at)


def _show(rows: Sequence[Row]) -> None:
    show_table(TRIED, rows)
    for error in dict.fromkeys(row["error"] for row in rows if row["error"]):
        say(error, err=True)
    if failed := sum(bool(row["error"]) for row in rows):
        say(f"{failed} of {many(len(rows), 'prompt')} failed", err=True)


def checks_of(
    config: Config, without: frozenset[str] = frozenset(), gpus: tuple[str, ...] = ()
) -> Iterator[tuple[str, Check]]:
    """Yield the checks of a start, by name."""
    for what, step in steps(config, without=without, claims=False):
        # The kind of jail says more than that one was found.
        special = {"jail": look_at_jail, "data and policy": _data}.get(what)
        yield what, partial(special, config) if special else partial(_passed, what, step)
    if config.engine.url is not None and "worker" not in without:
        yield "engine.url", partial(_passed, "engine.url", partial(check_url, config.engine.url))
    if "trainer" not in without:
        yield "keys", lambda: [Finding("keys", Level.WARNING, *one) for one in unheeded(config)]
    yield "ports", partial(_passed, "ports", lambda: check_ports(config))
    yield "placement", partial(_passed, "placement", lambda: place(config, gpus, without))
    if config.prepare is None:
        yield "rows of your own code", lambda: _own_rows(config)
    yield "run's folder", lambda: [look_at_disk("run's folder", config.run_dir), _earlier(config)]


def _passed(what: str, step: Callable[[], object]) -> list[Finding]:
    return [passes(what, step, "fine")]


def look_at_jail(config: Config) -> Iterator[Finding]:
    """Report the jail for programs of answers. Blocks for a second."""
    try:
        found = check_jail(config.reward)
    except ConfigError as exc:
        yield Finding("jail", Level.ERROR, str(exc))
        return
    if config.reward.jail.kind == "none":
        todo = "set reward.jail.kind auto, unless this machine is a jail itself"
        yield Finding("jail", Level.WARNING, "none: programs of answers may do what this user may", todo)
    else:
        yield Finding("jail", Level.OK, found)


def _data(config: Config) -> Iterator[Finding]:
    num_prompts, batch = check_data(config), config.trainer.batch_groups
    if num_prompts is not None and num_prompts < batch:
        yield Finding(
            "data and policy",
            Level.WARNING,
            f"trainer.batch_groups is {batch}, and data.train has {num_prompts} prompts, so a batch repeats prompts",
            "lower it, or add prompts",
        )
    else:
        yield Finding("data and policy", Level.OK, "fine")


def _own_rows(config: Config) -> list[Finding]:
    """Check rows of user-defined sources, which a start leaves to the producer."""
    from penstock.producer.sources.validate import check_sources

    what = "rows of your own code"
    sources = [one for one in (*config.data.train, *config.data.eval) if code_name(one.path)]
    if not sources:
        return []
    if check_sources(sources, _LOOK_S):
        return [Finding(what, Level.OK, "fine")]
    names = ", ".join(one.path for one in sources)
    return [Finding(what, Level.WARNING, f"{names} took longer than {_LOOK_S:g} s", "the producer will wait for it")]


def once(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Drop repeated errors: a missing interpreter has no packages either."""
    said: set[str] = set()
    for one in findings:
        is_error = one.level is Level.ERROR
        if not is_error or not {one.found, _AFTER.get(one.what)} & said:
            yield one
        if is_error:
            said |= {one.found, one.what}


def _ordered(findings: Iterator[Finding], verbose: bool) -> list[Finding]:
    """Return errors, then warnings, then, if asked for, what is fine."""
    levels = [Level.ERROR, Level.WARNING, Level.OK]
    shown = [one for one in findings if verbose or one.level is not Level.OK]
    return sorted(shown, key=lambda one: levels.index(one.level))


def _earlier(config: Config) -> Finding:
    """Return what an earlier run of this name left, which a start resumes or moves away."""
    folder = RunFolder(config.run_dir)
    if folder.is_held():
        return Finding("run", Level.ERROR, f"run {config.run} is under way", "wait for its end, or take another name")
    record = folder.record()
    if record is None:
        return Finding("run", Level.OK, f"{config.run} is new")
    if record.state == "finished":
        return Finding("run", Level.WARNING, f"{config.run} is finished", "a start begins anew, and moves it to .prev")
    return Finding("run", Level.OK, f"{config.run} is {record.state}; a start resumes it, unless --fresh is given")
