"""Assertions as tests of a program: those of MBPP, and of HumanEval's ``check(candidate)``.

    assert add(1, 2) == 3      the left side is evaluated in the program, and its value compared outside
    assert is_even(2)          any other assertion is evaluated as a whole: is it true?

Imports and functions of the test itself are placed between the program and the question, as in a module. The second
kind trusts the comparison methods of the program's own values.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from penstock.workers.rewards.kinds.case import Case

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
        return _of_check(_text(found["test"], "test"), _text(found["entry_point"], "entry_point"))
    texts = found["test_list"] if isinstance(found, Mapping) else found
    if not isinstance(texts, list):
        raise ValueError('"test_list" of the label is no list of assertions')
    return [case for text in texts for case in _of_lines(_text(text, "test_list"))]


def setup_of(found: Mapping[str, Any]) -> str:
    """Return the code between the answer's program and each test: MBPP's imports and set-up."""
    imports = found.get("test_imports") or []
    if not isinstance(imports, list):
        raise ValueError('"test_imports" of the label is no list')
    lines = [_text(one, "test_imports") for one in imports]
    lines.append(_text(found.get("test_setup_code") or "", "test_setup_code"))
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


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{key}" of the label is no text')
    return value
