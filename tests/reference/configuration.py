"""Write docs/configuration.md, with every configuration key, from the models that read them.

``python -m tests.reference.configuration FILE`` writes the page (``make reference``); a test keeps it current.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic.fields import FieldInfo

from penstock.config import Config
from penstock.config.section import Section
from tests.reference import write

_HEAD = """# Configuration

One YAML file defines a run. Environment variables (`PENSTOCK_TRAINER__LR=1e-5`) override the file, and arguments
(`--trainer.lr=1e-5`) override both. Unknown keys are refused, with a suggestion. `config.yaml` in the run's folder
contains the resulting configuration.

`make reference` generates this page from the models in `penstock/config/`.
"""
#: Types of JSON Schema, and its limits, in words.
_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "map"}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    type: str
    default: str
    says: str


def page() -> str:
    """Return the complete page."""
    parts = [_HEAD]
    shown: dict[type[Section], str] = {}
    for path, section, why in _sections("", Config):
        parts.append(f"\n## {path or 'The run'}\n")
        if why:
            parts.append(f"\n{why}\n")
        if section in shown:
            parts.append(f"\nThe keys are those of `{shown[section]}`.\n")
            continue
        shown[section] = path
        if path and (says := _says(section)):
            parts.append(f"\n{says}\n")
        if keys := list(_keys(section)):
            parts.append("\n| key | type | default | description |\n|---|---|---|---|\n")
            parts += [f"| `{key.name}` | {key.type} | {key.default} | {key.says} |\n" for key in keys]
    return "".join(parts)


def _sections(path: str, section: type[Section], why: str = "") -> Iterator[tuple[str, type[Section], str]]:
    """Yield sections with their paths in the file, depth first, and the text of the key that holds them.

    Sections in a list or a map are marked by ``[]``.
    """
    yield path, section, why
    said = _comments(section)
    for name, field in section.model_fields.items():
        is_optional = not field.is_required() and field.default is None
        why = f"{said[name]}{' `null` by default.' if is_optional else ''}".strip()
        for inner, mark in _inner(field.annotation):
            yield from _sections(f"{path}.{name}".lstrip(".") + mark, inner, why)


def _inner(annotation: object) -> Iterator[tuple[type[Section], str]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ""
        return
    is_many = typing.get_origin(annotation) in (list, dict)
    for argument in typing.get_args(annotation):
        for inner, mark in _inner(argument):
            yield inner, "[]" if is_many else mark


def _keys(section: type[Section]) -> Iterator[Key]:
    """Yield keys that are not sections, those of base classes first."""
    schema = section.model_json_schema()
    shared, said = schema.get("$defs", {}), _comments(section)
    for name, field in section.model_fields.items():
        if not any(_inner(field.annotation)):
            yield Key(name, _type(schema["properties"][name], shared), _default(field), said[name])


def _comments(section: type[Section]) -> dict[str, str]:
    """Return the ``#:`` lines above each field."""
    found = {}
    for cls in reversed(section.__mro__):
        if not issubclass(cls, Section):
            continue
        lines = inspect.getsource(cls).splitlines()
        for at, line in enumerate(lines):
            if field := re.match(r"    (\w+): ", line):
                found[field[1]] = _comment(lines, at)
    return found


def _says(section: type[Section]) -> str:
    # inspect.getdoc would give those of the class it is made of.
    return _escaped(section.__doc__ or "")


def _comment(lines: list[str], at: int) -> str:
    """Return the ``#:`` lines above one field."""
    begin = at
    while lines[begin - 1].strip().startswith("#:"):
        begin -= 1
    return _escaped(" ".join(line.strip().removeprefix("#:").strip() for line in lines[begin:at]))


def _type(schema: dict[str, Any], shared: dict[str, Any]) -> str:
    """Describe a property of a JSON schema in YAML's terms; ``shared``: targets of ``$ref``."""
    if "$ref" in schema:
        return _type(shared[schema["$ref"].rpartition("/")[2]], shared)
    if "anyOf" in schema:
        return " or ".join(_type(option, shared) for option in schema["anyOf"] if option.get("type") != "null")
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{value}`" for value in values)
    if schema["type"] == "array":
        items = [schema["items"]] if "items" in schema else schema["prefixItems"]
        return f"list of {', '.join(dict.fromkeys(_type(item, shared) for item in items))}"
    limits = ", ".join(f"{sign} {schema[name]}" for name, sign in _LIMITS.items() if name in schema)
    return f"{_TYPES[schema['type']]} {limits}".rstrip()


def _default(field: FieldInfo) -> str:
    """Return the default as YAML writes it."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, float):
        return f"`{value:g}`"
    if value == "":
        return '`""`'
    return f"`{orjson.dumps(value).decode() if isinstance(value, bool | dict | list | tuple | None) else value}`"


def _escaped(text: str) -> str:
    """Escape text as a table cell, with YAML's names of constants."""
    text = re.sub(r"``([^`]+)``", r"`\1`", re.sub(r"\s+", " ", text))
    return re.sub(r"\bNone\b", "null", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    write(page, "tests.reference.configuration")
