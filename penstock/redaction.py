"""What must not be shown: passwords in addresses, values of variables whose name says that they are secret.

Two ways, one beside the other: a secret that this process was given (``know``) is masked wherever it turns up, however
it is quoted; and whatever looks like a password in an address is masked even where nobody knows it yet.
"""

import json
import re
from urllib.parse import quote, unquote, urlsplit

#: What stands in the place of a secret.
MASK = "***"

#: Names of variables and arguments whose values must not be shown; ``monkey`` and ``tokenizer`` are none of them.
SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:\w*(?:SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL)\w*|TOKEN|KEYS?|AUTH|DSN|PASS|PWD|PAT|\w*APIKEY)"
    r"(?:$|[_-])",
    re.IGNORECASE,
)

#: An address with a password. Up to the last @ before another address, for a password may hold blanks, quotes and @;
#: but what is a port and no more (``h:6379/0 ...``) begins none.
_PASSWORD = re.compile(r"(?<=://)([^:/@\s\[]*):(?!\d{1,5}(?:/[\w.-]*)?(?:[\s\"')\]},;]|$))((?:(?!\w://).)*)@")
#: A secret in the query of an address, without the quotes and brackets that may follow it.
_OPTION = re.compile(
    r"([?&][\w-]*(?:password|passwd|pwd|token|secret|key|auth)[\w-]*)=([^&\s]*?)(?=[\"')\]},;.:]*(?:[&\s]|$))",
    re.IGNORECASE,
)
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
    for match in _PASSWORD.finditer(url):
        know(match[2])
        know(unquote(match[2]))
    for match in _OPTION.finditer(url):
        know(unquote(match[2]))


def redact(text: str) -> str:
    """``text`` with every secret in it masked."""
    for secret in _known:
        if secret in text:
            text = text.replace(secret, MASK)
    if "://" in text:
        text = _PASSWORD.sub(lambda match: match[0] if match[2] == _PLACE else f"{match[1]}:{MASK}@", text)
        text = _OPTION.sub(lambda match: f"{match[1]}={MASK}", text)
    return text


def is_secret(name: str, value: object) -> bool:
    """Must the value of this variable or argument not be shown: for its name, or for an address in it?"""
    return bool(SECRET_NAME.search(name)) or (isinstance(value, str) and redact(value) != value)


def has_password(url: str) -> bool:
    """Does an address carry a password?"""
    try:
        return bool(urlsplit(url).password) or redact(url) != url
    except ValueError:
        return True
