"""The plainest client of an SGLang server: POST /generate, as many at once as asked, nothing kept but the counts.

On the event loop that workers have.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import uvloop


def generate_all(
    barrier: Barrier, *, url: str, prompts: Sequence[list[int]], n: int, sampling: dict[str, Any], concurrency: int
) -> dict[str, float]:
    """Draw ``n`` answers to each prompt (token ids), ``concurrency`` at once; seconds and tokens. Blocks."""
    return uvloop.run(_generate_all(barrier, url, prompts, n, sampling, concurrency))


async def _generate_all(
    barrier: Barrier, url: str, prompts: Sequence[list[int]], n: int, sampling: dict[str, Any], concurrency: int
) -> dict[str, float]:
    import aiohttp

    requests = iter([prompt for prompt in prompts for _ in range(n)])
    timeout = aiohttp.ClientTimeout(total=None)
    # Shorter than the server's own 5 s: a connection that it has just closed cannot carry a POST.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        barrier.wait()
        began_s = time.monotonic()
        counts = await asyncio.gather(*(_slot(session, url, requests, sampling) for _ in range(concurrency)))
    return {"seconds": time.monotonic() - began_s, "tokens": sum(counts)}


async def _slot(session: Any, url: str, requests: Iterator[list[int]], sampling: dict[str, Any]) -> int:
    """One request after the other until there are none; tokens drawn."""
    tokens = 0
    for input_ids in requests:
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        async with session.post(f"{url}/generate", json=body) as response:
            answer = await response.json()
        if response.status != 200 or len(answer["meta_info"]["output_token_logprobs"]) != len(answer["output_ids"]):
            raise RuntimeError(f"The engine answered {response.status}: {str(answer)[:500]}")
        tokens += len(answer["output_ids"])
    return tokens
