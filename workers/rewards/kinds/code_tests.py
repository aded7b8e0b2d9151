"""Tests of a program: read them from a label, and compare a program's output with the expected one.

Forms of labels, each as a map or list, or as its JSON:

    {"inputs": [...], "outputs": [...]}                          APPS, TACO, LiveCodeBench, verl's prime_code
    {"inputs": [...], "outputs": [...], "fn_name": "add"}        the same for a function
    [{"input": ..., "output": ..., "fn_name": "add"}, ...]       one map a test, ``fn_name`` where it is a function
    ["assert add(1, 2) == 3", ...], {"test_list": [...]}         MBPP, also with test_imports and test_setup_code
    {"test": "def check(candidate): ...", "entry_point": "add"}  HumanEval

``prefix`` and ``suffix`` beside them, or in a ``{"tests": [...]}`` map, are put around the answer's program.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import takewhile
from typing import Any

from penstock.workers.rewards.kinds.kind import Case

# Assertions as tests of a program: those of MBPP, and of HumanEval's ``check(candidate)``.
#
#     assert add(1, 2) == 3      the left side is evaluated in the program, and its value compared outside
#     assert is_even(2)          any other assertion is evaluated as a whole: is it true?
#
# Imports and functions of the test itself are placed between the program and the question, as in a module. The second
# kind trusts the comparison methods of the program's own values.

#: Name of the function that a test adds to the answer's program.
ASKED = "asked_by_the_test"
#: Module-level statements that may precede the assertions.
_OF_A_MODULE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def has_asserts(found: Any) -> bool:
    """Return whether a label, parsed from JSON, has this form."""
    if isinstance(found, Mapping):
        return "test_list" in found or {"test", "entry_point"} <= found.keys()
    return isinstance(found, list) and bool(found) and all(isinstance(one, str) for one in found)


def assert_cases(found: Any) -> list[Case]:
    """Return the tests of such a label. Raises ValueError if they are not Python, or name no function."""
    if isinstance(found, Mapping) and "test_list" not in found:
        return _of_check(_source_text(found["test"], "test"), _source_text(found["entry_point"], "entry_point"))
    texts = found["test_list"] if isinstance(found, Mapping) else found
    if not isinstance(texts, list):
        raise ValueError('"test_list" of the label is no list of assertions')
    return [case for text in texts for case in _of_lines(_source_text(text, "test_list"))]


def setup_of(found: Mapping[str, Any]) -> str:
    """Return the code between the answer's program and each test: MBPP's imports and set-up."""
    imports = found.get("test_imports") or []
    if not isinstance(imports, list):
        raise ValueError('"test_imports" of the label is no list')
    lines = [_source_text(one, "test_imports") for one in imports]
    lines.append(_source_text(found.get("test_setup_code") or "", "test_setup_code"))
    return "\n".join(line for line in lines if line)


def _of_lines(text: str) -> Iterator[Case]:
    body = [one for one in _parsed(text).body if not _is_filler(one)]
    if not body:
        raise ValueError(f"the test {text[:80]!r} asks nothing of a program")
    module = list(takewhile(lambda one: isinstance(one, _OF_A_MODULE), body))
    body = body[len(module) :]
    if body and all(isinstance(one, ast.Assert) for one in body):
        yield from (_of_assert(one.test, module) for one in body if isinstance(one, ast.Assert))
    else:
        yield _whole(body, module)


def _of_check(text: str, function: str) -> list[Case]:
    """Return the assertions of ``check`` as separate tests if it has nothing else; else one test of all of it."""
    if not function.isidentifier():
        raise ValueError('"entry_point" of the label is no name of a function')
    tree = _parsed(text).body
    checks = [one for one in tree if isinstance(one, ast.FunctionDef) and one.name == "check" and one.args.args]
    if not checks:
        raise ValueError('"test" of the label has no function check(candidate)')
    body = [one for one in checks[-1].body if not _says_nothing(one)]
    if not body:
        raise ValueError("check(candidate) of the label asks nothing of a program")
    rest = [one for one in tree if one is not checks[-1]]
    if all(isinstance(one, ast.Assert) for one in body) and not any(map(_calls_check, rest)):
        named = ast.parse(f"{checks[-1].args.args[0].arg} = {function}").body
        return [_of_assert(one.test, rest, named) for one in body if isinstance(one, ast.Assert)]
    return [_whole(ast.parse(f"check({function})").body, tree)]


def _says_nothing(one: ast.stmt) -> bool:
    """Return whether a statement is a docstring, ``pass``, or HumanEval's ``assert True``."""
    if _is_filler(one):
        return True
    return isinstance(one, ast.Pass) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))


