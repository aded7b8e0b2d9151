"""Read keys of a terminal one at a time, without waiting for the end of a line."""

import os
import re
import select
import sys
import termios
import tty
from collections import deque
from types import TracebackType
from typing import Self

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1bOC": "right", b"\x1bOD": "left", b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown", b"\x1b": "escape",
    b"\r": "enter", b"\n": "enter", b"\t": "tab", b"\x7f": "backspace", b"\x08": "backspace", b"\x03": "ctrl-c",
}  # fmt: skip
#: Bytes read at once: held or pasted keys arrive together.
_MOST = 1024
#: One key: a sequence of a terminal, or a character of UTF-8.
_KEY = re.compile(rb"\x1b\[[0-9;]*[@-~]|\x1bO.|[\xc0-\xff][\x80-\xbf]+|.", re.DOTALL)


def keys_of(data: bytes) -> list[str]:
    """Decode bytes to keys: names, characters, or '' for a key without a meaning here."""
    return [_key_of(one) for one in _KEY.findall(data)]


def _key_of(data: bytes) -> str:
    if data in _SEQUENCES:
        return _SEQUENCES[data]
    text = data.decode(errors="ignore")
    return text if len(text) == 1 and text.isprintable() else ""


class Keyboard:
    """The terminal at standard input; a context manager, because the terminal's mode must be restored."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._before = termios.tcgetattr(self._fd)
        #: Pressed keys that were not returned yet.
        self._pressed: deque[str] = deque()

    def __enter__(self) -> Self:
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> str | None:
        """Return the next key, None after ``timeout_s`` seconds without one; ctrl-c if the terminal is gone. Blocks."""
        if not self._pressed and select.select([self._fd], [], [], timeout_s)[0]:
            try:
                data = os.read(self._fd, _MOST)
            except OSError:
                data = b""
            self._pressed.extend(keys_of(data) if data else ["ctrl-c"])
        return self._pressed.popleft() if self._pressed else None
