"""Workers of machines that see neither the trainer's folder nor its store: real processes, killed in the middle."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config import Config, ModelConfig
from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.workers.weights.file_hashes import prove
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import until
from tests.integration.saved import saved
from tests.integration.storage_parts import PartProcess, Parts, parts
from tests.integration.storage_rig import Rig, fake_in_a_thread, rig, server

__all__ = ["parts", "server"]

#: So slow that a version of the tiny model takes two seconds.
BYTES_PER_S = 150_000


class TrainerProcess:
    """Publishes as often as it is told, and can be killed at that."""

    def __init__(self, config: Config, weights: Path, folder: Path) -> None:
        self._path, self._weights, self._log = saved(config, folder / "trainer.yaml"), weights, folder / "trainer.log"
        self.start()

    def start(self) -> None:
        state = self._path.with_suffix(".json")
        command = [sys.executable, "-m", "tests.integration.delta_trainer", self._path, self._weights, state]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def publish(self) -> int:
        """The version, once it is announced: behind a batch that is trained, but for the first of a process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()[-3000:]
        return int(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Machine:
    """A worker with an engine, on a machine of its own."""

    def __init__(self, config: Config, fake: FakeEngine, run_: Rig, folder: Path) -> None:
        folder.mkdir()
        self.fake, self._run = fake, run_
        self.copies = folder / "copies"
        self.bad: list[str] = []
        fake.read = self._read
        values = config.model_dump(mode="json", exclude_defaults=True)
        values["engine"]["url"] = fake.url
        values["worker"]["copies_dir"] = str(self.copies)
        values["trainer"]["delta_store"] = "/not/on/this/machine"
        self.worker = PartProcess("worker", Config.model_validate(values), folder)

    def _read(self, path: str) -> str:
        """What an engine is given is a whole version that was announced, in this machine's copies."""
        version, _, digest = Path(path).name.removeprefix("v").partition("-")
        announced = [Publication.from_bytes(fields[b"p"]) for _, fields in self._stream()]
        if Path(path).parent != self.copies or (int(version), digest) not in [(p.version, p.index) for p in announced]:
            self.bad.append(f"{path} is nothing that was announced")
        try:
            prove(Path(path), digest)
        except PublishError as exc:
            self.bad.append(str(exc))
        return ""

    def _stream(self) -> Any:
        return self._run.client.xrange(self._run.keys.weights("policy"))

    def until_has(self, version: int) -> None:
        until(lambda: self._has(version), f"the engine to have {version}", 120)
        assert not self.bad

    def caught_fetching(self, trainer: TrainerProcess) -> int:
        """A version whose delta is being fetched: some ranges are here, others are not. As many are published as it
        takes to see one so."""
        while True:
            version = trainer.publish()
            until(lambda: self._is_fetching() or self._has(version), f"{version} to be fetched", 120)  # noqa: B023
            if self._is_fetching():
                return version

    def _has(self, version: int) -> bool:
        return self.fake.version == str(version)

    def _is_fetching(self) -> bool:
        on_its_way = [path.name.removeprefix(".fetching-") for path in self.copies.glob(".fetched/.fetching-d*")]
        return any(self._is_told(name) for name in on_its_way)

    def until_offers(self, version: int) -> None:
        until(lambda: self._is_told(f"v{version:08d}-*"), f"{version} to be served by a worker", 120)

    def _is_told(self, name: str) -> bool:
        """Whether a worker says that it has ranges of an object."""
        client = self._run.client
        found = client.scan_iter(self._run.keys.of(f"relay_have:policy:{name}:*"))
        return any(any(client.get(key) or b"") for key in found)

    @property
    def text(self) -> str:
        return self.worker.log.read_text()

    def came(self) -> tuple[int, int]:
        """Bytes from trainers and from other workers."""
        found = re.findall(r"fetched in .*: ([\d,]+) bytes from the trainer, ([\d,]+) from other workers", self.text)
        trainer, peers = (sum(int(one[at].replace(",", "")) for one in found) for at in (0, 1))
        return trainer, peers


@contextmanager
def machine(config: Config, fake: FakeEngine, run_: Rig, folder: Path) -> Iterator[Machine]:
    made = Machine(config, fake, run_, folder)
    try:
        yield made
    finally:
        made.worker.kill()


def test_I9_engines_of_other_machines_load_deltas_that_came_over_http_through_kills_of_worker_and_trainer(
    server: RedisServer, parts: Parts, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "staleness": {"mode": "async", "bound": 10},
        "trainer": {"transport": "delta", "delta_store": str(tmp_path / "store"), "serve_bytes_per_s": BYTES_PER_S},
        "serving": {"enabled": True, "range_bytes": 64 * 1024},
    }
    weights = Path(publications[1].path) / "model.safetensors"
    with (
        rig(server, parts, model_config, publications[1], tmp_path, **sections) as run_,
        fake_in_a_thread() as other_fake,
        machine(run_.config, run_.fake, run_, tmp_path / "first") as first,
    ):
        for name in ("buffer", "producer"):
            parts.start(name, run_.config)
        trainer = TrainerProcess(run_.config, weights, tmp_path)
        try:
            first.until_has(trainer.publish())
            first.until_has(trainer.publish())
            assert first.text.count("is_whole=True") == 1
            version = first.caught_fetching(trainer)
            first.worker.restart()
            first.until_has(version)
            assert first.text.count("is_whole=True") == 1, "who comes back is led on from its copy"

            first.caught_fetching(trainer)
            trainer.kill()
            trainer.start()
            first.until_has(trainer.publish())
            first.until_has(trainer.publish())

            first.until_offers(int(first.fake.version))
            with machine(run_.config, other_fake, run_, tmp_path / "late") as late:
                late.until_has(int(first.fake.version))
                version = trainer.publish()
                late.until_has(version)
                first.until_has(version)
                assert late.came()[1] > 0, "it takes from the other worker what that has"
                assert not late.bad
            assert not first.bad
            parts.assert_alive()
            assert first.worker.lives
            assert "is loaded from" not in first.text + late.text
            assert not run_.client.hlen(run_.keys.dead), "no job is charged"
        finally:
            trainer.kill()
