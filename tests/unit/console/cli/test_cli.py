"""The command line: exit codes, one sentence on stderr, no traceback, nothing heavy imported before its time."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.console.cli import main as cli
from penstock.errors import ConfigError, PayloadError, QueueUnavailable
from tests.closed_pipe import run_without_a_reader

YAML = "run: demo\nmodel: {path: m}\ndata: {train: [{name: t, path: t.jsonl}]}\n"


def penstock(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(cli.__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root), **env}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)

    done = penstock("run", "run.yaml", "--worker.slot=3", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr == (
        "penstock: worker.slot (the argument --worker.slot): there is no such key; did you mean worker.slots?\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom penstock.console.cli import main as cli\n"
        "try: cli.main(['run', '--help'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'redis', 'matplotlib', 'transformers', 'asyncio', 'penstock.config'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy), file=sys.stderr)"
    )
    root = Path(cli.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "--resume" in done.stdout
    assert "heavy []" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("Say this."), 2),
        (QueueUnavailable("No Redis at redis://:hush@h."), 2),
        (PayloadError("Say this."), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)

    assert cli.execute([]) == code
    said = capsys.readouterr().err
    assert "hush" not in said
    assert said.count("\n") == (0 if code == 130 else 1)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("producer", "producer"),
        ("worker --name w", "w"),
        ("buffer", "buffer"),
        ("verifiers", "verifiers"),
        ("recorder", "recorder"),
        ("trainer", "trainer"),
        ("serve", "gateway"),
        ("fleet up", "fleet"),
        ("worker --name w --redis redis://h", "w"),
    ],
)
def test_every_part_logs_in_its_format_under_its_name(part: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, str]] = []

    def run_part(package: str, name: str, path: Path, overrides: list[str], *_: object, **__: object) -> None:
        given.append((name, overrides[-1]))

    monkeypatch.setattr(cli, "run_part", run_part)
    assert cli.execute([*part.split(), "--config", "run.yaml", "--log-format", "json"]) == 0
    assert given == [(name, "--logs.format=json")]


def test_resume_and_fresh_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)

    done = penstock("run", "run.yaml", "--resume", "--fresh", cwd=tmp_path)

    assert (done.returncode, "give one of them" in done.stderr) == (2, True)


#: A mistake in the command line, and what is said of it; no Redis and no configuration is there.
USAGE = [
    ("", "Give a command: run, "),
    ("stauts", "No such command 'stauts': did you mean 'status' or 'subs'?"),
    ("zzz", "No such command 'zzz'; `penstock --help` says what there is."),
    ("jobs", "Give a command: ls, show or cancel; `penstock jobs --help` describes them."),
    ("pause", "Missing argument"),
    ("pause trian", "'trian' is not one of"),
    ("buffer", "Missing option '--config' / '-c'; `penstock buffer --help` says what there is."),
    ("buffer --config none.yaml", "There is no configuration none.yaml; name a YAML file that exists."),
    ("jobs lss", "No such command 'lss': did you mean 'ls'?"),
    ("--vershun", "No such option: --vershun: did you mean --version?"),
    ("--redis redis://h status", "No such option: --redis; "),
    ("run", "Missing argument 'CONFIG'; `penstock run --help` says what there is."),
    ("run nothing.yaml", "There is no configuration nothing.yaml; name a YAML file that exists."),
    ("run run.yaml more.yaml", "The argument 'more.yaml' is one too many: "),
    ("run run.yaml --fersh", "There is no option --fersh: did you mean --fresh?"),
    ("run run.yaml --frsh=1", "There is no option --frsh: did you mean --fresh?"),
    ("run run.yaml --trainer.lr 3", "--trainer.lr has no value: write --trainer.lr=3."),
    ("run run.yaml --trainer.lr", "--trainer.lr has no value: write --trainer.lr=VALUE."),
    ("worker", "Missing option '--config' / '-c'; `penstock worker --help` says what there is."),
    ("worker --config", "requires an argument"),
    ("worker --config run.yaml --name a/b", "--name"),
    ("buffer --config run.yaml --log-format xml", "Invalid value for '--log-format': 'xml' is not one of"),
    ("status --runn x", "No such option: --runn: did you mean --run?"),
    ("status extra", "No Redis is known for run 'extra'"),
    ("status extra --run other", "The run is named twice: extra and --run other; give one of them."),
    ("jobs ls --limit 0", "Invalid value for '--limit': it should be greater than or equal to 1; `penstock jobs ls "),
    ("jobs ls --limit many", "Invalid value for '--limit': it should be an integer; `penstock jobs ls --help` says"),
    ("top --every fast", "Invalid value for '--every': it should be a number; `penstock top --help` says"),
    ("dead show", "Missing argument 'JOB'"),
    ("fleet scale -3", "No such option: -3"),
    ("payloads add p2", "Missing argument 'url'"),
]


@pytest.mark.parametrize(("line", "said"), USAGE)
def test_a_usage_mistake_is_one_sentence_and_exit_code_2(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    code = cli.execute(line.split())

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_usage_mistake_says_so_as_a_program(tmp_path: Path) -> None:
    done = penstock("stauts", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "penstock: No such command 'stauts': did you mean 'status' or 'subs'?\n"


def test_the_version_is_told(tmp_path: Path) -> None:
    from penstock import __version__

    done = penstock("--version", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, f"penstock {__version__}\n")


def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    for words, at, completed in (("penstock sta", 1, "status"), ("penstock jobs can", 2, "cancel")):
        done = penstock(cwd=tmp_path, _PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(at))
        assert done.stdout.split() == [completed]


@pytest.mark.parametrize("errno_", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_folder_that_may_not_be_written_is_a_sentence(
    errno_: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno_, os.strerror(errno_), "/ro/runs")

    monkeypatch.setattr(cli, "app", fail)

    assert cli.execute([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: /ro/runs: {os.strerror(errno_)}; let this user write there")


def test_a_reader_that_left_ends_a_command_quietly(tmp_path: Path) -> None:
    done = run_without_a_reader(["-m", "penstock.cli", "--help"], tmp_path)

    assert (done.returncode, done.stderr) == (141, "")


def test_a_pipe_that_broke_inside_is_no_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        try:
            raise BrokenPipeError(errno.EPIPE, "a child's pipe")
        except BrokenPipeError:
            sys.exit(1)  # as typer does

    monkeypatch.setattr(cli, "app", fail)

    with pytest.raises(BrokenPipeError, match="a child's pipe"):
        cli.execute([])


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command of the tree that does something, by its words."""
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(path), command
    for name, child in (children or {}).items():
        yield from commands(child, (*path, name))


