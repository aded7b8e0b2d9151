"""A server of weights for tests, and raw requests to it."""

import http.client
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.config import ServingConfig
from penstock.consumers.weights.static_files import FileServer

TOKEN = "t" * 32
OBJECT = "v00000042-" + "0" * 32
BYTES = bytes(range(256)) * 4096


@contextmanager
def serving(folder: Path | None = None, *, bytes_per_s: int | None = None, **config: Any) -> Iterator[FileServer]:
    server = FileServer(ServingConfig(enabled=True, **config), TOKEN, bytes_per_s)
    if folder is not None:
        server.versions[OBJECT] = folder, {one.name: one.stat().st_size for one in folder.iterdir()}
    with closing(server):
        yield server


def ask(
    server: FileServer,
    path: str,
    *,
    method: str = "GET",
    token: str | None = TOKEN,
    span: str | None = None,
    tls: ssl.SSLContext | None = None,
    **more: str,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, of a path that is sent as it is."""
    at = urlsplit(server.url)
    kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
    options = {} if tls is None else {"context": tls}
    with closing(kind(at.hostname or "", at.port, timeout=30, **options)) as connection:  # type: ignore[arg-type]
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(method, path, headers=headers | more | ({} if span is None else {"Range": f"bytes={span}"}))
        answer = connection.getresponse()
        return answer.status, dict(answer.headers.items()), answer.read()
