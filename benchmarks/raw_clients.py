"""Closed-loop clients of an SGLang server: processes that keep a fixed number of requests running, and store nothing.

The same event loop (uvloop) and HTTP client as a worker's; connections are kept open between requests. The requests of
a prompt start together, as a rollout's do, and end together, as all have one length, so that the server prefills eight
at once. Clients that start each request alone are no ceiling: each start costs the server a prefill of its own.
"""

import asyncio
import multiprocessing
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
    # All clients take prompts from one sequence. If each took every fourth prompt, one client would have all long
    # answers, and the mix of running lengths would not be that of the workload.
    started = context.Value("q", 0)
    clients = [
        context.Process(
            target=keep_running,
            args=(url, prompts, lengths, len(range(k, concurrency // GROUP, CLIENTS)), started),
            daemon=True,
        )
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


def keep_running(url: str, prompts: Sequence[list[int]], lengths: Sequence[int], groups: int, started: Any) -> None:
    """Keep ``groups`` prompts running until the process is terminated; ``started`` counts those of all clients."""
    import uvloop

    uvloop.run(_keep_running(url, prompts, lengths, groups, started))


async def _keep_running(
    url: str, prompts: Sequence[list[int]], lengths: Sequence[int], groups: int, started: Any
) -> None:
    import aiohttp

    # Shorter than the server's own 5 s: a connection that the server has just closed cannot carry a POST.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(_groups_in_turn(session, url, prompts, lengths, started) for _ in range(groups)))


async def _groups_in_turn(
    session: Any, url: str, prompts: Sequence[list[int]], lengths: Sequence[int], started: Any
) -> None:
    """Send the requests of one group together, and the next group when all of them have ended."""
    while True:
        with started.get_lock():
            group = started.value
            started.value += 1
        ids, length = prompts[group % len(prompts)], lengths[group % len(lengths)]
        await asyncio.gather(*(_generate(session, url, ids, length) for _ in range(GROUP)))


async def _generate(session: Any, url: str, ids: list[int], length: int) -> None:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0},
        "return_logprob": True,
    }
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
    if response.status != 200 or len(answer["meta_info"]["output_token_logprobs"]) != length:
        raise RuntimeError(f"The engine answered {response.status}: {str(answer)[:500]}")
