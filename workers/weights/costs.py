"""Count the costs of weight updates."""

import logging

from penstock.errors import QueueFull
from penstock.protocol.scripts import translate
from penstock.redis.commands import AsyncClient
from penstock.workers.services import Services
from penstock.workers.weights.apply import ApplyReport

log = logging.getLogger(__name__)


async def count_update(services: Services, report: ApplyReport) -> None:
    """Count an update, here and in Redis. Blocks for a round trip."""
    log.info(
        "version %d loaded (%s): paused %.1f ms, %d aborted",
        report.version,
        report.policy,
        report.pause_s * 1000,
        report.num_aborted,
    )
    tally, counters = services.tally, services.keys.counters
    tally.weight_updates += 1
    tally.weight_pause_s += report.pause_s
    tally.weight_load_s += report.load_s
    tally.weight_wait_s += report.wait_s

    async def add(client: AsyncClient) -> None:
        pipe = client.pipeline(transaction=False)
        pipe.hincrby(counters, "weight_updates", 1)
        pipe.hincrby(counters, "weight_pause_us", int(report.pause_s * 1e6))
        try:
            await pipe.execute()
        except Exception as exc:
            raise translate(exc, "count") from exc

    try:
        await services.control.do(add)
    except QueueFull as exc:
        log.warning("an update of weights is not counted: %s", exc)
