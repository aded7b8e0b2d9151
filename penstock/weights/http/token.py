"""The token of a run, which whoever asks for its weights must have."""

import contextlib
import hmac
import logging
import os
import secrets
import ssl
from pathlib import Path
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from penstock.config import Config
from penstock.config.serving import ServingConfig, is_token
from penstock.errors import ConfigError
from penstock.text import MASK, know


def server_context(config: ServingConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Reads files; raises ConfigError where they will not do."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_refuse)
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(
            f"serving.tls_cert {config.tls_cert} and serving.tls_key {config.tls_key} cannot be used ({exc}): give a "
            "certificate and its own key, as PEM."
        ) from exc
    return context


def _refuse() -> str:
    """A key with a passphrase: without this OpenSSL asks the terminal for it, and the part waits."""
    raise OSError("the key has a passphrase: take it off, as by `openssl pkey`")


def client_context(config: ServingConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Certificates and names are checked. Reads files; raises ConfigError."""
    if not config.is_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
    except OSError as exc:
        raise ConfigError(f"serving.tls_ca {config.tls_ca} cannot be used ({exc}): give certificates as PEM.") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class BadRequests(logging.LoggerAdapter[logging.Logger]):
    """Logs as it is asked to; requests that cannot be parsed, and clients that are gone, are for who debugs."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        is_theirs = isinstance(kwargs.get("exc_info"), HttpProcessingError | ConnectionError)
        super().log(logging.DEBUG if is_theirs else level, msg, *args, **kwargs)


#: ``logger`` of a server.
BAD_REQUESTS = BadRequests(logging.getLogger(__name__), {})


TOKEN_FILE = "weights.token"
#: Most bytes of the file that are read.
_MOST = 1024


def token_of(config: Config) -> str:
    """The run's token; made where there is none. Any number of processes may ask at once: they find one and the same.

    It is masked in all that is logged from now on.

    Raises:
        ConfigError: the file cannot be read or written, holds no token, or others may read it; or the configuration was
            saved, and shows only that there was one.
    """
    if config.serving.token == MASK:
        raise ConfigError(
            "serving.token is masked in this file: give it again, as PENSTOCK_SERVING__TOKEN, or --serving.token=null "
            "to have the run make one."
        )
    token = config.serving.token or _of_file(config.run_dir / TOKEN_FILE)
    know(token)
    return token


def is_authorized(header: str | None, token: str) -> bool:
    """Whether a header Authorization proves the token. Takes the same time for every wrong one of its length."""
    return hmac.compare_digest((header or "").encode(errors="replace"), f"Bearer {token}".encode())


def _of_file(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(f"serving.token: others may read {path}; change its mode to 600, or delete it.")
            token = file.read(_MOST).decode(errors="replace").strip()
    except OSError as exc:
        raise ConfigError(
            f"serving.token: {path} cannot be used ({exc.strerror}): set PENSTOCK_SERVING__TOKEN, the same everywhere."
        ) from exc
    if not is_token(token):
        raise ConfigError(f"serving.token: {path} holds no token: delete it, and a new one is made.")
    return token


def _make(path: Path) -> None:
    """Whole at once, so that nobody reads the half of one; of several that are made the first stands."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
