"""What cannot be taken back: asked where a person sits, gone on with or refused where nobody does."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from penstock.console.cli.command import agree
from penstock.errors import ConfigError


def sits_there(monkeypatch: pytest.MonkeyPatch, answer: bool) -> list[str]:
    """A person at a terminal who answers so; what was asked."""
    asked: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        asked.append(question)
        return answer

    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(isatty=lambda: True, write=lambda _: 0, flush=lambda: None))
    monkeypatch.setattr(typer, "confirm", confirm)
    return asked


def test_a_person_is_asked_and_no_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sits_there(monkeypatch, answer=True)
    agree("cancel 3 jobs \x1b[2J", yes=False)
    assert asked == ["Cancel 3 jobs \\x1b[2J?"]

    sits_there(monkeypatch, answer=False)
    with pytest.raises(typer.Exit) as ended:
        agree("cancel 3 jobs", yes=False)
    assert ended.value.exit_code == 1


def test_nobody_is_asked_who_said_yes_or_is_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="This would purge 3 jobs: pass --yes"):
        agree("purge 3 jobs", yes=False, must_say=True)
    agree("cancel 3 jobs", yes=False)
    agree("purge 3 jobs", yes=True, must_say=True)
    asked = sits_there(monkeypatch, answer=False)
    agree("purge 3 jobs", yes=True, must_say=True)
    assert asked == []