def _calls_check(one: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "check" for node in ast.walk(one))


def _is_filler(one: ast.stmt) -> bool:
    """Return whether a statement is ``assert True``, as in 36 of HumanEval's 164 tasks, with any message."""
    return isinstance(one, ast.Assert) and isinstance(one.test, ast.Constant) and bool(one.test.value)


def _of_assert(test: ast.expr, module: Sequence[ast.stmt], before: Sequence[ast.stmt] = ()) -> Case:
    if isinstance(test, ast.Constant):
        raise ValueError(f"the test assert {ast.unparse(test)} asks nothing of a program")
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for expected in _values(test.comparators[0]):
            return Case(function=ASKED, asking=_asking(module, before, test.left), expected=expected)
    truth = ast.Call(ast.Name("bool", ast.Load()), [test], [])
    return Case(function=ASKED, asking=_asking(module, before, truth), expected=(True,))


def _whole(body: Sequence[ast.stmt], module: Sequence[ast.stmt]) -> Case:
    """Return one test of statements that must run without an error."""
    return Case(function=ASKED, asking=_asking(module, body, ast.Constant(True)), expected=(True,))


def _asking(module: Sequence[ast.stmt], before: Sequence[ast.stmt], value: ast.expr) -> str:
    """Return source of ``module`` and of a function without arguments that runs ``before`` and returns ``value``."""
    above = "".join(f"{ast.unparse(one)}\n" for one in module if not _is_of_the_future(one))
    lines = "\n".join(ast.unparse(one) for one in (*before, ast.Return(value)))
    return f"{above}def {ASKED}():\n" + "\n".join(f"    {line}" for line in lines.split("\n")) + "\n"


def _is_of_the_future(one: ast.stmt) -> bool:
    """Return whether a statement is ``from __future__ import ...``, which is allowed only at the head of a file."""
    return isinstance(one, ast.ImportFrom) and one.module == "__future__"


