"""A bound on bytes a second counts what is sent."""

import asyncio

from penstock.weights.http.server import Rate


async def test_who_goes_away_while_it_waits_has_taken_nothing() -> None:
    """Else peers that come and go leave a debt for which everybody waits."""
    rate = Rate(1_000_000)
    waiting = [asyncio.create_task(rate.take(1_000_000)) for _ in range(60)]
    await asyncio.sleep(0)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(rate.take(1), 30)
