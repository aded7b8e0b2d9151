"""Reward ``code`` without a jail: the program in an answer, tests in a label, what is right, what it is worth."""

import json
from typing import Any

import pytest

from penstock.config import RewardConfig
from penstock.workers.rewards.jail.task import End, Ended, Task
from penstock.workers.rewards.kinds.code import Workshop, code_block
from penstock.workers.rewards.kinds.code_tests import MAX_TESTS, is_right, read_tests
from penstock.workers.rewards.kinds.kind import Case, Question
from penstock.workers.rewards.kinds.registry import kind_of

FENCE = "```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        (f"so:\n{FENCE}python\nprint(1)\n{FENCE}\nright", "print(1)\n"),
        (f"{FENCE}\nprint(1)\n{FENCE}", "print(1)\n"),
        (f"{FENCE}python\nprint(1)\n{FENCE}\nno:\n{FENCE}py\nprint(2)\n{FENCE}", "print(2)\n"),
        (f"{FENCE}python\nprint(1)\n{FENCE}\nit prints\n{FENCE}text\n1\n{FENCE}", "print(1)\n"),
        (f"{FENCE}python\nprint(1)\npri", "print(1)\npri"),
        (f"  {FENCE}python title\n  print(1)\n  {FENCE}", "  print(1)\n"),
        (f"<think>{FENCE}python\nprint(1)\n{FENCE}</think>{FENCE}python\nprint(2)\n{FENCE}", "print(2)\n"),
        (f"{FENCE}cpp\nint main() {{}}\n{FENCE}", f"{FENCE}cpp\nint main() {{}}\n{FENCE}"),
        ("", ""),
    ],
)
def test_the_program_in_an_answer(text: str, program: str) -> None:
    assert code_block(text) == program


def test_labels_of_the_forms_that_datasets_have() -> None:
    by_stdin = Case(stdin="1 2\n", expected=("3\n",))
    for label in (
        {"inputs": ["1 2\n"], "outputs": ["3\n"]},
        [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}],
        {"tests": [{"input": "1 2\n", "output": "3\n"}]},
    ):
        assert read_tests(json.dumps(label)).tests == (by_stdin,)
        assert read_tests(json.dumps(json.dumps(label))).tests == (by_stdin,), "JSON inside of JSON"
    lines = read_tests(json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]}))
    assert lines.tests == (Case(stdin="1\n2", expected=("3",)),)
    called = Case(function="add", arguments=([1], 2), expected=([3],))
    text = {"inputs": ["[1]\n2"], "outputs": ["[3]"], "fn_name": "add"}
    assert read_tests(json.dumps(text)).tests == (called,)
    one = [{"input": "[1]\n2", "output": "[3]", "func_name": "add"}]
    assert read_tests(json.dumps(one)).tests == (called,)
    values = {"inputs": [[[1], 2]], "outputs": [[3]], "fn_name": "add"}
    assert read_tests(json.dumps(values)).tests == (Case(function="add", arguments=([1], 2), expected=([3], 3)),)


def test_what_stands_around_an_answers_program() -> None:
    label = {"inputs": [[1]], "outputs": [2], "fn_name": "f", "prefix": "f = lambda x: ", "suffix": "\n"}
    assert read_tests(json.dumps(label)).program("x + 1") == "f = lambda x: x + 1\n"


