"""A trainer that offers its store of deltas, and workers that do not see it; ``python -m`` it is one such worker."""

import asyncio
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.config import Config
from penstock.consumers.weights.http.serving import Serving
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.weights.deltas.objects import listed
from penstock.workers.services import Tally
from penstock.workers.weights.copies import Copies
from penstock.workers.weights.fetch.fetcher import Fetcher
from tests.integration import fetch_parts
from tests.unit.consumers.weights.test_deltas import Line
from tests.unit.penstock.weights.deltas.version_folders import a_model

PATIENCE_S = 120.0
NOWHERE = "/not/on/this/machine"


def config_of(
    redis_url: str, keys: Keys, folder: Path, store: Path | str, *, copies_bytes: int = 2**30, **trainer: Any
) -> Config:
    """Of a part whose machine has ``folder``."""
    return fetch_parts.config_of(
        redis_url,
        keys,
        folder,
        trainer={"transport": "delta", "delta_store": str(store), **trainer},
        worker={"copies_dir": str(folder / "copies"), "copies_bytes": copies_bytes},
    )


class Machine:
    """A worker's way to weights, on a machine of its own."""

    def __init__(self, config: Config, keys: Keys, name: str) -> None:
        waiting: Any = SimpleNamespace(blocked_on=lambda cause: None, end=lambda: None)
        self.folder = config.copies_dir
        self.fetcher = Fetcher(config, keys, name)
        self.copies = Copies(config, waiting, Tally(), self.fetcher)

    async def get(self, version: int, index: str) -> Path:
        publication = Publication("policy", version, "delta", NOWHERE, index=index)
        return Path((await asyncio.wait_for(self.copies.of(publication), PATIENCE_S)).path)

    @property
    def num_bytes(self) -> int:
        """Of all files of weights under its folder; one with two names counts once."""
        files = [file.stat() for file in self.folder.rglob("*") if file.is_file() and file.name != ".lock"]
        return sum({one.st_ino: one.st_size for one in files}.values())

    def close(self) -> None:
        self.copies.close()
        self.fetcher.close()


class Net:
    """Versions of a line, their trainer's server, and machines that reach nothing but that."""

    def __init__(self, url: str, keys: Keys, folder: Path, stack: ExitStack, *, size: int = 300) -> None:
        self.url, self.keys, self.folder, self._stack = url, keys, folder, stack
        self.line = Line(folder / "trainer", anchor_every=100)
        self._size = size
        self.line.model = a_model(size=size)
        self.line.in_use = {1}

    def trainer(self, **trainer: Any) -> Serving:
        config = config_of(self.url, self.keys, self.folder / "trainer", self.line.path / "store", **trainer)
        return self._stack.enter_context(closing(Serving(config, fetch_parts.owner_of(self.url, self.keys))))

    def machine(self, name: str, **config: Any) -> Machine:
        made = Machine(config_of(self.url, self.keys, self.folder / name, NOWHERE, **config), self.keys, name)
        return self._stack.enter_context(closing(made))

    def publish(self, version: int, serving: Serving | None = None) -> None:
        """Write a version and have it in the store of deltas; its folder is offered too where ``serving`` is given."""
        self.line.publish(version)
        if serving is not None:
            written = self.line.written[version]
            serving.offer(version, written.index_digest, written.path)

    async def get(self, machine: Machine, version: int) -> Path:
        """The version on a machine, the same byte by byte."""
        path = await machine.get(version, self.index(version))
        assert path.parent == machine.folder
        assert contents(path) == contents(self.line.written[version].path)
        return path

    def change_all(self) -> None:
        """The next version is another model of the same shape: its delta is as large as it."""
        self.line.model = a_model(seed=1, size=self._size)

    def index(self, version: int) -> str:
        return self.line.written[version].index_digest

    def size(self, version: int) -> int:
        """Bytes of its files."""
        return sum(map(len, contents(self.line.written[version].path).values()))

    def delta(self, version: int) -> str:
        """Name of the group that leads to it."""
        names = [name for name in listed(self.line.store) if name.startswith("d") and self.index(version) in name[50:]]
        return names[0].partition("/")[0]

    def delta_size(self, version: int) -> int:
        return (self.line.path / "store" / self.delta(version) / "delta").stat().st_size


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def main() -> None:
    """Get one version: REDIS_URL RUN FOLDER NAME VERSION INDEX."""
    url, run, folder, name, version, index = sys.argv[1:]
    keys = Keys(run)
    with closing(Machine(config_of(url, keys, Path(folder), NOWHERE), keys, name)) as machine:
        asyncio.run(machine.get(int(version), index))


if __name__ == "__main__":
    main()
