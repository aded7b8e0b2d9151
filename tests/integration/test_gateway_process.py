"""``penstock serve`` as a process, and its TLS, presence and metrics."""

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest
import redis
from aiohttp import web

from penstock.errors import ConfigError
from penstock.metrics.server import targets
from penstock.protocol.snapshot import present_parts
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from penstock.system.processes import free_port
from penstock.text import MASK, redact
from penstock.workers.agents.gateway import main
from tests.integration.gateway_parts import CLIENT, TOKEN, PlayedWorker, gateway, gateway_config, key_of, turn
from tests.integration.part_processes import StartPart, start_part
from tests.integration.parts import PATIENCE_S
from tests.reference.metrics import PARTS

__all__ = ["start_part"]

CHAT = {"messages": [{"role": "user", "content": "Hi?"}]}


async def ask(url: str, tls: ssl.SSLContext | bool = True) -> int:
    """Return the status of a turn."""
    headers = {"Authorization": f"Bearer {key_of()}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers, ssl=tls) as response,
    ):
        return response.status


async def test_a_process_serves_until_it_is_stopped(
    redis_server: RedisServer, keys: Keys, client: redis.Redis, tmp_path: Path, start_part: StartPart
) -> None:
    port = free_port()
    config = gateway_config(redis_server.url, keys, tmp_path, port=port)
    config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"port": 0})})
    worker = PlayedWorker(client, keys, "w.1", reply=lambda path, body: web.json_response(turn()))
    process = await asyncio.to_thread(start_part, "serve", config)
    deadline = time.monotonic() + PATIENCE_S
    while not client.hlen(keys.parts):
        assert process.process.poll() is None, process.text()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    async with worker.up():
        worker.hold()
        assert await ask(f"http://127.0.0.1:{port}") == 200

    (found,) = targets(client, keys)
    assert found["labels"]["part"] == "gateway"
    async with aiohttp.ClientSession() as session, session.get(f"http://{found['targets'][0]}/metrics") as scraped:
        text = await scraped.text()
    assert 'penstock_gateway_requests_total{path="/v1/chat/completions"' in text
    for series in PARTS["Gateway"]:
        assert f"\n{series.shown_as}" in text
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.process.wait, PATIENCE_S) == 0
    assert not client.hlen(keys.parts)
    assert TOKEN not in process.text()


async def test_an_address_that_is_taken_ends_the_process_with_a_sentence(
    redis_server: RedisServer, keys: Keys, tmp_path: Path, start_part: StartPart
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = gateway_config(redis_server.url, keys, tmp_path, port=taken.getsockname()[1])
        process = await asyncio.to_thread(start_part, "serve", config)

        assert await asyncio.to_thread(process.process.wait, PATIENCE_S) == 2
    assert "agents.port" in process.text()
    assert "Traceback" not in process.text()


async def test_a_gateway_and_its_worker_by_tls(
    redis_server: RedisServer, keys: Keys, client: redis.Redis, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=penstock"
    more = ["-addext", "subjectAltName=IP:127.0.0.1"]
    await asyncio.to_thread(
        subprocess.run, [*command.split(), *more], check=True, capture_output=True, timeout=PATIENCE_S
    )
    config = gateway_config(redis_server.url, keys, tmp_path, tls_cert=cert, tls_key=key, tls_ca=cert)
    trusts = ssl.create_default_context(cafile=cert)
    mine = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    mine.load_cert_chain(cert, key)
    worker = PlayedWorker(client, keys, "w.1", tls=mine, reply=lambda path, body: web.json_response(turn()))
    async with worker.up(), gateway(config) as url:
        worker.hold()
        assert (url[:8], worker.url[:8]) == ("https://", "https://")
        assert await ask(url, trusts) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(url)


async def test_a_turn_that_is_running_at_the_end_is_cut_off(
    redis_server: RedisServer, keys: Keys, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "END_S", 0.01)
    worker = PlayedWorker(client, keys, "w.1")
    async with worker.up():
        worker.hold()
        async with gateway(gateway_config(redis_server.url, keys, tmp_path)) as url:
            asking = asyncio.create_task(ask(url))
            await worker.asked.get()
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_a_redis_that_is_away_is_503_and_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.agents.gateway.routing.REDIS_S", 0.1)
    server = RedisServer(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    try:
        config = gateway_config(server.url, Keys("demo"), tmp_path, idle_s=0.1)
        async with gateway(config) as url:
            await asyncio.to_thread(server.stop)
            assert await ask(url) == 503
            await asyncio.to_thread(server.start)
            assert await ask(url) == 410
    finally:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(server.stop)


async def test_the_presence_of_a_gateway_ends_with_it(
    redis_server: RedisServer, keys: Keys, client: redis.Redis, tmp_path: Path
) -> None:
    async with gateway(gateway_config(redis_server.url, keys, tmp_path)) as url:
        assert await ask(url) == 410
        deadline = time.monotonic() + PATIENCE_S
        while not (shown := present_parts(client.hgetall(keys.parts))):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert shown[0]["part"] == "gateway"
    assert not client.hlen(keys.parts)


def test_tokens_are_masked_and_a_masked_one_is_refused(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> None:
    main.Gateway(gateway_config(redis_server.url, keys, tmp_path))
    assert redact(f"{CLIENT} {TOKEN}") == f"{MASK} {MASK}"

    with pytest.raises(ConfigError, match="PENSTOCK_AGENTS__CLIENTS"):
        main.Gateway(gateway_config(redis_server.url, keys, tmp_path, clients={"me": MASK}))
