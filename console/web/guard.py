"""Restrict requests to this machine's own page, and what a response may do in a browser to its own resources.

| refused | because |
|---|---|
| a Host that is not a name of loopback | another site's name resolves to this machine (DNS rebinding) |
| an Origin that is not the page's own, or a request that the browser attributes to another site | cross-site request |
| a change, without ``--actions`` or the token in its header | unlike a cookie, a header is not sent automatically |
"""

import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.console.web.replies import refusal

#: Names of loopback allowed in a Host header.
HOSTS = frozenset(("127.0.0.1", "localhost", "[::1]"))
#: Header with the token for actions.
TOKEN_HEADER = "x-penstock-token"
#: Most bytes of a request's body.
MAX_BODY = 64 * 1024

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Guard:
    """ASGI middleware; see the module docstring.

    Args:
        token: required for actions; None: no actions.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            return
        why = self._refuses(scope["method"], Headers(scope=scope))
        answer: ASGIApp = refusal(*why) if why else self._app
        await answer(scope, receive, guarded)

    def _refuses(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Return status and sentence of a refusal; None if the request may pass."""
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or _name_of(hosts[0]) not in HOSTS:
            return 403, "This page is asked for under the name of another host: open it at http://127.0.0.1."
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return 403, "Another site asks through this browser, which is refused."
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _is_visit(headers):
            return 403, "Another site asks through this browser, which is refused."
        return None if method in ("GET", "HEAD") else self._refuses_action(headers)

    def _refuses_action(self, headers: Headers) -> tuple[int, str] | None:
        if self._token is None:
            return 403, "This page changes nothing: start it with `penstock web --actions` to let it."
        given = headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return 401, "The token is not the one that `penstock web --actions` printed when it started."
        size = headers.get("content-length", "")
        if not size.isascii() or not size.isdecimal() or len(size) > 9 or int(size) > MAX_BODY:
            return 413, f"The request does not say how long it is, or is longer than {MAX_BODY:,} bytes."
        return None


def _is_visit(headers: Headers) -> bool:
    """Return whether a person follows a link from elsewhere to the page, which reveals nothing to that site."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _name_of(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
