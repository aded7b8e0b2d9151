"""Ports of this machine."""

import socket
from urllib.parse import urlsplit

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_loopback(url: str) -> bool:
    """Return whether a URL is HTTP on this machine's loopback interface. Raises ValueError if it is invalid."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname in _LOOPBACK
