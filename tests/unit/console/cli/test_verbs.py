"""What all verbs have in common, by their options: none is different from the others without a reason told here."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from penstock.console.cli import main as cli

#: Parts of a run, what starts one, and what a person looks at: they print no result.
NO_RESULT = {
    *("run", "prepare", "redis", "producer", "worker", "buffer serve", "verifiers", "trainer", "recorder", "serve"),
    *("fleet up", "web", "top", "init", "engine install"),
}
#: What cannot be taken back, or holds a run up: it asks a person, and can be looked at before.
DESTRUCTIVE = {
    *("jobs cancel", "dead requeue", "dead purge", "subs drop", "payloads drain", "payloads lose"),
    *("fleet scale", "fleet engines", "engines offload"),
}
#: It changes something, and another verb takes that back.
CHANGES = {
    *("pause", "resume", "subs set", "payloads add", "engines onload"),
}
#: It looks, or writes what nobody has yet.
LOOKS = {
    *("status", "why", "audit", "doctor", "check", "peek", "export", "fleet plan", "fleet ls", "engines check"),
    *("jobs ls", "jobs show", "dead ls", "dead show", "workers ls", "workers show", "trainers ls", "subs ls"),
    *("weights ls", "buffer ls", "payloads ls", "samples ls", "samples show", "eval ls", "eval show"),
    *("metrics discovery", "trace", "reward try", "data ls", "data show"),
}
#: It is JSON already.
JSON_ALREADY = {"metrics discovery"}
PAGED = {"--where", "--sort", "--limit", "--after", "--json"}
#: Of no run that is there.
NO_RUN = {"check", "fleet plan"}


def walk(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from walk(inner, f"{path}{name} ")
        else:
            yield path + name, inner


VERBS = dict(walk(typer.main.get_command(cli.app)))


def options(verb: str) -> set[str]:
    return {name for parameter in VERBS[verb].params for name in parameter.opts if name.startswith("--")}


def test_each_verb_is_told_here_once() -> None:
    kinds = [NO_RESULT, DESTRUCTIVE, CHANGES, LOOKS]
    assert sorted(VERBS) == sorted(verb for kind in kinds for verb in kind)


@pytest.mark.parametrize("verb", sorted(DESTRUCTIVE))
def test_what_cannot_be_taken_back_can_be_looked_at_before(verb: str) -> None:
    assert {"--yes", "--dry-run", "--json"} <= options(verb)


@pytest.mark.parametrize("verb", sorted((DESTRUCTIVE | CHANGES | LOOKS) - JSON_ALREADY))
def test_every_verb_with_a_result_has_it_as_json(verb: str) -> None:
    assert "--json" in options(verb)


@pytest.mark.parametrize("verb", [*sorted(verb for verb in VERBS if verb.endswith(" ls")), "peek"])
def test_all_lists_are_filtered_sorted_and_paged_alike(verb: str) -> None:
    assert options(verb) >= PAGED


@pytest.mark.parametrize("verb", sorted((DESTRUCTIVE | CHANGES | LOOKS) - NO_RUN | {"top"}))
def test_a_run_is_named_alike_and_the_shell_completes_it(verb: str) -> None:
    assert {"--run", "--redis", "--directory"} <= options(verb)
    run = next(parameter for parameter in VERBS[verb].params if "--run" in parameter.opts)
    assert completes(run), "--run"
    assert [one for one in VERBS[verb].params if not one.opts[0].startswith("-")], "the run, if it takes nothing else"


def completes(parameter: Any) -> bool:
    return getattr(parameter, "_custom_shell_complete", None) is not None
