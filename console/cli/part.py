"""Run one part of penstock as this process."""

import os
import signal
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from penstock.errors import EXIT_INTERRUPT

if TYPE_CHECKING:
    from penstock.config import Config


def run_part(
    package: str, part: str, path: Path, overrides: list[str], *arguments: str, module: str | None = None
) -> NoReturn:
    """Run ``main(config, ...)`` of ``module`` (PACKAGE.main) as this process; its result is the exit code."""
    from penstock.config.load import check_files, load_config
    from penstock.console.launch.trainable import (
        check_device,
        check_groups,
        check_hooks,
        check_rollouts,
        warn_of_unheeded,
    )
    from penstock.redis.saved_config import keep_config
    from penstock.system.garbage_collection import settle
    from penstock.system.logs import set_up

    config = load_config(path, overrides)
    set_up(part, config.run, config.logs.format)
    if package == "producer":
        check_rollouts(config)
    if part == "trainer":
        check_groups(config)
        check_hooks(config)
        check_device(config)
        warn_of_unheeded(config)
    check_files(config, data=package == "producer", model=part in ("producer", "trainer"))
    if part != "trainer" or config.debug.load_batches is None:  # a recording needs no Redis
        # There may be many workers and verifiers with different settings.
        keep_config(config, path, replace=package != "workers" or module == "penstock.workers.fleet.main")
        config = _with_redis(config)
    # For user-defined rewards and environments; last, so that they shadow nothing of ours.
    sys.path.append(os.getcwd())
    main_ = import_module(module or f"penstock.{package}.main").main
    settle()
    raise typer.Exit(main_(config, *arguments))


def _with_redis(config: "Config") -> "Config":
    """Return ``config`` with the address of a responding Redis; SIGTERM ends the wait."""
    from penstock.redis.await_redis import await_redis
    from penstock.redis.connect import check_durable
    from penstock.redis.control import Control

    # As process 1 of a container, SIGTERM would have no effect by default.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPT))
    try:
        config = await_redis(config)
        if config.redis.require_aof and (url := config.redis.url) is not None:
            with closing(Control(url)) as control:
                control.do(lambda client: check_durable(client, url))
    finally:
        signal.signal(signal.SIGTERM, before)
    return config
