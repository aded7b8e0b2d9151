"""The address of one sample: whoever of this machine sends it garbage does not fill the worker's log."""

import asyncio
import logging
from typing import cast

import pytest

from penstock.workers.hooks.draws import Draws
from penstock.workers.hooks.maker import HOST, door


async def test_what_cannot_be_parsed_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with door(cast(Draws, None)) as port:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
    assert caplog.text == ""
