"""Hosts and web addresses of a configuration."""

import ipaddress
import re
from urllib.parse import urlsplit

from penstock.redaction import MASK

#: One line without blanks: some libraries would remove them from the middle.
_WEB = re.compile(r"https?://[^\s/]\S*")
#: Text that can only be an IPv4 address.
_DIGITS = re.compile(r"[0-9.]+\.[0-9.]*")


def checked_host(host: str | None) -> str | None:
    """Return ``host``; raise ValueError if it is neither a name nor an address."""
    if host is not None and not _is_host(host):
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


def can_be_posted_to(url: str) -> bool:
    """Return whether it may be the address of a web service; a masked one of a saved configuration may be."""
    try:
        parts = urlsplit(url)
        return url == MASK or (bool(_WEB.fullmatch(url)) and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        return False
