"""``ifbench`` beyond its verdicts: nothing is fetched, what is not here is named, and no text ends its process."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import RewardConfig
from penstock.workers.rewards.kinds.ifbench import MAX_INSTRUCTIONS, _checkers, ifbench
from penstock.workers.rewards.kinds.kind import Question
from penstock.workers.rewards.processes import CheckProcesses
from tests.missing import module
from tests.unit.workers.rewards.kinds.test_hostile_answers import TEXTS

#: What a fetch would call, and an address that answers nothing.
OFFLINE = """
import socket
from penstock.workers.rewards.kinds import ifbench
from penstock.workers.rewards.kinds.kind import Question

def connect(*_):
    raise SystemExit("it asked the network")

socket.socket.connect = socket.getaddrinfo = connect
import nltk
fetches = nltk.download
ifbench.load()
assert nltk.download is fetches
print(ifbench.ifbench(Question("No comma", metadata={"instruction_id_list": ["punctuation:no_comma"]})))
try:
    ifbench.ifbench(Question("A B", metadata={"instruction_id_list": ["format:title_case"]}))
except ValueError as exc:
    print(exc)
"""


def of(text: str, *names: str, **more: Any) -> Question:
    return Question(text, metadata={"instruction_id_list": list(names), **more})


def test_nothing_is_fetched_and_what_is_not_here_is_named(tmp_path: Path) -> None:
    module("if_verifiable")
    places = {"HOME": str(tmp_path), "NLTK_DATA": str(tmp_path)}
    env = {**os.environ, **places}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "1.0"
    assert second == (
        "reward ifbench: instruction format:title_case needs nltk's punkt_tab, which is not installed: run `python -m "
        "nltk.downloader punkt_tab` on a machine with a network, and set NLTK_DATA to its folder"
    )


async def test_its_process_is_handed_the_metadata() -> None:
    module("if_verifiable")
    checks = CheckProcesses(1, cpu_s=60, config=RewardConfig())
    try:
        assert (await checks.check("ifbench", of("no comma", "punctuation:no_comma"))) == 1
        assert (await checks.check("ifbench", of("a, b", "punctuation:no_comma"))) == 0
        with pytest.raises(ValueError, match="reward ifbench: there is no instruction 'nobody'"):
            await checks.check("ifbench", of("x", "nobody"))
        with pytest.raises(ValueError, match="reward ifbench: the metadata hold what is no JSON"):
            await checks.check("ifbench", of("x", "punctuation:no_comma", more=b"\0"))
        assert (await checks.check("math", Question("\\boxed{5}", "5"))) == 1
    finally:
        await checks.close()


def test_a_verdict_is_the_same_at_every_look() -> None:
    """Checkers draw what their kwargs do not say, and the language of a text is guessed by chance."""
    module("if_verifiable")
    for name in ("keywords:existence", "language:response_language", "length_constraints:number_words"):
        found = {ifbench(of("one two three vier cinq", name, kwargs={})) for _ in range(8)}
        assert len(found) == 1, name


def test_no_answer_is_written_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    module("if_verifiable")
    for name in _checkers():
        with contextlib.suppress(ValueError):
            ifbench(of("\ud800 \x1b[2 123", name, kwargs={"language": "en"}))
    assert [record.getMessage() for record in caplog.records] == []


def test_more_instructions_than_a_prompt_has_are_refused() -> None:
    with pytest.raises(ValueError, match=f"a list instruction_id_list of 1 to {MAX_INSTRUCTIONS} names, and here it"):
        ifbench(of("x", *["punctuation:no_comma"] * (MAX_INSTRUCTIONS + 1)))


@settings(max_examples=40, deadline=None)
@given(text=TEXTS, kwargs=st.dictionaries(st.sampled_from(["N", "num_words", "relation", "keywords", "m"]), TEXTS))
def test_T11_a_hostile_answer_is_a_number_or_a_named_failure(text: str, kwargs: dict[str, Any]) -> None:
    module("if_verifiable")
    for name in _checkers():
        for given_ in ({}, kwargs):
            with contextlib.suppress(ValueError):
                assert ifbench(of(text, name, kwargs=given_)) in (0, 1)
