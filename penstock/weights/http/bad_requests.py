"""What a server of aiohttp's logs: what clients send, and that they leave, is no error of ours and fills no log."""

import logging
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class BadRequests(logging.LoggerAdapter[logging.Logger]):
    """Logs as it is asked to; requests that cannot be parsed, and clients that are gone, are for who debugs."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        is_theirs = isinstance(kwargs.get("exc_info"), HttpProcessingError | ConnectionError)
        super().log(logging.DEBUG if is_theirs else level, msg, *args, **kwargs)


#: ``logger`` of a server.
BAD_REQUESTS = BadRequests(logging.getLogger(__name__), {})
