"""Section ``serving``: weights over HTTP."""

import ipaddress
import re
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.config.section import Positive, Section
from penstock.errors import ConfigError
from penstock.text import MASK

#: Addresses that mean all of a machine's.
_ALL = ("0.0.0.0", "::")
#: Addresses that only processes of the same machine reach.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def host_in_url(host: str, reached_at: str | None) -> str:
    """Return the host, in URL form, by which others reach a server that listens on ``host``."""
    if host not in _LOOPBACK:
        host = reached_at or (socket.gethostname() if host in _ALL else host)
    return f"[{host}]" if ":" in host else host


def cannot_listen(section: str, host: str, port: int, exc: OSError) -> ConfigError:
    """Return the error for an address of a section that cannot be listened on."""
    return ConfigError(
        f"{section}.host {host}, {section}.port {port} cannot be listened on ({exc.strerror}): set an address of "
        "this machine and a free port; several parts on one machine need port 0."
    )


#: One line without blanks: some libraries would remove them from the middle.
_WEB = re.compile(r"https?://[^\s/]\S*")
#: Text that can only be an IPv4 address.
_DIGITS = re.compile(r"[0-9.]+\.[0-9.]*")


def _checked_host(host: str) -> str:
    """Return ``host``; raise ValueError if it is neither a name nor an address."""
    if not _is_host(host):
        raise ValueError(f"{host!r} is no host: give a name or an address, without port, brackets or scheme")
    return host


def _is_host(host: str) -> bool:
    if not host or len(host) > 255 or set(host) & set(" /@[]\"'\\{}"):
        return False
    if ":" not in host and not _DIGITS.fullmatch(host):
        return True  # a name
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


#: Name or address of a machine.
Host = Annotated[str, AfterValidator(_checked_host)]


def can_be_posted_to(url: str) -> bool:
    """Return whether it may be an HTTP address; a masked address in a saved configuration counts as one."""
    try:
        parts = urlsplit(url)
        return url == MASK or (bool(_WEB.fullmatch(url)) and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        return False


_TOKEN = re.compile("[!-~]{16,256}")


def is_token(token: str) -> bool:
    """Return whether this is a valid token for fetching weights."""
    return _TOKEN.fullmatch(token) is not None


class TlsConfig(Section):
    """Certificates of a server, and of its clients, which need the same keys."""

    #: Name of the section, for errors.
    section: ClassVar[str]

    #: File with the server's certificate (PEM, with its chain); None: plain HTTP. Set it for clients too, so that they
    #: use TLS.
    tls_cert: Path | None = None
    #: File with the key of ``tls_cert``.
    tls_key: Path | None = None
    #: File with certificates (PEM) by which clients verify the server's certificate; None: the machine's certificates.
    tls_ca: Path | None = None

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: set both, or neither")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_ca verifies certificates, and without tls_cert no part has one: set it, or remove tls_ca"
            )
        return self

    @property
    def is_tls(self) -> bool:
        return self.tls_cert is not None


class ServingConfig(TlsConfig):
    """Weights over HTTP, for workers that do not see the trainer's folder: the trainer serves published versions, and
    workers fetch them from it (docs/workers.md)."""

    section = "serving"

    #: Serve versions over HTTP and let workers fetch them; false: workers must see the folder of published versions.
    enabled: bool = False
    #: Token that clients must send: printable characters without blanks. Set it in PENSTOCK_SERVING__TOKEN rather than
    #: in a file; it is masked in all output. None: a random token, created once for the run in the file
    #: ``weights.token`` of its folder, which only the run's user can read.
    token: str | None = None
    #: Address on which the trainer listens; 0.0.0.0 or :: means all addresses of its machine.
    host: Host = "127.0.0.1"
    #: Port on which the trainer listens; 0: a free port.
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    #: Folder for fetched versions, shared by the workers of a machine. None: ``fetched`` in the run's folder.
    folder: Path | None = None
    #: Maximum number of bytes of fetched versions on a machine. The oldest version that no worker uses is deleted
    #: first. If a version does not fit beside the versions in use, it is refused.
    max_bytes: Positive = 1024**4

    @field_validator("token")
    @classmethod
    def _check_token(cls, token: str | None) -> str | None:
        # A resolved configuration shows only that one is set.
        if token not in (None, MASK) and not is_token(token or ""):
            # The token is secret: the error does not repeat it.
            raise ValueError("serving.token is invalid: use 16 to 256 printable ASCII characters without blanks")
        return token

    @model_validator(mode="after")
    def _check_enabled(self) -> Self:
        # A token may be set in the environment of a machine for several runs.
        given = sorted(key for key in self.model_fields_set - {"token", "enabled"} if not self.is_default(key))
        if given and "enabled" not in self.model_fields_set:
            raise ValueError(
                f"serving.enabled is not set, but {', '.join(given)} {'are' if given[1:] else 'is'}: set enabled "
                f"to true, or to false to keep {'them' if given[1:] else 'it'} for later"
            )
        return self


class MetricsConfig(Section):
    """Prometheus metrics of every part, each at its own address (docs/metrics.md)."""

    #: Address on which parts listen; 0.0.0.0 or :: means all addresses of their machine. Metrics have no password.
    host: Host = "127.0.0.1"
    #: Port of each part. 0: a free port, which ``penstock metrics discovery`` reports to Prometheus. Set another number
    #: only for a part that is alone on its machine (PENSTOCK_METRICS__PORT sets it for one part). None: no metrics.
    port: Annotated[int, Field(ge=0, le=65535)] | None = None


class NotifyConfig(Section):
    """A web address that is notified when a run of ``penstock run`` ends: finished, failed or stopped."""

    #: http:// or https:// address that receives a POST of JSON (docs/operations.md); it is masked in all output. None:
    #: no notification.
    url: str | None = None

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        # A resolved configuration shows only that one is set.
        if self.url is not None and not can_be_posted_to(self.url):
            # The error does not repeat the address, which may contain a secret.
            raise ValueError("notify.url is not an HTTP address: use http://HOST/PATH or https://HOST/PATH")
        return self