def test_redis_is_named_by_the_same_option_under_both_names_in_every_command() -> None:
    found = {
        path: next((one.opts for one in command.params if "--redis" in one.opts), None)
        for path, command in commands(typer.main.get_command(cli.app))
        if path not in ("web", "init", "engine install")  # of all runs of a folder, or of none
    }

    assert {"run", "redis", "worker", "status", "dead requeue", "fleet up", "payloads add"} <= found.keys()
    assert {path: opts for path, opts in found.items() if opts != ["--redis", "--redis.url"]} == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--redis", "redis://127.0.0.1:1/0"),
        ("--redis=redis://127.0.0.1:1/0",),
        ("--redis.url", "redis://127.0.0.1:1/0"),
        ("--redis.url=redis://127.0.0.1:1/0",),
    ],
)
@pytest.mark.parametrize("command", [("run", "run.yaml"), ("status", "--run", "demo")])
def test_both_names_are_understood_with_and_without_an_equals_sign(
    tmp_path: Path, command: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "run.yaml").write_text(YAML + "engine: {url: 'http://127.0.0.1:1'}\n")
    (tmp_path / "t.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")

    done = penstock(*command, *arguments, cwd=tmp_path)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No Redis answers at redis://127.0.0.1:1/0" in done.stderr


def test_a_part_that_a_run_does_not_have_cannot_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)

    done = penstock("run", "run.yaml", "--without", "trainers", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr == (
        "penstock: --without trainers: a run has the parts buffer, trainer, producer, worker, verifiers, gateway, "
        "recorder.\n"
    )


def test_verbs_of_a_run_that_is_over_say_how_to_look_into_what_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "digits"
    (folder / "redis").mkdir(parents=True)
    (folder / "redis.json").write_text('{"url": "redis://:secret@127.0.0.1:1/0"}')
    (folder / "run.json").write_text('{"state": "finished", "started_s": 1.0}')

    over = penstock("status", cwd=tmp_path)
    named = penstock("status", "--redis=redis://127.0.0.1:1/0", cwd=tmp_path)

    assert over.returncode == named.returncode == 2
    assert over.stderr.startswith(
        "penstock: Run digits is over (finished), and its Redis ended with it: `penstock redis "
    )
    assert "--config runs/digits/config.yaml --redis.url=null` serves what it left" in over.stderr
    assert "No Redis answers at redis://127.0.0.1:1/0" in named.stderr, "whoever names a Redis means that one"