def _values(right: ast.expr) -> Iterator[tuple[Any, ...]]:
    """Yield the accepted values, if JSON has them; Python's True equals 1, and its False 0."""
    try:
        value = json.loads(json.dumps(ast.literal_eval(right), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    yield (value, int(value)) if isinstance(value, bool) else (value, bool(value)) if value in (0, 1) else (value,)


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as exc:
        raise ValueError(f"the test {text[:80]!r} is no Python: {exc}") from None


def _source_text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{key}" of the label is no text')
    return value


#: Most tests of a label.
MAX_TESTS = 1000
_FORMS = 'a map with "inputs" and "outputs", a list of maps with "input" and "output", or assertions'


@dataclass(frozen=True, slots=True)
class Cases:
    tests: tuple[Case, ...]
    prefix: str = ""
    suffix: str = ""

    def program(self, code: str, test: Case | None = None) -> str:
        """Return the answer's code with prefix and suffix, and the code that a test adds."""
        asking = f"\n\n{test.asking}" if test is not None and test.asking else ""
        return f"{self.prefix}{code}{self.suffix}{asking}"


def read_tests(label: str) -> Cases:
    """Return the tests of a label. Raises ValueError if it has none, or another form."""
    try:
        found = json.loads(label)
        # JSON inside JSON, as in tables of text.
        found = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        raise ValueError(f"the label {label[:80]!r} is no JSON of tests: {_FORMS}") from None
    about = found if isinstance(found, dict) else {}
    function = _name(about)
    if isinstance(found, dict) and "tests" in found:
        found = found["tests"]
    if has_asserts(found):
        return _of_asserts(found, about)
    if isinstance(found, dict):
        pairs = [(one, other, function) for one, other in _pairs(found)]
    elif isinstance(found, list) and all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in found):
        pairs = [(one["input"], one["output"], _name(one) or function) for one in found]
    else:
        raise ValueError(f"the label {label[:80]!r} is not {_FORMS}")
    if not 0 < len(pairs) <= MAX_TESTS:
        raise ValueError(f"the label has {len(pairs)} tests; 1 to {MAX_TESTS} are run")
    tests = tuple(_call(*pair) if pair[2] else _run(*pair[:2]) for pair in pairs)
    return Cases(tests, _text(about, "prefix"), _text(about, "suffix"))


def _of_asserts(found: Any, about: dict[str, Any]) -> Cases:
    tests = assert_cases(found)
    if not 0 < len(tests) <= MAX_TESTS:
        raise ValueError(f"the label has {len(tests)} tests; 1 to {MAX_TESTS} are run")
    setup = setup_of(found) if isinstance(found, dict) else ""
    suffix = _text(about, "suffix") + (f"\n\n{setup}\n" if setup else "")
    return Cases(tuple(tests), _text(about, "prefix"), suffix)


def _pairs(found: dict[str, Any]) -> list[tuple[Any, Any]]:
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError('"inputs" and "outputs" of the label are not two lists of the same length')
    return list(zip(inputs, outputs, strict=True))


def _name(found: dict[str, Any]) -> str:
    for key in ("fn_name", "func_name"):
        if found.get(key) is not None:
            return _text(found, key)
    return ""


def _text(found: dict[str, Any], key: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f'"{key}" of the label is no text')
    return value


def _run(stdin: Any, stdout: Any) -> Case:
    """Create a test of a program on stdin and stdout; lists of lines are text too."""
    texts = ["\n".join(map(str, one)) if isinstance(one, list) else one for one in (stdin, stdout)]
    if not all(isinstance(one, str) for one in texts):
        raise ValueError("a test's input and output are no texts, and no function is named (fn_name)")
    return Case(stdin=texts[0], expected=(texts[1],))


def _call(given: Any, wanted: Any, function: str) -> Case:
    """Create a test of a function: of text each line is a JSON argument, a list has the arguments; a list of one
    expected result stands for its item too."""
    try:
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
            expected = [json.loads(wanted) if isinstance(wanted, str) else wanted]
        elif isinstance(given, list):
            arguments = given
            expected = [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]
        else:
            raise ValueError
    except (ValueError, RecursionError):
        raise ValueError(f"a test of {function} has arguments or a result that are no JSON") from None
    return Case(function=function, arguments=tuple(arguments), expected=tuple(expected))


def is_right(test: Case, output: bytes, tolerance: float) -> bool:
    """Return whether a program's output is an expected one."""
    text = output.decode(errors="replace")
    if not test.function:
        return any(_same_text(text, wanted, tolerance) for wanted in test.expected)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    try:
        return any(_same_value(value, wanted, tolerance) for wanted in test.expected)
    except RecursionError:
        return False


def _same_text(said: str, wanted: str, tolerance: float) -> bool:
    """Compare line by line without surrounding white space and final empty lines; else word by word as numbers."""
    lines, others = _lines(said), _lines(wanted)
    if lines == others:
        return True
    return len(lines) == len(others) and all(
        _same_words(line.split(), other.split(), tolerance) for line, other in zip(lines, others, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.rstrip().split("\n")]


def _same_words(words: list[str], others: list[str], tolerance: float) -> bool:
    return len(words) == len(others) and all(
        word == other or _same_number(word, other, tolerance) for word, other in zip(words, others, strict=True)
    )


def _same_number(word: str, other: str, tolerance: float) -> bool:
    """Compare two numbers given as text; 1.0 equals 1."""
    try:
        said, wanted = Decimal(word), Decimal(other)
    except InvalidOperation:
        return False
    if not said.is_finite() or not wanted.is_finite():
        return False
    return said == wanted or (tolerance > 0 and _near(float(said), float(wanted), tolerance))


def _near(said: float, wanted: float, tolerance: float) -> bool:
    return abs(said - wanted) <= tolerance * max(1.0, abs(wanted))


def _same_value(said: Any, wanted: Any, tolerance: float) -> bool:
    """Compare JSON values; a bool is not a number."""
    if isinstance(said, bool) or isinstance(wanted, bool):
        return said is wanted
    if isinstance(said, list) and isinstance(wanted, list):
        return len(said) == len(wanted) and all(
            _same_value(one, other, tolerance) for one, other in zip(said, wanted, strict=True)
        )
    if isinstance(said, dict) and isinstance(wanted, dict):
        return said.keys() == wanted.keys() and all(_same_value(said[key], wanted[key], tolerance) for key in said)
    if isinstance(said, int | float) and isinstance(wanted, int | float):
        return said == wanted or (tolerance > 0 and _near_values(said, wanted, tolerance))
    return bool(said == wanted)


def _near_values(said: float, wanted: float, tolerance: float) -> bool:
    try:
        return _near(float(said), float(wanted), tolerance)
    except OverflowError:
        return False
