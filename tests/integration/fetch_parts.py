"""A trainer that serves versions and workers that fetch them, for tests; ``python -m`` it is one such worker."""

import random
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from penstock.config import Config
from penstock.records.keys import Keys
from penstock.records.publication import Offer, Publication
from penstock.redis.connect import connect
from penstock.system.disk import file_xxh3
from penstock.weights.index import INDEX_FILE, digest, index_bytes
from penstock.workers.weights.download import Download
from tests.integration import play

TOKEN = "t" * 32


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    #: Digest of its index.
    index: str
    folder: Path
    num_bytes: int

    @property
    def publication(self) -> Publication:
        return Publication("policy", self.number, "disk", "/not/on/this/machine", index=self.index)

    def is_at(self, path: Path) -> bool:
        """Whether a folder has the same files, byte by byte."""
        mine = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        return mine == {file.name: file.read_bytes() for file in path.iterdir()}


def make_version(parent: Path, number: int = 1, *, num_bytes: int = 2_000_000) -> Version:
    """A folder as ``publish`` leaves it, of random bytes."""
    folder = parent / f"v{number:08d}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "LICENSE (é, 50%41 #1?).txt").write_text("as a model may have it")
    for part in (1, 2):
        (folder / f"model-0000{part}.safetensors").write_bytes(
            random.Random(number * 10 + part).randbytes(num_bytes // 2)
        )
    files = sorted(folder.iterdir())
    checksums = {file.name: file_xxh3(file) for file in files}
    index = index_bytes([], checksums, {file.name: file.stat().st_size for file in files})
    (folder / INDEX_FILE).write_bytes(index)
    return Version(number, digest(index), folder, sum(file.stat().st_size for file in folder.iterdir()))


@dataclass(slots=True)
class Owner:
    """Of the subscription by which versions are offered."""

    keys: Keys
    gen: int
    name: str = "actor"
    owner: str = "owner-1"


def owner_of(redis_url: str, keys: Keys) -> Owner:
    """Take the subscription, or have it still."""
    with closing(connect(redis_url)) as client:
        play.subscribe(client, keys)
        return Owner(keys, play.join(client, keys).gen)


def forge(client: redis.Redis, keys: Keys, offer: Offer) -> None:
    """Write an offer that no owner made, for so long that it need not be renewed."""
    client.set(keys.offer("policy", offer.version, offer.index), offer.to_bytes(), px=10**6)


def config_of(
    redis_url: str,
    keys: Keys,
    folder: Path,
    *,
    trainer: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    **serving: Any,
) -> Config:
    """Of a part whose machine has ``folder``."""
    base = {"enabled": True, "token": TOKEN}
    if (trainer or {}).get("transport") != "delta":
        base["folder"] = folder / "fetched"
    return Config.model_validate(
        {
            "run": keys.run,
            "directory": folder,
            "redis": {"url": redis_url},
            "model": {"path": "m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "trainer": trainer or {},
            "worker": worker or {},
            "serving": base | serving,
        }
    )


def main() -> None:
    """Fetch one version: REDIS_URL RUN FOLDER VERSION INDEX; prints the number of received bytes."""
    url, run, folder, version, index = sys.argv[1:]
    keys = Keys(run)
    with closing(Download(config_of(url, keys, Path(folder)), keys)) as download:
        path = download.get(Publication("policy", int(version), "disk", "", index=index))
        print(path, download.num_bytes, flush=True)


if __name__ == "__main__":
    main()
