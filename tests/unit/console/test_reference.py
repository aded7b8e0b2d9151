"""Whoever asks how a page is written is told, and no file is."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.reference import write


def test_a_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    write(lambda: "page", "console.x", [str(tmp_path / "x.md")])
    assert (tmp_path / "x.md").read_text() == "page"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "usage: python -m console.x [-h] FILE"),
        ([], 2, "the following arguments are required: FILE"),
        (["--out", "x"], 2, "unrecognized arguments: --out"),
        (["no/x.md"], 2, "no/x.md cannot be written (No such file or directory): name another file."),
    ],
)
def test_what_names_no_file_writes_none(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        write(lambda: "page", "console.x", arguments)
    assert ended.value.code == code
    said = capsys.readouterr()
    assert says in said.out + said.err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("module", ["tests.reference.configuration", "tests.reference.metrics", "benchmarks.tail_task"])
def test_help_is_no_name_of_a_file(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # it is run anew
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert "sage: " in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []
