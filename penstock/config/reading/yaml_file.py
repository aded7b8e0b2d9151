"""YAML of a configuration: the file, and values on top of it; bounded, and every error a sentence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError

#: Most characters of a configuration, most values, with those of aliases counted each time, and most levels of
#: nesting.
MAX_CHARACTERS, MAX_VALUES, MAX_DEPTH = 1024 * 1024, 20_000, 32
#: Exceptions of PyYAML besides its own if a value does not fit its tag, or is nested too deeply.
_RAISED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


_MERGE = "tag:yaml.org,2002:merge"


class NotYaml(Exception):
    """A text is not YAML, or exceeds the limits of a configuration; the text says why.

    Args:
        line: counted from 1; 0: not known.
    """

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(problem)
        self.line = line


class _Loader(yaml.SafeLoader):
    # A mapping with a key twice keeps the last one in YAML, silently.
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # merged keys may be given again
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key} is given twice", problem_mark=key_node.start_mark)
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)

    # Maps that are merged into maps may double with each line.
    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise yaml.MarkedYAMLError(problem="it merges too many values", problem_mark=node.start_mark)


def parse_yaml(text: str) -> Any:
    """Parse a text. Raises NotYaml."""
    if len(text) > MAX_CHARACTERS:
        raise NotYaml(f"it has more than {MAX_CHARACTERS:,} characters")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        problem = getattr(exc, "problem", None) or "it is not YAML"
        raise NotYaml(problem, mark.line + 1 if mark is not None else 0) from exc
    except _RAISED as exc:
        raise NotYaml(f"it holds a value that cannot be read ({exc!s:.200})") from exc
    if sum(1 for _ in zip(_walk(value, 0), range(MAX_VALUES + 1), strict=False)) > MAX_VALUES:
        raise NotYaml(f"it has more than {MAX_VALUES:,} values")
    return value


def _walk(value: Any, depth: int) -> Iterator[None]:
    """Yield once for each value; those of an alias each time."""
    if depth > MAX_DEPTH:
        raise NotYaml(f"it is nested deeper than {MAX_DEPTH} levels")
    yield None
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _walk(one, depth + 1)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return its values, unchecked. Raises ConfigError if it is not a map of keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration {path}; name a YAML file that exists.") from None
    except IsADirectoryError:
        raise ConfigError(f"The configuration {path} is a folder; name the YAML file in it.") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration {path} cannot be read: {exc}.") from exc
    try:
        values = parse_yaml(text)
    except NotYaml as exc:
        line = f", line {exc.line}" if exc.line else ""
        raise ConfigError(f"The configuration {path}{line}, cannot be read: {exc}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"The configuration {path} is not a map of keys; begin with `run: NAME`.")
    return values
