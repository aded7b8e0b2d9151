"""Shorten the reason for which an engine was lost."""

from penstock.text import redact

#: Lines of a log shown with a reason.
SHOWN_LINES = 8
#: Longest published reason, in characters.
SHOWN_CHARS = 2000


def shorten(reason: str) -> str:
    """Return the first and the last lines of a reason, without passwords, short enough for a table and a record."""
    lines = [line for line in redact(reason).splitlines() if line.strip()]
    if len(lines) > SHOWN_LINES + 1:
        lines = [lines[0], *lines[-SHOWN_LINES:]]
    text = "\n".join(line[:400] for line in lines)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
