"""Addresses that a process listens on, and by which others reach it."""

import socket

from penstock.errors import ConfigError

#: Addresses that mean all of a machine's.
_ALL = ("0.0.0.0", "::")


def host_in_url(host: str, reached_at: str | None) -> str:
    """Return the host, in URL form, by which others reach a server that listens on ``host``."""
    host = reached_at or (socket.gethostname() if host in _ALL else host)
    return f"[{host}]" if ":" in host else host


def cannot_listen(section: str, host: str, port: int, exc: OSError) -> ConfigError:
    """Return the error for an address of a section that cannot be listened on."""
    return ConfigError(
        f"{section}.host {host}, {section}.port {port} cannot be listened on ({exc.strerror}): set an address of "
        "this machine and a free port; several parts on one machine need port 0."
    )
