"""Closed-loop clients of an SGLang server: processes that keep a fixed number of requests running, and store nothing.

The same event loop (uvloop) and HTTP client as a worker's; connections are kept open between requests.
"""

import asyncio
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CLIENTS = 4
#: Requests per prompt.
GROUP = 8


@contextmanager
def raw_clients(url: str, prompts: Sequence[list[int]], lengths: Sequence[int], concurrency: int) -> Iterator[None]:
    """Start the client processes and terminate them at the end; the server aborts what they leave."""
    context = multiprocessing.get_context("spawn")
    each = concurrency // CLIENTS
    clients = [
        context.Process(target=keep_running, args=(url, prompts, lengths, each, k, CLIENTS), daemon=True)
        for k in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        yield
        if dead := [client.exitcode for client in clients if not client.is_alive()]:
            raise RuntimeError(f"A raw client ended with exit code {dead[0]}; the figure is void.")
    finally:
        for client in clients:
            client.terminate()
            client.join(timeout=30)


def keep_running(
    url: str, prompts: Sequence[list[int]], lengths: Sequence[int], concurrency: int, offset: int, stride: int
) -> None:
    """Keep ``concurrency`` requests running until the process is terminated."""
    import uvloop

    uvloop.run(_keep_running(url, prompts, lengths, concurrency, offset, stride))


async def _keep_running(
    url: str, prompts: Sequence[list[int]], lengths: Sequence[int], concurrency: int, offset: int, stride: int
) -> None:
    import aiohttp

    indices = iter(range(offset, sys.maxsize, stride))
    # Shorter than the server's own 5 s: a connection that the server has just closed cannot carry a POST.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(_one_after_another(session, url, prompts, lengths, indices) for _ in range(concurrency)))


async def _one_after_another(
    session: Any, url: str, prompts: Sequence[list[int]], lengths: Sequence[int], indices: Iterator[int]
) -> None:
    for index in indices:
        group = index // GROUP
        length = lengths[group % len(lengths)]
        body = {
            "input_ids": prompts[group % len(prompts)],
            "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0},
            "return_logprob": True,
        }
        async with session.post(f"{url}/generate", json=body) as response:
            answer = await response.json()
        if response.status != 200 or len(answer["meta_info"]["output_token_logprobs"]) != length:
            raise RuntimeError(f"The engine answered {response.status}: {str(answer)[:500]}")
