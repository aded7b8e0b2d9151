"""What a worker says of an address that it will not ask for weights."""

from contextlib import AsyncExitStack

import pytest

from penstock.config.net.serving import ServingConfig
from penstock.protocol.records.offer import Range, range_digest
from workers.weights.fetch.download import Downloads, NotGiven


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://h:1", "is of https: this worker lacks serving.tls_cert and who serves there has it"),
        ("ftp://h:1", "is no address of http or https"),
        ("http://h:1/../x", "is no address of http or https"),
    ],
)
async def test_an_address_that_is_not_asked_is_told_why(url: str, says: str) -> None:
    part = Range(0, "a", 0, 1, range_digest(b"x").digest())
    async with AsyncExitStack() as stack:
        downloads = Downloads(ServingConfig(), "t" * 32)
        stack.push_async_callback(downloads.close)
        with pytest.raises(NotGiven, match=says):
            await downloads.fetch(url, "o", part, lambda *_: None)
