"""What a worker says of an address that it will not ask for weights."""

import subprocess
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from penstock.config.serving import ServingConfig
from penstock.records.offer import Range, range_digest
from penstock.weights.http.server import WeightsServer
from penstock.workers.weights.fetch.download import Downloads, NotGiven


@pytest.mark.parametrize(
    ("url", "says", "remedy"),
    [
        (
            "https://h:1",
            "is of https: this worker lacks serving.tls_cert and who serves there has it",
            "give every part the same",
        ),
        ("ftp://h:1", "is no address of http or https", "check that its trainer is running"),
        ("http://h:1/../x", "is no address of http or https", "check that its trainer is running"),
    ],
)
async def test_an_address_that_is_not_asked_is_told_why(url: str, says: str, remedy: str) -> None:
    part = Range(0, "a", 0, 1, range_digest(b"x").digest())
    async with AsyncExitStack() as stack:
        downloads = Downloads(ServingConfig(), "t" * 32)
        stack.push_async_callback(downloads.close)
        with pytest.raises(NotGiven, match=says) as caught:
            await downloads.fetch(url, "o", part, lambda *_: None)
    assert caught.value.remedy == remedy


@pytest.fixture
def signed_by_itself(tmp_path: Path) -> ServingConfig:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=penstock"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return ServingConfig(enabled=True, tls_cert=cert, tls_key=key)


async def test_a_certificate_that_nobody_vouched_for_is_what_is_to_be_mended(signed_by_itself: ServingConfig) -> None:
    config = signed_by_itself
    part = Range(0, "a", 0, 1, range_digest(b"x").digest())
    async with AsyncExitStack() as stack:
        server = stack.enter_context(closing(WeightsServer(config, "t" * 32)))
        downloads = Downloads(config, "t" * 32)
        stack.push_async_callback(downloads.close)
        with pytest.raises(NotGiven, match="certificate") as caught:
            await downloads.fetch(server.url, "o", part, lambda *_: None)
    assert caught.value.remedy.startswith("set serving.tls_ca to what its certificate is signed with")
