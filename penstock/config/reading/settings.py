"""Settings on top of the file: variables ``PENSTOCK_A__B`` and arguments ``--a.b=c``."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from penstock.config import Config
from penstock.config.reading.yaml_file import NotYaml, parse_yaml
from penstock.errors import ConfigError
from penstock.text import redact

#: ``a.b.c`` as its parts; a place in a list is its number, as text.
Key = tuple[str, ...]


def put(values: dict[str, Any], key: Key, value: Any, source: str) -> None:
    """Set ``key``, in place; maps are merged.

    Args:
        source: source of the value, for the error.

    Raises:
        ConfigError: the key leads through a plain value, or to no place of a list.
    """
    at: Any = values
    for depth, part in enumerate(key[:-1]):
        if isinstance(at, list):
            at = at[_index(at, part, key, source)]
        else:
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
        if not isinstance(at, dict | list):
            raise ConfigError(f"{'.'.join(key)} ({source}): {'.'.join(key[: depth + 1])} is not a section.")
    last: Any = key[-1]
    if isinstance(at, list):
        last = _index(at, last, key, source)
    if isinstance(value, dict) and isinstance(old := at[last] if isinstance(at, list) else at.get(last), dict):
        for name, entry in value.items():
            put(old, (name,), entry, source)
    else:
        at[last] = value


def _index(values: list[Any], part: str, key: Key, source: str) -> int:
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(values):
        raise ConfigError(
            f"{'.'.join(key)} ({source}): {part!r} is not an index of a list of {len(values)}; count from 0, "
            "or set the whole list as [..., ...]."
        )
    return int(part)


def leaves(value: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the keys of all plain values, and of empty maps and lists."""
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from leaves(entry, (*key, str(name)))
    elif isinstance(value, list) and value:
        for index, entry in enumerate(value):
            yield from leaves(entry, (*key, str(index)))
    else:
        yield key


#: Variables ``PENSTOCK_A__B`` set ``a.b``; those of tests do not.
ENV_PREFIX = "PENSTOCK_"
ENV_PREFIX_TESTS = "PENSTOCK_TEST_"


def from_environment(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    """Yield (key, text, source) of each variable that sets a key."""
    for name in sorted(environ):
        if is_setting(name):
            key = tuple(part.lower() for part in name.removeprefix(ENV_PREFIX).split("__"))
            yield key, environ[name], f"the variable {name}"


def from_argument(argument: str) -> tuple[Key, str, str]:
    """Parse ``--a.b=c`` or ``a.b=c`` into (key, text, source); raise ConfigError if it is neither."""
    name, equals, text = argument.removeprefix("--").partition("=")
    key = tuple(name.split("."))
    if not equals or not all(key):
        raise ConfigError(f"The argument {redact(argument)!r} sets no key; write it as --a.b=c.")
    return key, text, f"the argument --{name}"


def value_of(key: Key, text: str, source: str) -> Any:
    """Parse ``text``: as YAML if the model leaves the type open or expects a container, else as plain text."""
    declared = annotation(key)
    if declared is str:
        return text
    try:
        value = parse_yaml(text)
    except NotYaml:
        value = text
    if isinstance(value, str) and declared is Any:
        # YAML 1.1 reads 1e-4 as text.
        try:
            return float(value)
        except ValueError:
            return value
    plain = not isinstance(value, dict | list) and value is not None
    if plain and wants_text(declared):
        return text
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{'.'.join(key)} ({source}): its keys must be names.")
    return value


def is_setting(name: str) -> bool:
    """Return whether a variable of this name sets a key."""
    return name.startswith(ENV_PREFIX) and not name.startswith(ENV_PREFIX_TESTS)


#: Most characters of a key that is compared with the known ones, which takes time by its length.
_LONGEST = 128


def annotation(key: Key) -> Any:
    """Return the type that the model declares at ``key``; Any if it declares none."""
    at: Any = Config
    for part in key:
        if get_origin(at) is not list and (section := _section(at)) is not None:
            field = section.model_fields.get(part)
            if field is None:
                return Any
            at = field.annotation
        elif get_origin(at) is dict:
            at = get_args(at)[1]
        elif get_origin(at) is list and part.isdigit():
            at = get_args(at)[0]
        else:
            return Any
    return at


def section_at(key: Key) -> type[BaseModel] | None:
    """Return the section that is, or may be, at ``key``; None if it is not a section."""
    return _section(annotation(key))


def wants_text(annotation: Any) -> bool:
    """Return whether a type accepts unparsed text."""
    return annotation in (str, Path) or any(wants_text(part) for part in get_args(annotation))


def nearest(key: Key) -> str | None:
    """Return the declared key that was probably meant, in dots; None for a key that is too long."""
    if sum(map(len, key)) > _LONGEST:
        return None
    if close := _close(key, 0.75):
        return close
    known = list(_all_keys(Config))
    # The same name in another section: preferably of the same top-level section.
    same = sorted((path for path in known if path[-1] == key[-1]), key=lambda path: path[:1] != key[:1])
    if same:
        return ".".join(same[0])
    if any(part.isdigit() for part in key[:-1]):
        return _close(key, 0.6)  # such long keys are similar because of their common beginning
    return next(iter(difflib.get_close_matches(".".join(key), map(".".join, known), n=1)), None)


def _close(key: Key, cutoff: float) -> str | None:
    """Return the key of the same section with a similar spelling."""
    section = section_at(key[:-1])
    if section is not None:
        close = difflib.get_close_matches(key[-1], section.model_fields, n=1, cutoff=cutoff)
        if close:
            return ".".join((*key[:-1], close[0]))
    return None


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a type; None if it has none."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _all_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Yield keys and sections, and those of the first entry of a list of sections."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        if (section := _section(field.annotation)) is not None:
            place = ("0",) if get_origin(field.annotation) is list else ()
            yield from _all_keys(section, (*prefix, name, *place))
