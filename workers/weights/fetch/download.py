"""Fetch one range of an object from one server, resume where it was cut, and check it by the digest of the offer."""

import asyncio
import re
import ssl
from collections.abc import Callable
from urllib.parse import quote

import aiohttp
from yarl import URL

from penstock.config.serving import ServingConfig
from penstock.records.offer import Range, range_digest
from penstock.text import format_exc
from penstock.weights.http.token import client_context

#: Bytes of one read.
CHUNK_BYTES = 256 * 1024
#: Least average rate of a server; slower ones are abandoned.
SLOWEST_BYTES_PER_S = 16 * 1024

_URL = re.compile(r"(https?)://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/\d{1,18}")


# Remedies, for error messages.
_BE_RUNNING = "check that its trainer is running"
_SAME_TOKEN = (
    "give every part the same (serving.token, or the file weights.token of the run's folder where that is not set)"
)
_KNOWN_CERTIFICATE = "set serving.tls_ca to what its certificate is signed with, and serving.reached_at to its name"


class NotGiven(Exception):
    """A server did not send a range; the message says why.

    Args:
        remedy: what to do if no other server sends it either.
        is_wrong: the server sent other bytes than the range's.
        is_silent: the server sent nothing in time.
    """

    def __init__(self, why: str, remedy: str = _BE_RUNNING, *, is_wrong: bool = False, is_silent: bool = False) -> None:
        super().__init__(why)
        self.remedy = remedy
        self.is_wrong = is_wrong
        self.is_silent = is_silent


class Downloads:
    """Fetch ranges. Created and closed in one event loop.

    Args:
        token: the run's.

    Raises:
        ConfigError: the TLS settings are invalid.
    """

    def __init__(self, config: ServingConfig, token: str) -> None:
        self._stall_s = config.stall_s
        self._scheme = "https" if config.is_tls else "http"
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        tls: ssl.SSLContext | bool = client_context(config) or True
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(force_close=True, limit=0, ssl=tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=CHUNK_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, url: str, name: str, wanted: Range, write: Callable[[int, bytes], None]) -> int:
        """Fetch a range of object ``name`` from the server at ``url``, resuming after cuts; return its bytes.

        Args:
            write: takes an offset in the range, and bytes; each call of ``fetch`` begins at 0.

        Raises:
            NotGiven: the server does not answer, stalls, lacks this range, or sent other bytes. OSError: of ``write``.
        """
        found = _URL.fullmatch(url)
        if found is None:
            raise NotGiven(f"{url[:200]!r} is no address of http or https")
        if found[1] != self._scheme:
            tls = ("has", "lacks") if self._scheme == "https" else ("lacks", "has")
            raise NotGiven(
                f"{url[:200]} is of {found[1]}: this worker {tls[0]} serving.tls_cert and who serves there {tls[1]} it",
                "give every part the same",
            )
        taken = _Taken(write)
        try:
            async with asyncio.timeout(self._stall_s + wanted.num_bytes / SLOWEST_BYTES_PER_S):
                while taken.num_bytes < wanted.num_bytes:
                    await self._continue(url, name, wanted, taken)
        except TimeoutError as exc:
            raise NotGiven(f"{url} gives less than {SLOWEST_BYTES_PER_S:,} bytes a second", is_silent=True) from exc
        except _Unwritten as exc:
            raise exc.why from None
        if taken.hasher.digest() != wanted.digest:
            raise NotGiven(f"{url} gives other bytes of {wanted.file} than were announced", is_wrong=True)
        return taken.num_bytes

    async def _continue(self, url: str, name: str, wanted: Range, taken: "_Taken") -> None:
        """Fetch the rest, or a part of it if the connection is cut. Raises NotGiven if no bytes arrive."""
        before = taken.num_bytes
        try:
            async with asyncio.timeout(self._stall_s) as stall:
                at = URL(f"{url}/{name}/{quote(wanted.file, safe='')}", encoded=True)
                await self._take(at, wanted, taken, stall)
            why, remedy = "it ends too early", _BE_RUNNING
        except TimeoutError as exc:
            raise NotGiven(f"{url}: it stalls", is_silent=True) from exc
        except _Otherwise as exc:
            why, remedy = str(exc), exc.remedy
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            why = format_exc(exc)
            remedy = _KNOWN_CERTIFICATE if isinstance(exc, aiohttp.ClientSSLError) else _BE_RUNNING
        if taken.num_bytes == before:
            raise NotGiven(f"{url}: {why}", remedy)

    async def _take(self, url: URL, wanted: Range, taken: "_Taken", stall: asyncio.Timeout) -> None:
        start, end = wanted.start + taken.num_bytes, wanted.start + wanted.num_bytes
        headers = self._headers | {"Range": f"bytes={start}-{end - 1}"}
        loop = asyncio.get_running_loop()
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            _check(answer, start, end)
            while start < end and (chunk := await answer.content.read(min(CHUNK_BYTES, end - start))):
                taken.add(chunk)
                start += len(chunk)
                stall.reschedule(loop.time() + self._stall_s)


class _Taken:
    """Count, hash and write the received bytes of a range."""

    def __init__(self, write: Callable[[int, bytes], None]) -> None:
        self.num_bytes = 0
        self.hasher = range_digest()
        self._write = write

    def add(self, chunk: bytes) -> None:
        self.hasher.update(chunk)
        try:
            self._write(self.num_bytes, chunk)
        except OSError as exc:
            raise _Unwritten(exc) from exc
        self.num_bytes += len(chunk)


class _Unwritten(Exception):
    """Writing to the own disk failed: another server would not help."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


class _Otherwise(Exception):
    """The server's answer is not the requested range; the message says what it is."""

    def __init__(self, what: str, remedy: str = _BE_RUNNING) -> None:
        super().__init__(what)
        self.remedy = remedy


def _check(answer: aiohttp.ClientResponse, start: int, end: int) -> None:
    """Check the head of an answer. Raises _Otherwise if it does not have these bytes."""
    if answer.status == 401:
        raise _Otherwise("it refuses our token of the run", _SAME_TOKEN)
    if answer.status == 404:
        raise _Otherwise("it does not have this range")
    if answer.status != 206:
        raise _Otherwise(f"it answers with status {answer.status}")
    span = _SPAN.fullmatch(answer.headers.get("Content-Range", ""))
    if span is None or (int(span[1]), int(span[2])) != (start, end - 1):
        raise _Otherwise("it answers with another range")