def asked(label: Any, answer: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """What each test asks of an answer's program, run here, and what is right."""
    found = read_tests(json.dumps(label))
    given = []
    for test in found.tests:
        there: dict[str, Any] = {}
        exec(found.program(answer, test), there)
        given.append((there[test.function](), test.expected))
    return given


ADD = "def add(a, b):\n    return a + b"


def test_assertions_of_mbpp_ask_the_program_and_keep_what_is_right_outside() -> None:
    lines = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'\nassert add([1], [2]) == [1, 2]"]
    for label in (lines, {"test_list": lines, "text": "Add."}, {"tests": lines}):
        assert asked(label, ADD) == [(3, (3,)), ("ab", ("ab",)), ([1, 2], ([1, 2],))]
    found = read_tests(json.dumps(lines))
    assert not any("== 3" in one.asking or "'ab'" in one.asking for one in found.tests)
    setup = {"test_list": ["assert add(half, 1) == 1.5"], "test_setup_code": "half = sqrt(0.25)",
             "test_imports": ["from math import sqrt"]}  # fmt: skip
    assert asked(setup, ADD) == [(1.5, (1.5,))]


@pytest.mark.parametrize(
    "line",
    ["assert add(1, 1)", "assert not add(1, -1)", "assert add(1, 2) in (3, 4)", "assert set(add([1], [2])) == {1, 2}",
     "assert 3 == add(1, 2)", "assert 2 < add(1, 2) < 4", "assert abs(add(0.1, 0.2) - 0.3) < 1e-9, 'near'",
     "total = add(1, 2)\nassert total == 3"],
)  # fmt: skip
def test_what_is_asserted_otherwise_is_asked_as_a_whole(line: str) -> None:
    assert asked([line], ADD) == [(True, (True,))]


@pytest.mark.parametrize(("wanted", "gave"), [("True", b"1"), ("1", b"true"), ("0", b"false"), ("(1, 2)", b"[1, 2]")])
def test_python_calls_these_the_same(wanted: str, gave: bytes) -> None:
    [test] = read_tests(json.dumps([f"assert add(1, 2) == {wanted}"])).tests
    assert is_right(test, gave, 0)


def test_checks_of_humaneval_are_asked_one_by_one_where_they_are_assertions_alone() -> None:
    check = (
        "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
        "    assert candidate(1, 2) == 3, 'sum'\n    assert candidate(1, -1) == 0\n"
    )
    assert asked({"test": check, "entry_point": "add"}, ADD) == [(3, (3,)), (0, (0, False))]
    filled = check + "    # Check some edge cases\n    assert True, 'This prints if this assert fails'\n"
    assert asked({"test": filled, "entry_point": "add"}, ADD) == [(3, (3,)), (0, (0, False))]
    loop = "def check(candidate):\n    for n in range(9):\n        assert candidate(n, n) == 2 * n\n"
    assert asked({"test": loop, "entry_point": "add", "prompt": "def add(a, b):\n"}, ADD) == [(True, (True,))]
    with pytest.raises(AssertionError):
        asked({"test": loop, "entry_point": "add"}, "def add(a, b):\n    return a")


@pytest.mark.parametrize(
    ("around", "assertion", "gives"),
    [
        ("import math", "assert candidate(math.pi, 0) > 3", (True, (True,))),
        ("from math import *", "assert candidate(floor(1.5), 2) == 3", (3, (3,))),
        ("def one():\n    return 1", "assert candidate(one(), 2) == 3", (3, (3,))),
        ("METADATA = {'two': 2}", "assert candidate(1, METADATA['two']) == 3", (3, (3,))),
        (
            "ONE = 0\ndef one():\n    global ONE\n    ONE = 1\n    return ONE",
            "assert candidate(one(), 2) == 3",
            (3, (3,)),
        ),
        ("from __future__ import annotations\nimport math", "assert candidate(1, 2) == 3", (3, (3,))),
        ("import math", "for n in range(3):\n        assert candidate(math.floor(n), n) == 2 * n", (True, (True,))),
        ("from math import *", "for n in range(3):\n        assert candidate(floor(n), n) == 2 * n", (True, (True,))),
    ],
)
def test_what_a_test_brings_along_stands_in_the_module(around: str, assertion: str, gives: Any) -> None:
    for text in (
        f"{around}\n\ndef check(candidate):\n    {assertion}\n",
        f"{around}\n\ndef check(added):\n    {assertion.replace('candidate', 'added')}\n",
    ):
        assert asked({"test": text, "entry_point": "add"}, ADD) == [gives]
    called = f"{around}\n\ndef check(candidate):\n    {assertion}\n\ncheck(add)\n"
    assert asked({"test": called, "entry_point": "add"}, ADD) == [(True, (True,))]
    with pytest.raises(AssertionError):
        asked({"test": called, "entry_point": "add"}, "def add(a, b):\n    return -7")


def test_a_line_of_assertions_may_bring_imports_and_functions_along() -> None:
    line = "from math import *\ndef one():\n    return floor(1.5)\nassert add(one(), 2) == 3\nassert add(floor(2.5), 2)"
    assert asked([line], ADD) == [(3, (3,)), (True, (True,))]


@pytest.mark.parametrize(
    "label",
    [
        ["assert add(1, 2) =="], {"test": "def check(candidate): assert True", "entry_point": "add"},
        ["assert True"], [""], {"test_list": "assert add(1, 2) == 3"}, {"test_list": [1]},
        {"test_list": []}, {"test": "def check(candidate): pass", "entry_point": "a b"},
        {"test": "assert add(1, 2) == 3", "entry_point": "add"}, {"test_list": ["assert f()"], "test_imports": "re"},
        {"test_list": ["assert f()"], "test_setup_code": 3}, ["assert f() == " + "-" * 100_000 + "1"],
    ],
    ids=lambda label: str(label)[:30],
)  # fmt: skip
def test_T11_a_label_without_assertions_is_no_answers_fault(label: Any) -> None:
    with pytest.raises(ValueError, match=r"label|test"):
        read_tests(json.dumps(label))


@pytest.mark.parametrize(
    "label",
    [
        "", "7", "3 4", "null", "[]", "{}", "[1]", "[[]]", '{"inputs": ["1"]}', '{"inputs": ["1"], "outputs": []}',
        '{"inputs": "1", "outputs": "2"}', '{"inputs": [1], "outputs": ["2"]}', '[{"input": {}, "output": "1"}]',
        '{"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}', '{"inputs": [1], "outputs": [2], "fn_name": "f"}',
        '{"inputs": ["1"], "outputs": ["1"], "fn_name": 3}', '{"inputs": ["1"], "outputs": ["1"], "prefix": 3}',
        "[" * 100_000, json.dumps({"inputs": ["1"] * (MAX_TESTS + 1), "outputs": ["1"] * (MAX_TESTS + 1)}), "\ud800",
    ],
    ids=lambda label: label[:20].encode(errors="replace").decode(),
)  # fmt: skip
def test_T11_a_label_without_tests_is_no_answers_fault(label: str) -> None:
    with pytest.raises(ValueError, match=r"label|input|test"):
        read_tests(label)


@pytest.mark.parametrize(
    ("output", "wanted", "tolerance", "right"),
    [
        ("3\n", "3", 0, True),
        ("3 \n\n", "3\n", 0, True),
        ("1\r\n2\r\n", "1\n2", 0, True),
        ("3", "4", 0, False),
        ("", "3", 0, False),
        ("", "", 0, True),
        ("1\n2", "1 2", 0, False),
        ("1  2", "1 2", 0, True),
        ("1.0", "1", 0, True),
        ("yes", "YES", 0, False),
        ("0.3333333", "0.33333333", 0, False),
        ("0.3333333", "0.33333333", 1e-6, True),
        ("1e400", "2e400", 1e-6, False),
        ("nan", "NaN", 1e-6, False),
        ("9" * 5000, "9" * 5000, 0, True),
        ("1e999999999", "1e999999998", 0, False),
    ],
)
def test_output_is_held_against_what_is_wanted(output: str, wanted: str, tolerance: float, right: bool) -> None:
    assert is_right(Case(expected=(wanted,)), output.encode(), tolerance) is right


@pytest.mark.parametrize(
    ("value", "wanted", "tolerance", "right"),
    [
        ([1, 2], [1, 2], 0, True),
        ([1, 2], [2, 1], 0, False),
        (1, 1.0, 0, True),
        (1, True, 0, False),
        (True, True, 0, True),
        ({"a": [0.1]}, {"a": [0.1 + 1e-9]}, 1e-6, True),
        ({"a": [0.1]}, {"a": [0.1 + 1e-9]}, 0, False),
        (None, None, 0, True),
        ("1", 1, 0, False),
        (10**400, 1, 1e-6, False),
    ],
)
def test_what_a_function_returned_is_held_against_what_is_wanted(
    value: Any, wanted: Any, tolerance: float, right: bool
) -> None:
    test = Case(function="f", expected=(wanted,))
    assert is_right(test, json.dumps(value).encode(), tolerance) is right


@pytest.mark.parametrize("output", [b"", b"\xff", b"[" * 100_000, b"1 2", b"9" * 5000, b"NaN"])
def test_T11_what_is_no_value_is_not_right(output: bytes) -> None:
    assert not is_right(Case(function="f", expected=(1,)), output, 0)


class Played:
    """A jail whose programs end as the test says."""

    def __init__(self, *ends: Ended) -> None:
        self.ends = list(ends)
        self.tasks: list[Task] = []
        self.times: list[float | None] = []

    def run(self, task: Task, *, test_s: float | None = None) -> Ended:
        self.tasks.append(task)
        self.times.append(test_s)
        return self.ends.pop(0)


def gave(output: str, how: End = End.DONE, took_s: float = 0.1, errors: str = "") -> Ended:
    return Ended(how, 0, output.encode(), errors, took_s)


LABEL = json.dumps({"inputs": ["a", "b", "c"], "outputs": ["1", "2", "3"]})


def judged(jail: Played, text: str = "print()", name: str = "code", **settings: Any) -> dict[str, Any]:
    kind = kind_of(name)
    assert kind is not None
    workshop = Workshop(RewardConfig(code=settings).code, jail)  # type: ignore[arg-type]
    found: dict[str, Any] = kind.judge(Question(text, LABEL), workshop)
    return found


def test_all_tests_or_nothing_and_no_test_after_the_first_failure() -> None:
    assert judged(Played(gave("1"), gave("2"), gave("3"))) == {"score": 1.0, "passed": 3, "tests": 3}
    jail = Played(gave("1"), gave("3"))
    failed = {"test": 1, "why": "wrong_output"}
    assert judged(jail) == {"score": 0.0, "passed": 1, "tests": 3, "failed": failed}
    assert [task.stdin for task in jail.tasks] == ["a", "b"]
    assert not any("1" in repr(task) for task in jail.tasks), "what is wanted never goes there"


def test_the_share_of_tests_that_pass() -> None:
    found = judged(
        Played(gave("1"), gave("", End.FAILED, errors="Traceback\nValueError: x\n"), gave("3")), score="share"
    )
    failed = {"test": 1, "why": "failed", "said": "ValueError: x"}
    assert found == {"score": 2 / 3, "passed": 2, "tests": 3, "failed": failed}
    # What it printed before it was killed is worth nothing.
    assert judged(Played(*[gave("1", End.OUT_OF_TIME)] * 3), score="share")["score"] == 0.0


def test_time_runs_out_for_all_tests_together() -> None:
    jail = Played(gave("1", took_s=1.5), gave("", End.OUT_OF_TIME, took_s=1.0))
    found = judged(jail, score="share", total_s=2.5, test_s=2.0)
    assert found == {"score": 1 / 3, "passed": 1, "tests": 3, "failed": {"test": 1, "why": "out_of_time"}}
    assert jail.times == [2.5, 1.0]
    jail = Played(gave("1", took_s=2.5))
    assert judged(jail, total_s=2.5)["failed"] == {"test": 1, "why": "no_time_left"}


def test_an_answer_without_a_program_is_worth_0() -> None:
    assert judged(Played(), " \n")["failed"] == {"test": 0, "why": "no_code"}
    assert judged(Played(), "print()", "boxed_code")["failed"] == {"test": 0, "why": "no_code"}
    jail = Played(gave("1"), gave("2"), gave("3"))
    assert judged(jail, "\\boxed{print(1)}", "boxed_code")["score"] == 1.0
    assert jail.tasks[0].code == "print(1)"


def test_a_slow_answer_must_be_worth_less_before_it_is_a_timeout() -> None:
    with pytest.raises(ValueError, match=r"code\.total_s 20 is not below timeout_s 10"):
        RewardConfig(function="code", timeout_s=10)
