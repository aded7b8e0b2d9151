"""How often a trainer sends a version that N workers fetch, and seconds to the last of them.

One trainer's server with a bound on its rate (``trainer.serve_bytes_per_s``), N processes that fetch as workers do,
without an engine, each into a folder of its own. Two legs, alternated over several versions of random bytes:

    direct   each worker fetches all of it from the trainer, as with a plain file server
    relay    workers fetch from one another what another one has (docs/consumers.md)

``sent_times``: bytes that the trainer's server sent of a version over its size, the most of all versions by relay.
``seconds_last``: from the publication to the last worker that has it whole, proven and synced, median over the
versions, by relay. All processes share the machine, so each byte that a peer gives costs its processor too.

    python -m benchmarks.relay --json FILE
"""

import asyncio
import shutil
import tempfile
import time
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import Report, execute, median, redis_server, run_together, versions
from penstock.config import Config
from penstock.consumers.weights.http.serving import Serving
from penstock.protocol import scripts
from penstock.protocol.scripts import read_offer
from penstock.records.keys import Keys
from penstock.redis.connect import connect
from penstock.redis.control import AsyncControl
from penstock.system.checksum import file_xxh3
from penstock.weights.http.blobs import object_name
from penstock.weights.http.token import token_of
from penstock.weights.index import INDEX_FILE, digest, index_bytes
from penstock.workers.weights.fetch.download import Downloads
from penstock.workers.weights.fetch.fetcher import Fetcher
from penstock.workers.weights.fetch.partial import Partial

LEGS = ("direct", "relay")
OWNER = "trainer"
TOKEN = "token-of-this-benchmark"
#: Bytes of a file of a version.
FILE_BYTES = 50 * 10**6


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that fetch.")] = 8,
    megabytes: Annotated[int, typer.Option(help="Size of a version, in 10^6 bytes.")] = 200,
    rate: Annotated[int, typer.Option(help="Most that the trainer sends, in 10^6 bytes a second.")] = 50,
    rounds: Annotated[int, typer.Option(help="Versions of each leg.")] = 3,
) -> None:
    """Bytes that a trainer sends, and seconds to the last worker, direct and by relay."""
    found: dict[str, list[dict[str, float]]] = {leg: [] for leg in LEGS}
    with redis_server() as url:
        for number in range(1, rounds + 1):
            for leg in LEGS if number % 2 else reversed(LEGS):
                found[leg].append(one_version(url, leg, number, workers, megabytes * 10**6, rate * 10**6))
                typer.echo(f"version {number} of {rounds}, {leg}: {found[leg][-1]}", err=True)
        seen_versions = versions(connect(url))
    report(found, workers, megabytes, rate, seen_versions).finish(json_file)


def one_version(url: str, leg: str, number: int, workers: int, num_bytes: int, rate: int) -> dict[str, float]:
    """Publish a version in a run of its own to workers that wait for it; what it took. Blocks."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path, index = make_version(Path(folder), number, num_bytes)
        about = {"url": url, "run": f"{leg}{number}", "folder": folder, "version": number, "index": index}
        roles: dict[str, Any] = {f"w{i}": (fetch, {**about, "name": f"w{i}", "leg": leg}) for i in range(workers)}
        roles["trainer"] = (serve, {**about, "path": str(path), "rate": rate, "workers": workers})
        done = run_together(roles)
        size = sum(file.stat().st_size for file in path.iterdir())
    trainer = done.pop("trainer")
    return {
        "seconds_last": max(one["at"] for one in done.values()) - trainer["at"],
        "seconds_first": min(one["at"] for one in done.values()) - trainer["at"],
        "offer_s": trainer["offer_s"],
        "sent_times": trainer["sent_bytes"] / size,
        "peers_share": sum(one["from_peers"] for one in done.values()) / (workers * size),
    }


def make_version(parent: Path, number: int, num_bytes: int) -> tuple[Path, str]:
    """A folder as ``publish`` leaves it, and the digest of its index."""
    folder = parent / f"v{number:08d}"
    folder.mkdir()
    draw = np.random.default_rng(number)
    for part, start in enumerate(range(0, num_bytes, FILE_BYTES), 1):
        data = draw.integers(0, 256, min(FILE_BYTES, num_bytes - start), np.uint8)
        (folder / f"model-{part:05d}.safetensors").write_bytes(data.tobytes())
    files = sorted(folder.iterdir())
    checksums = {file.name: file_xxh3(file) for file in files}
    index = index_bytes([], checksums, {file.name: file.stat().st_size for file in files})
    (folder / INDEX_FILE).write_bytes(index)
    return folder, digest(index)


def config_of(url: str, run: str, folder: Path, rate: int | None = None) -> Config:
    serving = {"enabled": True, "token": TOKEN, "folder": folder, "max_connections": 256, "stall_s": 60}
    return Config.model_validate(
        {
            "run": run,
            "directory": folder,
            "redis": {"url": url},
            "model": {"path": "none"},
            "data": {"train": [{"name": "none", "path": "none.jsonl"}]},
            "trainer": {"serve_bytes_per_s": rate},
            "serving": serving,
        }
    )


def serve(barrier: Barrier, *, path: str, rate: int, workers: int, **about: Any) -> dict[str, float]:
    """The trainer's side: publishes when all are ready, and serves until all have it."""
    keys = Keys(about["run"])
    config = config_of(about["url"], about["run"], Path(about["folder"]), rate)
    client = connect(about["url"])
    scripts.run(client, scripts.subscribe(keys, OWNER, {"lanes": "train", "mode": "async", "bound": 1, "gb": 1}))
    gen = scripts.run(client, scripts.join(keys, OWNER, OWNER, 3_600_000)).gen
    with closing(Serving(config, SimpleNamespace(keys=keys, name=OWNER, owner=OWNER, gen=gen))) as serving:
        barrier.wait()
        at = time.monotonic()
        serving.offer(about["version"], about["index"], Path(path))
        relay = keys.relay(f"{config.model.name}:{object_name(about['version'], about['index'])}")
        offer_s = 0.0
        while int(client.get(keys.of("bench_done")) or 0) < workers:
            if not offer_s and client.exists(relay):
                offer_s = time.monotonic() - at
            time.sleep(0.005)
        return {"at": at, "offer_s": offer_s, "sent_bytes": serving.server.sent_bytes}


