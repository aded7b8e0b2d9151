"""Secrets of a configuration: passwords in URLs, tokens among the engine's variables and arguments."""

from collections.abc import Iterator
from typing import Any

from penstock.config import Config
from penstock.config.reading.nested import Key, put
from penstock.redaction import MASK, has_password, is_secret, know, know_url, redact


def secrets_of(values: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Keys and values that must not be shown."""
    urls: list[tuple[Key, Any]] = [
        (("redis", "url"), values["redis"]["url"]),
        (("engine", "url"), values["engine"]["url"]),
        (("reward", "remote", "url"), values["reward"]["remote"]["url"]),
        (("trainer", "delta_store"), values["trainer"]["delta_store"]),
    ]
    urls += [(("redis", "payload_servers", name), url) for name, url in values["redis"]["payload_servers"].items()]
    yield from ((key, url) for key, url in urls if url is not None and has_password(url))
    if (token := values["serving"]["token"]) is not None:
        yield ("serving", "token"), token
    if (url := values["notify"]["url"]) is not None:
        # Whoever has the address of a hook may use it: all of it is secret.
        yield ("notify", "url"), url
    for section in ("env", "args"):
        for name, value in values["engine"][section].items():
            if is_secret(name, value):
                yield ("engine", section, name), value


def remember(config: Config) -> None:
    """Have the secrets of a configuration masked in whatever this process shows."""
    for key, value in secrets_of(config.model_dump(mode="json")):
        if _is_address(key):
            know_url(value)
        else:
            know(str(value))


def masked(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with its secrets masked, in place."""
    for key, value in list(secrets_of(values)):
        put(values, key, redact(value) if _is_address(key) else MASK, "secrets")
    return values


def _is_address(key: Key) -> bool:
    """Whether only the password of the value is secret."""
    return key[0] == "redis" or key in (("engine", "url"), ("reward", "remote", "url"), ("trainer", "delta_store"))
