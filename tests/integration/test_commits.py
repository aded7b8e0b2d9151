"""What a worker writes reaches the server that its commit reaches, whatever becomes of the one before."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.protocol.waits import Waiting
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.commands import AsyncClient
from penstock.redis.control import AsyncControl
from penstock.redis.server import RedisServer
from penstock.workers.jobs import commits
from penstock.workers.jobs.commits import Commits
from tests.integration import play
from tests.integration.parts import admit, make_config, make_sample


async def test_I4_a_payload_that_a_failover_forgot_is_written_again_before_its_commit(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that takes over knows the lease, and nothing of what was written last."""
    config = make_config(redis_server.url, keys.run, tmp_path)
    send, tried = commits._call_all, 0

    async def fail_over(server: AsyncClient, calls: Sequence[Any]) -> list[Any]:
        nonlocal tried
        tried += 1
        if tried == 1:
            assert client.delete(*client.scan_iter(match=keys.of("payload:*").replace("{", "[{]"), count=1000)) == 1
            raise redis.ConnectionError("the primary is gone")
        return await send(server, calls)

    monkeypatch.setattr(commits, "_call_all", fail_over)
    admit(client, keys, 1)
    (held,) = play.lease(client, keys)
    control = await AsyncControl(redis_server.url).open()
    made = Commits(config, keys, control, Waiting(), "w1")
    job = Job.from_bytes(held.body)
    samples = [make_sample(job, k, [1], 2) for k in range(job.n)]

    assert (await made.submit(held.job, held.token, samples, 1.0, "scaled")).outcome == "ready"

    assert tried == 2
    assert client.exists(keys.payload(f"{held.job}/0", held.token)), "samples of one write lie in one value"
    await made.close()
    await control.close()
