"""Make texts and values of foreign code (a user's, an engine's, a library's) safe to record and to print.

The text of a user's exception may hold lone surrogates, which no record, stream or terminal accepts, or raise when it
is read. Such texts are converted where they enter.
"""

import json
import os
import re
import reprlib
import traceback
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

# Redaction of secrets: passwords in addresses, values of variables with secret names.
#
# Two ways: a secret that this process was given (``know``) is masked wherever it occurs, however it is quoted; and
# anything that looks like a password in an address is masked even if it is not known yet.

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


#: Most characters of an exception's own text, and of a traceback; of both the beginning and the end are kept.
MAX_SAID = 4_000
MAX_TRACE = 32_000
#: Folder of the code that calls user code.
_OWN_FOLDER = str(Path(__file__).parent) + os.sep
#: Most characters of the name of a type.
MAX_NAME = 200


def utf8_safe(text: str, most: int | None = None) -> str:
    """Return ``text`` with lone surrogates escaped, and without its middle if it is longer than ``most``."""
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]} ... {text[-(most // 2) :]}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def printable(text: str) -> str:
    """``text`` as a terminal may be given it: what is not printed stands there by its number, as in ``\\x1b``.

    Others' words may hold what moves the cursor, names a window or turns the direction of writing. Newlines and tabs
    stay, and so do the joiners that some scripts are written with.
    """
    return text if text.isprintable() else "".join(map(_visible, text.replace("\r\n", "\n")))


def _visible(char: str) -> str:
    if char.isprintable() or char in "\n\t\u200c\u200d":
        return char
    return " " if unicodedata.category(char) == "Zs" else char.encode("unicode_escape").decode()


def safe_repr(value: object, most: int = 80) -> str:
    """Return the ``repr`` of anything, cut to ``most`` characters; only its type if ``repr`` raises.

    Lists and maps are cut to their first entries and three levels: a value that is held twice would double the text at
    each level.
    """
    try:
        head = value[:most] if isinstance(value, str | bytes) else value
        return utf8_safe(_SHORT.repr(head)[:most])
    except BaseException:
        return f"<{name_of(value)} that cannot be shown>"


def name_of(value: object) -> str:
    """Return the name of a value's type, even if the type's own name is unusable."""
    try:
        return utf8_safe(str(type(value).__name__), MAX_NAME)
    except BaseException:
        return "object"


def _short() -> reprlib.Repr:
    made = reprlib.Repr()
    made.maxlevel = 3
    made.maxlist = made.maxtuple = made.maxdict = made.maxset = made.maxfrozenset = made.maxdeque = made.maxarray = 24
    made.maxstring = made.maxlong = made.maxother = MAX_SAID
    return made


_SHORT = _short()


def format_exc(exc: BaseException) -> str:
    """Return ``TypeName: text`` of an exception, even if its ``__str__`` raises."""
    try:
        text = str(exc)
    except BaseException:
        text = "<its text cannot be shown>"
    return utf8_safe(f"{name_of(exc)}: {text}", MAX_SAID)


def trace_of(exc: BaseException) -> str:
    """Return the traceback of an exception, including its causes."""
    try:
        text = "".join(traceback.format_exception(exc)).strip()
    except BaseException:
        text = format_exc(exc)
    return utf8_safe(text, MAX_TRACE)


def user_trace_of(exc: BaseException) -> str:
    """Return the traceback of the user's code that caused an error, ending with the error, without frames of penstock.

    Only the error if no user code raised.
    """
    root = exc
    while root.__cause__ is not None:
        root = root.__cause__
    try:
        found = traceback.TracebackException.from_exception(root)
        found.stack[:] = [frame for frame in found.stack if not frame.filename.startswith(_OWN_FOLDER)]
        # One that was raised in another process has its traceback as a note.
        notes = [] if found.stack else getattr(root, "__notes__", [])
        lines = list(found.format()) if found.stack else [f"{note}\n" for note in notes]
        text = "".join(lines) + str(exc)
    except BaseException:
        text = format_exc(exc)
    return utf8_safe(text, MAX_TRACE)


class TooMuch(ValueError):
    """A value exceeds the size limit of its caller."""


def to_plain(value: Any, most: int = 2**20) -> Any:
    """Convert ``value`` to what msgpack and JSON carry: arrays to lists, values of unknown types to text.

    Integers beyond 64 bits, values nested deeper than ``MAX_DEPTH``, references of a value to itself and values that
    raise when they are read become text too.

    Args:
        most: limit of the characters of all texts plus the number of all values; a value held twice counts twice.

    Raises:
        TooMuch: the limit is exceeded.
    """
    return _Plain(most).of(value, ())


#: Deepest nesting of ``reward_info``.
MAX_DEPTH = 16


class _Plain:
    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def of(self, value: Any, above: tuple[int, ...]) -> Any:
        """Convert a value. ``above``: ids of the containers around it."""
        self._take(1)
        try:
            return self._of(value, above)
        except TooMuch:
            raise
        except BaseException:
            return self._text(f"<{name_of(value)} that cannot be read>")

    def _of(self, value: Any, above: tuple[int, ...]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -(2**63) <= value < 2**64 else self._text(safe_repr(value, 1000))
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return self._text(str.__str__(value))
        if len(above) >= MAX_DEPTH or id(value) in above:
            return self._text("...")
        below = (*above, id(value))
        if isinstance(value, dict):
            return {self._key(key): self.of(entry, below) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(entry, below) for entry in value]
        if callable(tolist := getattr(value, "tolist", None)):
            return self.of(tolist(), below)
        return self._text(safe_repr(value, 1000))

    def _key(self, key: Any) -> str:
        return self._text(str.__str__(key) if isinstance(key, str) else str(key))

    def _text(self, text: str) -> str:
        self._take(len(text))
        return utf8_safe(text)

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TooMuch(f"more than {self._most:,} values and characters")


#: Lines of a log shown with a reason.
SHOWN_LINES = 8
#: Longest published reason, in characters.
SHOWN_CHARS = 2000


def shorten_reason(reason: str) -> str:
    """Return the first and the last lines of a reason, without passwords, short enough for a table and a record."""
    lines = [line for line in redact(reason).splitlines() if line.strip()]
    if len(lines) > SHOWN_LINES + 1:
        lines = [lines[0], *lines[-SHOWN_LINES:]]
    text = "\n".join(line[:400] for line in lines)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
