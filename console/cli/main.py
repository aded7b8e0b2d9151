"""The command line. Kept thin: parse arguments, then import what does the work.

Exit codes: 0 done, 1 an error of penstock, 2 a mistake in the command line or the configuration, or no Redis,
130 Ctrl-C, 141 the reader of the output exited (``| head``).
"""

import errno
import logging
import os
import signal
import socket
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from penstock.console.cli import inspect
from penstock.console.cli.command import (
    OVERRIDES,
    Answer,
    FolderOption,
    LogFormatOption,
    RedisOption,
    command,
)
from penstock.console.cli.fleet import fleet_app
from penstock.console.cli.metrics import metrics_app
from penstock.console.cli.nouns import APPS, SERVE
from penstock.console.cli.setup import engine_app, init
from penstock.console.cli.target import DIRECTORY
from penstock.console.cli.usage import Source, UsageMistake, overrides_of, sentence
from penstock.console.terminal import flush, hush, reader_left, say
from penstock.errors import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_INTERRUPT,
    EXIT_PIPE,
    ConfigError,
    PenstockError,
    QueueUnavailable,
)
from penstock.system.extras import check_installed, is_extra, needed
from penstock.system.logs import say_end, without_a_log

if TYPE_CHECKING:
    from penstock.config import Config

#: Default port of the page.
PORT = 8420


def web(
    directory: FolderOption = DIRECTORY,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of loopback; 0: one that is free.")] = PORT,
    actions: Annotated[
        bool, typer.Option("--actions", help="Let the page requeue, purge and pause, for users with the token.")
    ] = False,
) -> None:
    """Show the runs of a folder in a browser: waits, curves, queue, workers, weights, configuration."""
    for package in ("fastapi", "uvicorn"):
        check_installed(package, "`penstock web`")
    from penstock.console.web.serve import serve

    serve(directory, port, actions=actions)


#: File system errors from a wrong path or missing permissions.
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)

