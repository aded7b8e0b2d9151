"""The address of one sample: whoever of this machine sends it garbage does not fill the worker's log."""

import asyncio
import logging
from typing import cast

import pytest

from penstock.workers.hooks.maker import HOST, engine_endpoint
from penstock.workers.hooks.recorded_engine import RecordedEngine


async def test_what_cannot_be_parsed_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with engine_endpoint(cast(RecordedEngine, None)) as port:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
    assert caplog.text == ""