def fetch(barrier: Barrier, *, leg: str, name: str, **about: Any) -> dict[str, float]:
    """A worker's side; when it had the version, by the clock of all processes."""
    keys, folder = Keys(about["run"]), Path(about["folder"], name)
    folder.mkdir()
    config = config_of(about["url"], about["run"], folder)
    client = connect(about["url"])
    with closing(Fetcher(config, keys, name)) as fetcher:
        barrier.wait()
        if leg == "relay":
            asyncio.run(fetcher.fetch(about["version"], about["index"]))
        else:
            asyncio.run(fetch_directly(config, keys, folder, about["version"], about["index"]))
        at = time.monotonic()
        client.eval("return redis.call('INCR', KEYS[1])", 1, keys.of("bench_done"))
        # Those that have it serve the others.
        while int(client.get(keys.of("bench_done")) or 0) < barrier.parties - 1:
            time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)
        return {"at": at, "from_trainer": fetcher.from_trainer, "from_peers": fetcher.from_peers}


async def fetch_directly(config: Config, keys: Keys, folder: Path, version: int, index: str) -> None:
    """All ranges from the trainer, as many at once as the relay asks peers for; proven and synced in the same way."""
    name = object_name(version, index)
    control, downloads = AsyncControl(config.redis.url or ""), Downloads(config.serving, token_of(config))
    thing = f"{config.model.name}:{name}"
    # Another process makes it.
    while (offer := await control.do(lambda client: read_offer(client, keys, thing))) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    partial = Partial(folder / f"fetching-{name}", offer)
    left = iter(partial.missing)

    async def some() -> None:
        for number in left:
            wanted = partial.ranges[number]
            with partial.writing(wanted) as write:
                await downloads.fetch(offer.url, name, wanted, write)
            partial.is_here(number)

    await asyncio.gather(*(some() for _ in range(config.serving.fetches)))
    partial.finish(folder / name, index)
    await downloads.close()
    await control.close()


def report(
    found: dict[str, list[dict[str, float]]], workers: int, megabytes: int, rate: int, seen_versions: dict[str, str]
) -> Report:
    """Medians of each leg, and the most that a version was sent."""
    rows = [
        {
            "leg": leg,
            "sent_times": max(one["sent_times"] for one in legs),
            **{name: median([one[name] for one in legs]) for name in ("seconds_last", "seconds_first", "offer_s")},
            "peers_share": median([one["peers_share"] for one in legs]),
            "versions": legs,
        }
        for leg, legs in found.items()
    ]
    relay, direct = rows[LEGS.index("relay")], rows[LEGS.index("direct")]
    return Report(
        title=f"relay: {workers} workers fetch versions of {megabytes} MB from a trainer that sends {rate} MB/s",
        columns={
            "leg": "leg",
            "sent_times": "sent by the trainer, times",
            "seconds_last": "last worker s",
            "seconds_first": "first worker s",
            "offer_s": "offered s",
            "peers_share": "by peers",
        },
        rows=rows,
        keys={
            "sent_times": relay["sent_times"],
            "seconds_last": relay["seconds_last"],
            "seconds_last_direct": direct["seconds_last"],
            "seconds_once": megabytes / rate,
        },
        versions=seen_versions,
        notes=["seconds_once: what the trainer's rate takes for one copy. All processes share one machine."],
    )


if __name__ == "__main__":
    execute(main)
