"""The YAML file of a configuration."""

from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigError


# A mapping with a key twice keeps the last one in YAML, silently.
class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key} is given twice", problem_mark=key_node.start_mark)
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Its values, unchecked. Raises ConfigError where it is not a map of keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration {path}; name a YAML file that exists.") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The configuration {path} cannot be read: {exc}.") from exc
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as exc:
        problem = getattr(exc, "problem", None) or "it is not YAML"
        mark = getattr(exc, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"The configuration {path}{line}, cannot be read: {problem}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"The configuration {path} is not a map of keys; begin with `run: NAME`.")
    return values
