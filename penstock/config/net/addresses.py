"""Hosts and web addresses of a configuration."""

import ipaddress
import re
from urllib.parse import urlsplit

from penstock.redaction import MASK

#: One line without blanks: what a library would leave out of the middle is not asked.
_WEB = re.compile(r"https?://[^\s/]\S*")
#: What only an address of IPv4 looks like.
_DIGITS = re.compile(r"[0-9.]+\.[0-9.]*")


def checked_host(host: str | None) -> str | None:
    """``host``, or ValueError where it is neither a name nor an address."""
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
    """Whether it may be the address of a web service; so may one that a saved configuration masks."""
    try:
        parts = urlsplit(url)
        return url == MASK or (bool(_WEB.fullmatch(url)) and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        return False
