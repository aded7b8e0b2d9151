"""``penstock trace`` of a run that is over: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from penstock.console.cli.main import execute
from penstock.history.row import Use
from penstock.history.writer import HistoryWriter
from tests.unit.console.read.trace.samples import sample
from tests.unit.console.web.run_files import make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = make_run(tmp_path, "demo")
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    rows = [sample(k=k, prompt="\x1b[2J evil") for k in range(2)]
    writer.write(rows, [Use(one.job, one.k, "actor", 3, version=2) for one in rows])
    writer.close()
    return tmp_path


def traced(runs: Path, *arguments: str) -> int:
    return execute(["trace", *arguments, "--run", "demo", "--directory", str(runs)])


def test_a_job_is_told_in_words(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traced(runs, "math/0/7/1") == 0
    out = capsys.readouterr().out
    assert "state: trained" in out
    assert "\x1b" not in out
    for words in ("failed reward_raised", "first token", "batch 3", "sample 1: 3 tokens, versions 3 to 4"):
        assert words in out
    assert "sample 0" not in out


def test_a_span_of_time_is_written_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "trace.json"
    span = "--from", "1970-01-01T00:16:40Z", "--to", "1100"
    assert traced(runs, "--perfetto", str(path), *span, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["events"] == len(json.loads(path.read_bytes())["traceEvents"]) > 20
    assert (told["from"], told["to"]) == ("1970-01-01T00:16:40Z", "1970-01-01T00:18:20Z")
    assert traced(runs, "--perfetto", str(path)) == 2
    assert "exists already" in capsys.readouterr().err
    assert traced(runs, "--perfetto", str(runs / "no" / "trace.json")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert traced(runs, "--perfetto", str(runs / "none.json"), "--from", "9000", "--to", "9001") == 0
    assert "Nothing is known of that time." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of them"),
        (["math/0/7", "--perfetto", "x"], "one of them"),
        (["math/0/7", "--last", "60s"], "--perfetto FILE writes"),
        (["math/0/8"], "knows nothing of"),
        (["evil"], "nothing that can be traced"),
        (["--perfetto", "x", "--last", "60y"], "--last '60y' is no length"),
        (["--perfetto", "x", "--last", "1m", "--from", "3"], "--from and --last"),
        (["--perfetto", "x", "--from", "noon"], "--from 'noon' is no time"),
        (["--perfetto", "x", "--from", "9", "--to", "8"], "before it begins"),
        (["--perfetto", "x", "--to", "nan"], "is no time"),
    ],
)
def test_what_makes_no_sense_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(runs)
    assert traced(runs, *arguments) == 2
    assert says in capsys.readouterr().err
    assert not (runs / "x").exists()
