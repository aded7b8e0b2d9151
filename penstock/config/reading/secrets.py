"""Secrets of a configuration: passwords in URLs, values of `env` sections, tokens in arguments of engines and hooks."""

import re
from collections.abc import Iterator
from typing import Any

from penstock.config import Config
from penstock.config.reading.settings import Key, leaves, put
from penstock.text import MASK, SECRET_NAME, has_password, is_secret, know, know_url, redact

#: Names that only secrets have.
_SURELY = re.compile(r"SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
#: Values that occur in other text: shorter than 8 characters, words, numbers, addresses of hosts, and paths.
_COMMON = re.compile(
    r".{0,7}|[A-Za-z_]+|[\d.,:*\[\]]+|[A-Za-z\d.,*_:-]*\blocalhost\b[A-Za-z\d.,*_:-]*|[/.~].*", re.DOTALL
)
#: Format of keys and tokens of services.
_MADE_UP = re.compile(r"[\w.~+/=-]{16,}", re.ASCII)


def secrets_of(values: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield keys and values that must not be shown."""
    urls: list[tuple[Key, Any]] = [
        (("redis", "url"), values["redis"]["url"]),
        (("engine", "url"), values["engine"]["url"]),
        (("reward", "remote", "url"), values["reward"]["remote"]["url"]),
        (("reward", "jail", "url"), values["reward"]["jail"]["url"]),
        (("trainer", "delta_store"), values["trainer"]["delta_store"]),
    ]
    urls += [(("redis", "payload_servers", name), url) for name, url in values["redis"]["payload_servers"].items()]
    yield from ((key, url) for key, url in urls if url is not None and has_password(url))
    if (token := values["serving"]["token"]) is not None:
        yield ("serving", "token"), token
    yield from ((("agents", "clients", name), token) for name, token in values["agents"]["clients"].items())
    if (url := values["notify"]["url"]) is not None:
        # The address of a hook is sufficient to use it: all of it is secret.
        yield ("notify", "url"), url
    for name, value in values["engine"]["args"].items():
        if is_secret(name, value):
            yield ("engine", "args", name), value
    yield from _of_env_sections(values)
    yield from _of_ones_own_code(values)


def _of_env_sections(values: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield every value of every section ``env``: the name of a variable does not show whether it is a secret."""
    sections: list[tuple[Key, dict[str, str]]] = [(("engine", "env"), values["engine"]["env"])]
    for i, model in enumerate(values["fleet"]["models"]):
        for j, group in enumerate(model["server_groups"]):
            sections.append((("fleet", "models", str(i), "server_groups", str(j), "env"), group["env"]))
    for section, variables in sections:
        yield from (((*section, name), value) for name, value in variables.items())


def _of_ones_own_code(values: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield secrets in arguments of hooks and datasets, whose names penstock does not know."""
    given: list[tuple[Key, dict[str, Any]]] = [(("hooks", "args"), values["hooks"]["args"])]
    for lane in ("train", "eval"):
        for index, dataset in enumerate(values["data"][lane]):
            given.append((("data", lane, str(index), "source_args"), dataset["source_args"]))
    for key, at in given:
        for leaf in leaves(at):
            value: Any = at
            for part in leaf:
                value = value[int(part) if isinstance(value, list) else part]
            name = next((part for part in reversed(leaf) if not part.isdecimal()), "")
            if isinstance(value, str) and value and _looks_secret(name, value):
                yield (*key, *leaf), value


def _looks_secret(name: str, value: str) -> bool:
    """Return whether a value is secret. ``input_key: prompt`` and ``eos_token: </s>`` are not, despite their names."""
    if _SURELY.search(name) or has_password(value):
        return True
    return bool(SECRET_NAME.search(name) and _MADE_UP.fullmatch(value) and any(map(str.isdigit, value)))


def remember(config: Config) -> None:
    """Mask the secrets of a configuration in all output of this process."""
    for key, value in secrets_of(config.model_dump(mode="json")):
        know_url(str(value))
        if not _is_address(key) and not (key[-2:-1] == ("env",) and _is_common(key[-1], value)):
            know(str(value))


def _is_common(name: str, value: str) -> bool:
    """Return whether other text may contain the value of a variable by chance, so that masking would hide it."""
    return not SECRET_NAME.search(name) and _COMMON.fullmatch(value) is not None


def masked(values: dict[str, Any]) -> dict[str, Any]:
    """Mask the secrets of ``values`` in place."""
    for key, value in list(secrets_of(values)):
        put(values, key, redact(value) if _is_address(key) else MASK, "secrets")
    return values


def _is_address(key: Key) -> bool:
    """Return whether only the password of the value is secret."""
    return key[0] == "redis" or key in (("engine", "url"), ("reward", "remote", "url"), ("trainer", "delta_store"))
