"""Names, token and TLS that trainers that serve weights share with workers that download them."""

import contextlib
import hmac
import os
import re
import secrets
import ssl
import tempfile
from pathlib import Path

from penstock.config import Config
from penstock.config.serving import TlsConfig, is_token
from penstock.errors import ConfigError
from penstock.text import MASK, know

#: Seconds without progress after which either side closes a connection.
STALL_S = 20.0
#: Name of a version's folder, on the server and on machines that fetched it.
_OBJECT = re.compile(r"v\d{8,20}-[0-9a-f]{32}")


def object_name(version: int, index: str) -> str:
    """Return the name under which a version is served and stored; it has the digest of its index."""
    return f"v{version:08d}-{index}"


def is_object(name: str) -> bool:
    return _OBJECT.fullmatch(name) is not None


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """Return the server's TLS context; None: plain HTTP. Reads files; raises ConfigError if they are invalid."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_refuse)
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(
            f"{config.section}.tls_cert {config.tls_cert} and {config.section}.tls_key {config.tls_key} cannot be used "
            f"({exc}): give a certificate and its own key, as PEM."
        ) from exc
    return context


def _refuse() -> str:
    """Reject a key with a passphrase; OpenSSL would ask the terminal for it and block."""
    raise OSError("the key has a passphrase: take it off, as by `openssl pkey`")


def client_context(config: TlsConfig) -> ssl.SSLContext | None:
    """Return a client's TLS context, which verifies certificates and names; None: plain HTTP. Raises ConfigError."""
    if not config.is_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
    except OSError as exc:
        raise ConfigError(
            f"{config.section}.tls_ca {config.tls_ca} cannot be used ({exc}): give certificates as PEM."
        ) from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


TOKEN_FILE = "weights.token"
#: Most bytes of the file that are read.
_MOST = 1024


def token_of(config: Config) -> str:
    """Return the run's token; create it if necessary. Concurrent callers get the same one.

    It is masked in all later logs.

    Raises:
        ConfigError: the file cannot be read or written, has no token, or is readable by others; or the configuration
            was saved with the token masked.
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
    """Return whether an Authorization header has the token, compared in constant time."""
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
    """Create the token file atomically, with mode 600; if several processes do, the first one wins."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
