"""A worker that does not see the trainer's folder: real processes, killed in the middle of a download."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.errors import PublishError
from penstock.redis.server import RedisServer
from penstock.workers.weights.file_hashes import prove
from tests.integration.parts import until
from tests.integration.storage_parts import PartProcess, Parts, parts
from tests.integration.storage_rig import rig, server
from tests.tiny_model import make_tiny_model, publication_of

__all__ = ["parts", "server"]

#: Bytes of the model's weights, about: Linux sends the first 640 KB of a connection on loopback unpaced.
SIZE = 8_000_000
#: So slow that a version takes four seconds.
BYTES_PER_S = 2_000_000


@pytest.fixture
def unseen(tmp_path: Path) -> Iterator[Path]:
    """A folder by a path that leads there in this process, and nowhere in any other."""
    (tmp_path / "trainer").mkdir()
    handle = os.open(tmp_path / "trainer", os.O_RDONLY | os.O_CLOEXEC)
    yield Path(f"/proc/self/fd/{handle}/weights")
    os.close(handle)


def test_I9_a_worker_that_is_killed_in_a_download_resumes_it_and_follows_a_trainer_that_returns(
    server: RedisServer,
    parts: Parts,
    tmp_path: Path,
    unseen: Path,
) -> None:
    fetched, bad = tmp_path / "fetched", list[str]()
    model = make_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=1024)
    assert (model / "model.safetensors").stat().st_size > SIZE * 0.9

    def read(path: str) -> str:
        """Check that an engine is given complete versions of this machine alone."""
        try:
            prove(Path(path), Path(path).name.rpartition("-")[2])
        except PublishError as exc:
            bad.append(str(exc))
        if Path(path).parent != fetched:
            bad.append(path)
        return ""

    def came() -> int:
        return sum(file.stat().st_size for file in fetched.glob(".making-*/*"))

    with rig(
        server,
        parts,
        ModelConfig(path=str(model), dtype="float32"),
        publication_of(model, 1),
        tmp_path,
        trainer={"weights_dir": str(unseen), "serve_bytes_per_s": BYTES_PER_S},
        serving={"enabled": True, "folder": str(fetched)},
    ) as run_:
        run_.fake.read = read
        for name in ("buffer", "producer"):
            parts.start(name, run_.config)
        (tmp_path / "w").mkdir()
        worker = PartProcess("worker", run_.config, tmp_path / "w")
        try:
            with Trainer(run_.config) as trainer:
                run_.publish(trainer)
                until(lambda: run_.fake.version == "1", "version 1", 120)
                run_.train(trainer)
                until(lambda: came() > SIZE // 4, "a quarter of version 2", 120)
                worker.kill()
                before = came()
                worker.start()
                until(lambda: run_.fake.version == "2", "version 2", 120)
                run_.train(trainer)
                until(lambda: came() > SIZE // 4, "a quarter of version 3", 120)
                state = trainer.state_dict()
            with Trainer(run_.config) as trainer:
                trainer.load_state_dict(state)
                run_.publish(trainer)
                until(lambda: run_.fake.version == "4", "version 4", 120)
        finally:
            worker.kill()
        sizes = re.findall(r"version (\d+) fetched in [\d.]+ s: ([\d,]+) bytes", worker.log.read_text())
        by_version = {int(version): int(size.replace(",", "")) for version, size in sizes}
        assert by_version[1] - by_version[2] == pytest.approx(before, abs=5_000), "what had come is not fetched again"
        assert not bad
        assert not run_.client.hlen(run_.keys.dead), "no job is charged"
