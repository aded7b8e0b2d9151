"""The way to a service over HTTP, where its server does what servers may."""

import asyncio
import time

from penstock.config.reward import JudgeConfig
from penstock.workers.rewards.service import Service

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def test_a_server_that_closes_a_connection_after_an_answer_fails_no_try() -> None:
    """It may at any time, and a question that is just under way on it is reset."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        await reader.readexactly(length)
        writer.write(ANSWER)
        await writer.drain()
        await reader.read(1)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    service = Service(JudgeConfig(name="taste", url=url, max_attempts=1), "reward.judges.taste")
    async with server:
        assert [await service.ask(url, {"n": n}) for n in range(3)] == [{}, {}, {}]
        await service.close()


async def test_who_waits_for_a_silent_service_ends_where_it_is_cancelled_as_the_time_of_a_try_runs_out() -> None:
    """aiohttp's own timer takes the one for the other there, and who waits would go on for ever."""
    asked = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    service = Service(JudgeConfig(name="taste", url=url, timeout_s=0.2), "reward.judges.taste")
    async with server:
        asking = asyncio.create_task(service.ask(url, {}, probe={}, waits=True))
        await asked.wait()
        asyncio.get_running_loop().call_later(0.3, asking.cancel)
        time.sleep(0.4)  # noqa: ASYNC251 - so that both are due at once
        await asyncio.wait({asking}, timeout=60.0)
        assert asking.done()
        assert asking.cancelled()
        await service.close()
