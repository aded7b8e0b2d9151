"""What must not be shown: passwords in addresses, values of variables whose name says that they are secret.

Two ways, one beside the other: a secret that this process was given (``know``) is masked wherever it turns up, however
it is quoted; and whatever looks like a password in an address is masked even where nobody knows it yet.
"""

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote, urlsplit

#: What is shown in place of a secret.
MASK = "***"

#: Names of variables and arguments whose values must not be shown; ``monkey`` and ``tokenizer`` are none of them.
SECRET_NAME = re.compile(
    r"SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL"
    r"|(?:(?:^|[_-])(?:TOKEN|KEYS?|AUTH|DSN|PASS|PWD|PAT)|APIKEY)(?:$|[_-])",
    re.IGNORECASE,
)

# Texts of others are looked through, of any length: nothing here may look at the same characters again and again.
#: Where a line ends or another address begins: up to the last @ before that a password may reach, for it may hold
#: blanks, quotes and @.
_MARK = re.compile(r"\n|\w(?=://)")
#: What stands before a password in an address; but what is a port and no more (``h:6379/0 ...``) begins none.
_USER = re.compile(r"(?<=://)([^:/@\s\[]*):(?!\d{1,5}(?:/[\w.-]*)?(?:[\s\"')\]},;]|$))")
#: A name in the query of an address, and its value, with the quotes and brackets that may follow it.
_OPTION = re.compile(r"[?&]([\w-]+)=")
_VALUE = re.compile(r"[^&\s]*")
_BEHIND = "\"')]},;.:"
_SECRET_OPTION = re.compile(r"password|passwd|pwd|token|secret|key|auth|credential|signature|^sig$", re.IGNORECASE)
#: What penstock writes where a password has its place.
_PLACE = "PASSWORD"
#: Shorter ones would mask parts of words.
_MIN_LENGTH = 4
#: Secrets of this process, in every way in which they are written; longest first.
_known: list[str] = []


def know(secret: str) -> None:
    """Mask ``secret`` in all that ``redact`` sees from now on, as it is, percent-encoded and as JSON."""
    if len(secret) < _MIN_LENGTH or secret in (MASK, _PLACE):
        return
    ways = {secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    _known.extend(ways - set(_known))
    _known.sort(key=len, reverse=True)


def know_url(url: str) -> None:
    """Mask the password of an address, and what is secret in its query."""
    for start, end in _passwords(url):
        know(url[start:end])
        know(unquote(url[start:end]))
    for start, end in _options(url):
        know(unquote(url[start:end]))


def redact(text: str) -> str:
    """``text`` with every secret in it masked. Takes time in proportion to its length."""
    for secret in _known:
        if secret in text:
            text = text.replace(secret, MASK)
    if "://" in text:
        text = _masked(text, [(a, b) for a, b in _passwords(text) if text[a:b] != _PLACE])
        text = _masked(text, list(_options(text)))
    return text


def _masked(text: str, places: list[tuple[int, int]]) -> str:
    kept, last = [], 0
    for start, end in places:
        kept += [text[last:start], MASK]
        last = end
    return "".join((*kept, text[last:]))


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    """Where passwords in addresses begin and end."""
    start = 0
    for end in (*(mark.start() for mark in _MARK.finditer(text)), len(text)):
        at = text.rfind("@", start, end)
        user = _USER.search(text, start, end) if at >= 0 else None
        if user is not None and user.end() <= at:
            yield user.end(), at
        start = end


def _options(text: str) -> Iterator[tuple[int, int]]:
    """Where secret values in the queries of addresses begin and end."""
    done = 0
    for option in _OPTION.finditer(text):
        if option.start() >= done and _SECRET_OPTION.search(option[1]):
            value = _VALUE.match(text, option.end())
            assert value is not None
            done = value.end()
            yield option.end(), option.end() + len(value[0].rstrip(_BEHIND))


def is_secret(name: str, value: object) -> bool:
    """Must the value of this variable or argument not be shown: for its name, or for an address in it?"""
    return bool(SECRET_NAME.search(name)) or (isinstance(value, str) and redact(value) != value)


def has_password(url: str) -> bool:
    """Does an address carry a password?"""
    try:
        return bool(urlsplit(url).password) or redact(url) != url
    except ValueError:
        return True
