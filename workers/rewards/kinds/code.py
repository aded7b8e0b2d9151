"""``code``: run the program in an answer against the tests in its label, each in a jail of its own.

The jailed program gets only a test's input. The expected result stays outside, where the output is compared: a program
can only forge results it knows.
"""

import re
from dataclasses import dataclass
from typing import Any

from penstock.config.reward import CodeConfig
from penstock.workers.rewards.jail.jail import Jail
from penstock.workers.rewards.jail.sandbox import Sandbox
from penstock.workers.rewards.jail.task import End, Ended, Task
from penstock.workers.rewards.kinds.boxed import after_thoughts
from penstock.workers.rewards.kinds.code_tests import Cases, is_right, read_tests
from penstock.workers.rewards.kinds.kind import Case, Question

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py", "py3")


def code_block(text: str) -> str:
    """Return the last Python block after a model's thoughts; to the end of the answer if the block is not closed; all
    of the answer if it has no Python block."""
    text = after_thoughts(text)
    blocks = [code for language, code in _FENCE.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text


#: Why a test failed, besides the ways a program may end.
WRONG, NO_TIME_LEFT, NO_CODE = "wrong_output", "no_time_left", "no_code"
#: Longest last error line of a program that is kept, in characters.
MAX_SAID = 200


@dataclass(frozen=True, slots=True)
class Workshop:
    """The jail and the configuration of programs in answers."""

    config: CodeConfig
    jail: Jail | Sandbox


def read_label(label: str) -> None:
    """Raise ValueError if a label has no tests."""
    read_tests(label)


def code(question: Question, workshop: Workshop) -> dict[str, Any]:
    """Return ``score``: 1 if all tests pass, else 0, or the share that passes (``reward.code.score``); ``passed``,
    ``tests``; ``failed``: the index of the first test that did not pass, why, and the program's last error line.

    Blocks for at most ``code.total_s``, not counting the wait for a free core and for starts.

    Raises:
        ValueError: the label has no tests.
        JailError: no program can be run.
    """
    config = workshop.config
    found = read_tests(question.label)
    tests = found.tests
    program = code_block(question.text)
    if not program.strip():
        return {"score": 0.0, "passed": 0, "tests": len(tests), "failed": {"test": 0, "why": NO_CODE}}
    passed, left_s, failed = 0, config.total_s, None
    for index, test in enumerate(tests):
        why, said, took_s = _run_test(test, found, program, workshop, left_s)
        left_s -= took_s
        passed += not why
        if why and failed is None:
            failed = {"test": index, "why": why, **({"said": said} if said else {})}
        if why and (config.score == "all" or left_s <= 0):
            break
    score = float(passed == len(tests)) if config.score == "all" else passed / len(tests)
    return {"score": score, "passed": passed, "tests": len(tests), **({"failed": failed} if failed else {})}


def _run_test(test: Case, tests: Cases, program: str, workshop: Workshop, left_s: float) -> tuple[str, str, float]:
    """Return (why the test does not pass, or ''; the program's last error line; seconds)."""
    if left_s <= 0:
        return NO_TIME_LEFT, "", 0.0
    task = Task(tests.program(program, test), test.stdin, test.function or None, test.arguments)
    ended = workshop.jail.run(task, test_s=left_s)
    if ended.how is not End.DONE:
        return ended.how.value, _last_line(ended), ended.took_s
    right = is_right(test, ended.output, workshop.config.tolerance)
    return ("" if right else WRONG), "", ended.took_s


def _last_line(ended: Ended) -> str:
    lines = ended.errors.strip().splitlines()
    return lines[-1][-MAX_SAID:] if lines else ""