app = typer.Typer(
    name="penstock",
    help="Keep trainers fed: prompts in, versioned batches of rollouts out.",
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from penstock.names import __version__

        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep trainers fed: prompts in, versioned batches of rollouts out."""


@app.command(context_settings=OVERRIDES)
def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the old run moves to NAME.prev.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", metavar="PART", help="Leave out a part that you start yourself: trainer, worker, ..."
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the GPUs of each part, and start nothing.")] = False,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, metavar="N", help="Plan as if this machine had N GPUs.")
    ] = None,
    redis: RedisOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """Start everything that a run needs on this machine, show it, and end when the trainer has finished."""
    from penstock.config.load import load_config
    from penstock.metrics.gpu_load import numbered, visible_gpus

    if resume and fresh:
        raise ConfigError("--resume continues the run and --fresh starts over: give one of them.")
    loaded = load_config(config, overrides_of(context))
    names = visible_gpus() if gpus is None else numbered(gpus)
    left_out = frozenset(without or ())
    if plan:
        _show_plan(loaded, names, left_out)
        return
    from penstock.console.launch.run import Choice, launch

    choice: Choice = "resume" if resume else "fresh" if fresh else None
    raise typer.Exit(launch(loaded, choice, without=left_out, gpus=names))


def _show_plan(config: "Config", gpus: tuple[str, ...], without: frozenset[str]) -> None:
    from penstock.console.launch.placement import place
    from penstock.console.launch.run_parts import as_text, check_parts

    check_parts(without)
    say(as_text(config, place(config, gpus, without), without))


@command(app, context_settings=OVERRIDES)
def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")],
    answer: Answer,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="PART", help="Skip a part, as `penstock run --without` does."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, metavar="N", help="As if this machine had N GPUs.")
    ] = None,
    try_: Annotated[
        int,
        typer.Option(
            "--try", min=0, max=10_000, metavar="N", help="Send N prompts through engine, environment and reward."
        ),
    ] = 0,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show what is fine, too.")] = False,
    redis: RedisOption = None,
) -> None:
    """Check all that can be checked before a run; start and change nothing. Exit code 2 on an error.

    With --try it also starts the run's engine, shows its answers to a few prompts, and ends it again.
    """
    from penstock.console.cli.check import check_run

    if check_run(config, overrides_of(context), frozenset(without or ()), gpus, answer.as_json, try_, verbose=verbose):
        raise typer.Exit(EXIT_CONFIG)


@command(app, context_settings=OVERRIDES)
def prepare(source: Source) -> None:
    """Run the configuration's ``prepare`` command alone: it makes data and the first policy."""
    from penstock.config.load import load_config
    from penstock.console.launch.run_parts import prepare as prepare_

    prepare_(load_config(source.path, source.overrides))


@command(app, context_settings=OVERRIDES)
def redis(source: Source) -> None:
    """Run the Redis server of a run in the foreground, until SIGTERM or Ctrl-C."""
    from penstock.config.load import load_config
    from penstock.console.launch.own_redis import serve_redis
    from penstock.redis.saved_config import keep_config
    from penstock.system.logs import set_up

    loaded = load_config(source.path, source.overrides)
    set_up("redis", loaded.run, loaded.logs.format)
    keep_config(loaded, source.path, replace=True)
    raise typer.Exit(serve_redis(loaded))


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


#: Parts of a run that a process of its own executes: package, module if not PACKAGE.main, help.
_PARTS = {
    "producer": ("producer", None, "Admit prompts as jobs, as far as the gate allows."),
    "serve": (
        "workers", "workers.agents.gateway.main",
        "Serve agents: a gateway by which they run episodes with clients of OpenAI or Anthropic.",
    ),
    "recorder": (
        "consumers", "consumers.history.main",
        "Record finished samples in files of the run's folder. From its first start on, groups wait for it to retire.",
    ),
    "trainer": ("consumers", "consumers.grpo.main", "Run the reference GRPO trainer."),
    "worker": (
        "workers", None,
        "Generate and reward: one engine, any number of samples at once. May join and leave at any moment.",
    ),
    "verifiers": (
        "workers", "workers.rewards.pool.pool",
        "Compute rewards for the workers (reward.pool.kind: rq). Any number of these may join and leave.",
    ),
}  # fmt: skip


def _add_part(group: typer.Typer, verb: str, package: str, module: str | None, about: str, **settings: Any) -> None:
    module = module and f"penstock.{module}"

    def part(source: Source) -> None:
        name = package if package == "buffer" else {"serve": "gateway", "up": "fleet"}.get(verb, verb)
        run_part(package, name, source.path, source.overrides, module=module)

    def named_part(
        source: Source,
        name: Annotated[str | None, typer.Option("--name", help="Its name in the run; default: host and pid.")] = None,
    ) -> None:
        from penstock.names import check_name

        name = check_name("--name", name or f"{socket.gethostname()[:48]}-{os.getpid()}")
        run_part(package, name if verb == "worker" else verb, source.path, source.overrides, name, module=module)

    command(group, verb, help=about, context_settings=OVERRIDES, **settings)(
        named_part if verb in ("worker", "verifiers") else part
    )


for _verb, _part in _PARTS.items():
    _add_part(app, _verb, *_part)
_add_part(
    APPS["buffer"], SERVE, "buffer", None, hidden=True,
    about="Cut finished groups into batches for the trainers. `penstock buffer ls` lists the groups that are ready.",
)  # fmt: skip
_add_part(
    fleet_app, "up", "workers", "workers.fleet.main",
    "Start the engines and workers of the fleet and keep them up, until SIGTERM or Ctrl-C: workers drain then.",
)  # fmt: skip
inspect.register(app)
app.command()(web)
app.command()(init)
app.add_typer(engine_app, name="engine")
app.add_typer(fleet_app, name="fleet")
app.add_typer(metrics_app, name="metrics")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run ``penstock``; always end by SystemExit with the exit codes above."""
    try:
        code = execute(arguments)
        flush()
    except BrokenPipeError:
        code = EXIT_PIPE
    finally:
        hush()
    sys.exit(code)


def execute(arguments: list[str] | None) -> int:
    """Run one command line; print errors and return the exit code."""
    without_a_log()
    try:
        return int(app(arguments, prog_name="penstock", standalone_mode=False) or 0)
    except typer.Abort:
        return EXIT_INTERRUPT
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except (ConfigError, QueueUnavailable) as exc:
        return _fail(exc, EXIT_CONFIG)
    except PenstockError as exc:
        return _fail(exc, EXIT_ERROR)
    except ModuleNotFoundError as exc:
        if not is_extra(exc):
            raise
        return _fail(exc, EXIT_CONFIG, f"this part needs {needed(exc.name or '')}")
    except UsageMistake as exc:
        return _fail(exc, EXIT_CONFIG, sentence(exc))
    except OSError as exc:
        if exc.errno not in FORBIDDEN or exc.filename is None:
            raise
        return _fail(exc, EXIT_CONFIG, _forbidden(exc))
    except SystemExit as exc:
        # typer and rich exit like this on a broken pipe, which may be another one than that of our output.
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        if not reader_left():
            raise exc.__context__ from None
        return EXIT_PIPE
    except Exception as exc:
        from penstock.redis.refusals import in_words

        if (told := in_words(exc)) is None:
            raise
        return _fail(told, EXIT_CONFIG if isinstance(told, QueueUnavailable) else EXIT_ERROR)


def _forbidden(exc: OSError) -> str:
    return (
        f"{exc.filename}: {exc.strerror}; let this user write there, or name another folder (--directory, or the key "
        "of the configuration that names it)."
    )


def _fail(exc: Exception, code: int, text: str | None = None) -> int:
    logging.getLogger(__name__).debug("traceback", exc_info=exc)
    say_end(text or str(exc))
    return code


if __name__ == "__main__":
    main()
