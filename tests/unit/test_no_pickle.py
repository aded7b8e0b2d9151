"""A pickle that makes a folder when it is read is sent over every wire: the folder is never there.

What a verifier finds in its queue is tried with real ones (tests/integration/test_verifiers.py).
"""

import asyncio
import base64
import contextlib
import json
import os
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.config import EngineConfig, ModelConfig
from penstock.consumers.batch import recording
from penstock.consumers.grpo import checkpoint
from penstock.errors import PenstockError
from penstock.payloads import checksum_of, sides
from penstock.payloads.format import MAGIC, decode
from penstock.protocol.engine_http import check_weights
from penstock.protocol.presence import WorkerPresence
from penstock.records.codec import pack
from penstock.system.disk import file_xxh3
from penstock.weights.safetensors_files import read_header
from penstock.workers.jobs.prefixes import partial_from_bytes
from penstock.workers.rewards.pool.worker import _NOTHING, _unpacked
from penstock.workers.rewards.wire import Verdict, sample_from_json
from penstock.workers.sglang.engine import SglangEngine
from tests.hostile_records import decoders
from tests.unit.consumers.batch.test_hostile_recordings import ABOUT, MANIFEST, zipped
from tests.unit.penstock.protocol.test_hostile_hashes import HASHES
from tests.unit.penstock.protocol.test_hostile_redis import VALUES
from tests.unit.penstock.system.test_hostile_files import FILES
from tests.unit.workers.test_hostile_wires import EVENT, JOB, VERDICT, hear, use


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the bomb would make one; never there at the end of a test."""
    made = tmp_path / "made"
    yield made
    assert not made.exists(), "a pickle was read"


@pytest.fixture
def bombs(folder: Path) -> list[bytes]:
    return [pickle.dumps(Bomb(folder), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


def tried(read: Callable[..., object], *given: Any) -> None:
    with contextlib.suppress(PenstockError):
        read(*given)


def worn(good: Any, bomb: bytes) -> Iterator[Any]:
    """A good value with the bomb in the place of each of its own, as bytes and as text."""
    names = list(good) if isinstance(good, dict) else list(range(len(good))) if isinstance(good, list) else []
    for name in names:
        for one in (bomb, base64.b64encode(bomb).decode(), bomb.decode("latin-1")):
            copy = good.copy()
            copy[name] = one
            yield copy


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda data: data.decode("latin-1")).encode()


def test_the_bomb_is_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "made")))

    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("name", VALUES)
def test_no_value_in_redis_is_unpickled(name: str, bombs: list[bytes]) -> None:
    read, good = VALUES[name]
    for bomb in bombs:
        for data in (bomb, pack(bomb), *map(pack, worn(good, bomb))):
            tried(read, data)


@pytest.mark.parametrize("name", HASHES)
def test_no_field_of_a_hash_is_unpickled(name: str, bombs: list[bytes]) -> None:
    read, good = HASHES[name]
    for bomb in bombs:
        for key in good:
            tried(read, good | {key: bomb})
        tried(read, good | {bomb: bomb})


@pytest.mark.parametrize("name", decoders())
def test_no_record_is_unpickled(name: str, bombs: list[bytes]) -> None:
    good, read = decoders()[name]
    for bomb in bombs:
        for data in (bomb, good + bomb, bomb + good):
            tried(read, data)


def test_no_payload_column_or_prefix_is_unpickled(bombs: list[bytes], tmp_path: Path) -> None:
    for bomb in bombs:
        for header in (bomb, pack(bomb)):
            tried(partial_from_bytes, header, JOB, 0)
        for data in (bomb, MAGIC + bomb, sides.MAGIC + bomb):
            tried(decode, data, "d/0/1/0")
            tried(sides.unpack, "x", data, "d/0/1/0", checksum_of(data))
        recorded = {"about": json.dumps(ABOUT).encode(), "manifest": MANIFEST}
        for batch in (bomb, *(zipped(recorded | {name: bomb}) for name in recorded)):
            (tmp_path / "1.bin").write_bytes(batch)
            tried(recording.load, f"{tmp_path}/{{rollout_id}}.bin", 1)
        (tmp_path / "1.bin").write_bytes(zipped(recorded))
        (tmp_path / "1.bin.columns-0").write_bytes(bomb)
        tried(recording.load, f"{tmp_path}/{{rollout_id}}.bin", 1)


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_unpickled(name: str, bombs: list[bytes], tmp_path: Path) -> None:
    read, good = FILES[name]
    for bomb in bombs:
        for data in (bomb, *map(as_json, worn(good, bomb))):
            (tmp_path / name).write_bytes(data)
            tried(read, tmp_path)


def test_no_weights_and_no_checkpoint_are_unpickled(bombs: list[bytes], folder: Path, tmp_path: Path) -> None:
    for bomb in bombs:
        (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(bomb)) + bomb)
        tried(read_header, tmp_path / "w.safetensors")
    for number, content in enumerate((Bomb(folder), {"step": 1, "learner": Bomb(folder), "trainer": {}, "rng": {}})):
        whole = tmp_path / f"{number}"
        whole.mkdir()
        torch.save(content, whole / "new.pt")
        (whole / "new.pt").rename(whole / f"step00000001-{file_xxh3(whole / 'new.pt'):016x}.pt")
        with pytest.raises(PenstockError, match="is damaged"):
            checkpoint.latest(whole)


def test_no_check_and_no_verdict_is_unpickled(bombs: list[bytes]) -> None:
    for bomb in bombs:
        assert _unpacked(zlib.compress(bomb)) == _NOTHING
        assert _unpacked(bomb) == _NOTHING
        for data in (bomb, *map(as_json, worn(VERDICT, bomb))):
            tried(Verdict.from_json, data)
            tried(sample_from_json, data.decode("latin-1"))


def test_no_event_of_an_engine_is_unpickled(bombs: list[bytes]) -> None:
    for bomb in bombs:
        for data in (bomb, *map(as_json, worn(EVENT, bomb))):
            tried(asyncio.run, hear(b"data: " + data + b"\n\n", len(data) // 2))
            tried(use, data)


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/python-pickle", "application/json"])
async def test_no_answer_over_http_is_unpickled(kind: str, bombs: list[bytes], tmp_path: Path) -> None:
    """Of an engine, asked by its worker and by others, and of a router, asked for its members."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=bombs[len(asked) % len(bombs)], content_type=kind)

    asked: list[str] = []
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    url = str(server.make_url("")).rstrip("/")
    engine = SglangEngine(EngineConfig(url=url), ModelConfig(path="."), name="t", log_dir=Path())
    engine.http.open()
    try:
        for _ in bombs:
            asked.append(url)
            with pytest.raises(PenstockError):
                await engine.http.call("POST", "/update_weights_from_disk", {"model_path": "x"})
            with pytest.raises(PenstockError, match="not JSON"):
                await asyncio.to_thread(check_weights, [WorkerPresence(name="w", url=url)], "checksum")
    finally:
        await engine.stop()
        await server.close()


def test_nothing_of_penstock_reads_pickles() -> None:
    """Only weights on their way to engines of this machine are pickled, by torch's own way of sharing memory."""
    root = Path(__file__).parents[2]
    reads = re.compile(r"\b(pickle|cloudpickle|dill|marshal|shelve)\.loads?\(|allow_pickle=True|weights_only=False")
    parts = ("console", "producer", "workers", "buffer", "consumers", "penstock")
    found = [str(path) for part in parts for path in (root / part).rglob("*.py") if reads.search(path.read_text())]

    assert found == []
