"""Where a part listens, and by which name others reach it."""

import socket

from penstock.errors import ConfigError

#: Addresses that stand for all of a machine.
_ALL = ("0.0.0.0", "::")


def host_in_url(host: str, reached_at: str | None) -> str:
    """The host by which others reach what listens on ``host``, as it stands in a URL."""
    host = reached_at or (socket.gethostname() if host in _ALL else host)
    return f"[{host}]" if ":" in host else host


def cannot_listen(section: str, host: str, port: int, exc: OSError) -> ConfigError:
    """What is raised where the address of a section cannot be had."""
    return ConfigError(
        f"{section}.host {host}, {section}.port {port} cannot be listened on ({exc.strerror}): set an address of "
        "this machine and a free port; several parts on one machine need port 0."
    )
