"""Run work in threads that outlive the task awaiting them."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run as ``asyncio.to_thread``, but raise a cancellation only when the work has ended, so that locks stay held."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        working.exception()  # nobody asks for it
        raise cancelled
    return working.result()
