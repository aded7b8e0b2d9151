"""The files of the page: a few, read once, each under its path in ``assets/``."""

from functools import cache
from pathlib import Path

from fastapi import Response

from penstock.console.web.replies import NotThere

_FOLDER = Path(__file__).parent / "assets"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def asset(path: str) -> Response:
    """Return the file at ``path`` (``views/curves.js``); raise NotThere if it does not exist."""
    held = _all().get(path)
    if held is None:
        raise NotThere(f"The page has no file {path!r}.")
    return Response(held, media_type=_TYPES[Path(path).suffix])


@cache
def _all() -> dict[str, bytes]:
    files = (path for path in _FOLDER.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in files}
