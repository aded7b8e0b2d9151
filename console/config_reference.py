"""Writes docs/configuration.md, every key of the configuration, from the models that read it.

``python -m console.config_reference FILE`` writes the page (``make reference``); a test holds it current.
"""

import ast
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic.fields import FieldInfo

from penstock.config import Config
from penstock.config.section import Section

_HEAD = """# Configuration

One YAML file holds a run. What it says is overridden by the environment (`PENSTOCK_TRAINER__LR=1e-5`), and that by
arguments (`--trainer.lr=1e-5`). Unknown keys are refused, with a guess at what was meant. `config.yaml` in the run's
folder holds what came of it.

This page is made from the models under `penstock/config/` by `make reference`.
"""
#: Names of types that stand for something else, as a reader of YAML calls them.
_TYPES = {
    "Positive": "integer > 0",
    "Seconds": "seconds > 0",
    "Port": "1 to 65535",
    "Path": "path",
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "FilterName": "name",
    "RewardName": "name",
    "EnvironmentName": "name",
}


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    type: str
    default: str
    says: str


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    shown: dict[type[Section], str] = {}
    for path, section in _sections("", Config):
        parts.append(f"\n## {path or 'The run'}\n")
        if section in shown:
            parts.append(f"\nAs `{shown[section]}`.\n")
            continue
        shown[section] = path
        if path and (says := _says(section)):
            parts.append(f"\n{says}\n")
        if keys := list(_keys(section)):
            parts.append("\n| key | is | default | what it does |\n|---|---|---|---|\n")
            parts += [f"| `{key.name}` | {key.type} | {key.default} | {key.says} |\n" for key in keys]
    return "".join(parts)


def _sections(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Sections with their paths in the file, depth first; a list's or a map's are marked by ``[]``."""
    yield path, section
    for name, field in section.model_fields.items():
        for inner, mark in _inner(field.annotation):
            yield from _sections(f"{path}.{name}".lstrip(".") + mark, inner)


def _inner(annotation: object) -> Iterator[tuple[type[Section], str]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ""
        return
    is_many = typing.get_origin(annotation) in (list, dict)
    for argument in typing.get_args(annotation):
        for inner, mark in _inner(argument):
            yield inner, "[]" if is_many else mark


def _keys(section: type[Section]) -> Iterator[Key]:
    """Keys that are no sections, those of the classes that it is made of first."""
    for cls in reversed(section.__mro__):
        if not (issubclass(cls, Section) and cls is not Section):
            continue
        source = textwrap.dedent(inspect.getsource(cls))
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            name = node.target.id
            if name not in section.model_fields or any(_inner(section.model_fields[name].annotation)):
                continue
            type_ = _type(node.annotation, vars(sys.modules[cls.__module__]))
            yield Key(name, type_, _default(section.model_fields[name]), _comment(lines, node.lineno - 1))


def _says(section: type[Section]) -> str:
    # inspect.getdoc would give those of the class it is made of.
    return _escaped(section.__doc__ or "")


def _comment(lines: list[str], at: int) -> str:
    """The ``#:`` lines above a field."""
    begin = at
    while lines[begin - 1].strip().startswith("#:"):
        begin -= 1
    return _escaped(" ".join(line.strip().removeprefix("#:").strip() for line in lines[begin:at]))


def _type(node: ast.expr, names: dict[str, object]) -> str:
    """In the words of somebody who writes YAML.

    Args:
        names: what the module of the model knows.
    """
    if isinstance(node, ast.BinOp):
        options = [_type(side, names) for side in (node.left, node.right)]
        return " or ".join(option for option in options if option != "null")
    if isinstance(node, ast.Subscript):
        outer, inner = ast.unparse(node.value), node.slice
        if outer == "Annotated":
            assert isinstance(inner, ast.Tuple)
            return _type(inner.elts[0], names) + _limits(inner.elts[1:], names)
        if outer == "Literal":
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return ", ".join(f"`{ast.literal_eval(value)}`" for value in values)
        if outer == "list":
            return f"list of {_type(inner, names)}"
        if outer == "dict":
            return "map"
    if isinstance(node, ast.Constant) and node.value is None:
        return "null"
    text = ast.unparse(node)
    return _TYPES.get(text, text)


def _limits(extras: list[ast.expr], names: dict[str, object]) -> str:
    """``Field(ge=0, le=1)`` as `` >= 0, <= 1``."""
    found: dict[str | None, ast.expr] = {}
    for extra in extras:
        if isinstance(extra, ast.Call) and ast.unparse(extra.func) == "Field":
            found |= {one.arg: one.value for one in extra.keywords}
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [f"{sign} {_number(found[name], names)}" for name, sign in signs.items() if name in found]
    return f" {', '.join(limits)}" if limits else ""


def _number(node: ast.expr, names: dict[str, object]) -> str:
    """The value of ``2 ** 63``, or of a name."""
    return str(eval(compile(ast.Expression(node), "field", "eval"), dict(names)))


def _default(field: FieldInfo) -> str:
    """As YAML writes it."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{orjson.dumps(value).decode() if isinstance(value, bool | dict | list | None) else value}`"


def _escaped(text: str) -> str:
    """As one cell of a table, in the words of YAML."""
    text = re.sub(r"``([^`]+)``", r"`\1`", re.sub(r"\s+", " ", text))
    return re.sub(r"\bNone\b", "null", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
