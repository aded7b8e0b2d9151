"""That an abort ends what it names, on one engine or on several behind a router."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.workers.engine import Engine, Segment

PROMPT = [5, 6, 7]


async def assert_an_abort_ends_its_own_request_only(engine: Engine) -> None:
    """One name begins with the other; both are being drawn when the abort is sent, wherever a router has put them."""
    lengths = {"x/0/0/10": 300, "x/0/0/1": 4000}  # the second cannot end while its abort is on the way
    drawing = {name: asyncio.Event() for name in lengths}

    def run(name: str) -> Coroutine[Any, Any, Segment]:
        sampling = {"max_new_tokens": lengths[name], "ignore_eos": True, "temperature": 1.0}
        return engine.generate(PROMPT, sampling, rid=name, on_tokens=lambda *_: drawing[name].set())

    running = {}
    for name in lengths:
        running[name] = asyncio.create_task(run(name))
        await drawing[name].wait()
    await engine.abort("x/0/0/1")
    ended = await running["x/0/0/1"]
    assert ended.finish_reason == "abort"
    assert 0 < len(ended.output_ids) == len(ended.logprobs) < 4000
    assert (await running["x/0/0/10"]).finish_reason == "length"
