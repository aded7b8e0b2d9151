"""TLS of weights over HTTP, both sides."""

import ssl

from penstock.config.net.serving import ServingConfig
from penstock.errors import ConfigError


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
