"""Redaction of secrets: passwords in addresses, values of variables with secret names.

Two ways: a secret that this process was given (``know``) is masked wherever it occurs, however it is quoted; and
anything that looks like a password in an address is masked even if it is not known yet.
"""

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote, urlsplit

#: Replacement of a secret.
MASK = "***"

#: Names of variables and arguments whose values must not be shown; ``monkey`` and ``tokenizer`` are not among them.
SECRET_NAME = re.compile(
    r"SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL"
    r"|(?:(?:^|[_-])(?:TOKEN|KEYS?|AUTH|DSN|PASS|PWD|PAT)|APIKEY)(?:$|[_-])",
    re.IGNORECASE,
)

# Foreign texts of any length are scanned: no character may be scanned more than a few times.
#: End of a line or beginning of another address: a password may reach up to the last @ before it, since it may contain
#: blanks, quotes and @.
_MARK = re.compile(r"\n|\w(?=://)")
#: Text before a password in an address; a mere port (``h:6379/0 ...``) is not the beginning of a password.
_USER = re.compile(r"(?<=://)([^:/@\s\[]*):(?!\d{1,5}(?:/[\w.-]*)?(?:[\s\"')\]},;]|$))")
#: A name in the query of an address, and its value, with the quotes and brackets that may follow it.
_OPTION = re.compile(r"[?&]([\w-]+)=")
_VALUE = re.compile(r"[^&\s]*")
_BEHIND = "\"')]},;.:"
_SECRET_OPTION = re.compile(r"password|passwd|pwd|token|secret|key|auth|credential|signature|^sig$", re.IGNORECASE)
#: Placeholder for a password in penstock's own texts.
_PLACE = "PASSWORD"
#: Shorter ones would mask parts of words.
_MIN_LENGTH = 4
#: Secrets of this process, in all their spellings; longest first.
_known: list[str] = []


def know(secret: str) -> None:
    """Mask ``secret`` in all later results of ``redact``, as it is, percent-encoded and as JSON."""
    if len(secret) < _MIN_LENGTH or secret in (MASK, _PLACE):
        return
    ways = {secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    _known.extend(ways - set(_known))
    _known.sort(key=len, reverse=True)


def know_url(url: str) -> None:
    """Mask the password of an address, and secrets in its query."""
    for start, end in _passwords(url):
        know(url[start:end])
        know(unquote(url[start:end]))
    for start, end in _options(url):
        know(unquote(url[start:end]))


def redact(text: str) -> str:
    """Return ``text`` with every secret masked. Takes time in proportion to its length."""
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
    """Yield the start and end of passwords in addresses."""
    start = 0
    for end in (*(mark.start() for mark in _MARK.finditer(text)), len(text)):
        at = text.rfind("@", start, end)
        user = _USER.search(text, start, end) if at >= 0 else None
        if user is not None and user.end() <= at:
            yield user.end(), at
        start = end


def _options(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of secret values in the queries of addresses."""
    done = 0
    for option in _OPTION.finditer(text):
        if option.start() >= done and _SECRET_OPTION.search(option[1]):
            value = _VALUE.match(text, option.end())
            assert value is not None
            done = value.end()
            yield option.end(), option.end() + len(value[0].rstrip(_BEHIND))


def is_secret(name: str, value: object) -> bool:
    """Return whether the value of a variable or argument is secret: by its name, or an address in it."""
    return bool(SECRET_NAME.search(name)) or (isinstance(value, str) and redact(value) != value)


def has_password(url: str) -> bool:
    """Return whether an address has a password."""
    try:
        return bool(urlsplit(url).password) or redact(url) != url
    except ValueError:
        return True
