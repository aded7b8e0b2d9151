"""Settings on top of the file: variables ``PENSTOCK_A__B`` and arguments ``--a.b=c``."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.config.reading.declared import annotation, wants_text
from penstock.config.reading.nested import Key
from penstock.config.reading.yaml_file import NotYaml, parse_yaml
from penstock.errors import ConfigError
from penstock.redaction import redact

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
