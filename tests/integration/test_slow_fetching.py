"""A version that comes slowly comes: how large a range is, is the trainer's affair."""

from pathlib import Path

import pytest

from penstock.workers.weights.fetch import swarm
from tests.integration.fetch_parts import make_version
from tests.integration.test_fetching import Play, fetched, play

__all__ = ["play"]


async def test_a_range_that_takes_longer_than_silence_may_last_is_not_given_up(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "GIVE_UP_S", 3.0)
    version = make_version(tmp_path / "published", num_bytes=7_500_000)
    # Chunks of 256 KiB every quarter of a second, and two ranges of 3.6 s each.
    trainer, worker = play.trainer(16 * 2**20, serve_bytes_per_s=2**20), play.worker("a")
    trainer.offer(1, version.index, version.folder)
    assert version.is_at(await fetched(worker, version))
    assert trainer.server.sent_bytes == version.num_bytes
