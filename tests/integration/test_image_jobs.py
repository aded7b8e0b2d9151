"""Jobs with images at a worker: hostile ones fail by name and alone."""

import io
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.codec import pack, unpack
from penstock.records.job import Job
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.worker_play import admit, all_in, letters, metas, publish, tended, until, working
from tests.tiny_model import publication_of
from tests.tiny_vision import asked, make_tiny_vision, png

Make = Callable[..., Config]
TEXT = asked("a", "b=")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that sees images."""
    return make_tiny_vision(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def seeing(client: redis.Redis, keys: Keys, config: Make, model: Path) -> Make:
    """Makes configurations of workers with it; version 2 is published."""
    publish(client, keys, publication_of(model, 2))
    return lambda **sections: config(model=ModelConfig(path=str(model), dtype="float32"), **sections)


def job(index: int, *images: Any, text: str = TEXT, n: int = 2) -> Job:
    return Job(f"d/0/{index}", n, prompt=text, label="x", images=list(images))


def forged(width: int, height: int) -> bytes:
    """The head of a PNG of that size, and no pixel."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


def black(side: int) -> bytes:
    """A PNG of few bytes and ``side`` x ``side`` pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def scanned(times: int) -> bytes:
    """A JPEG that asks for its last scan ``times`` times."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * times + b"\xff\xd9"


#: What a job may bring, and words of its end.
HOSTILE: dict[str, tuple[Callable[[], Job], str]] = {
    "cut off": (lambda: job(0, png(1)[:400]), "image 1 is damaged"),
    "cut off in its head": (lambda: job(0, png(1)[:20]), "image 1 cannot be read as PNG, JPEG, WEBP"),
    "no image": (lambda: job(0, b"#!/bin/sh"), "image 1 cannot be read as PNG, JPEG, WEBP"),
    "another format": (lambda: job(0, b"GIF89a" + bytes(40)), "image 1 cannot be read as PNG, JPEG, WEBP"),
    "empty": (lambda: job(0, b""), "image 1 cannot be read as PNG, JPEG, WEBP"),
    "a bomb": (lambda: job(0, black(5000)), "of 5000 x 5000 pixels, more than"),
    "a bomb that the library refuses": (lambda: job(0, forged(60_000, 60_000)), "cannot be read as|x 60000 pixels"),
    "a dimension beyond all": (lambda: job(0, forged(2**31 - 1, 2**31 - 1)), "cannot be read as|pixels, more than"),
    "together too many pixels": (
        lambda: job(0, *[black(4096)] * 3, text=asked(*"abcd")),
        "pixels of images, more than",
    ),
    "one that never ends": (lambda: job(0, scanned(50_000)), "is a JPEG of 50,0.. scans, more than 100"),
    "too many bytes": (lambda: job(0, png(1) + bytes(3 * 1024 * 1024)), "bytes, more than"),
    "a line": (lambda: job(0, black_line()), "the image processor refuses its images"),
    "too many": (lambda: job(0, *[b"x"] * 10_000), "has 10000 images, more than the 16"),
    "a place too many": (lambda: job(0, png(1), text=asked(*"abc")), "has 2 places for 1 images"),
    "a place too few": (lambda: job(0, png(1), png(2)), "has 1 places for 2 images"),
    "a place without an image": (lambda: job(0), "has 1 places for 0 images"),
    "the place of a video": (lambda: job(0, text="a<|video_pad|>b="), "has a video placeholder, and there is no video"),
    "no end": (lambda: replace(job(0, png(1)), sampling={"ignore_eos": True}), "leave ignore_eos out"),
    "no place": (lambda: job(0, png(1), text="a="), "has 0 places for 1 images"),
}
#: What no record of ours holds where images are.
NAMED = {
    "a path": "/etc/passwd",
    "a URL": "http://127.0.0.1:1/1.png",
    "a data: URI": "data:image/png;base64,@@@",
    "a map": {"bytes": b"x"},
    "nothing": None,
}


def black_line() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (1, 1000)).save(file, "PNG")
    return file.getvalue()


async def ends(client: redis.Redis, keys: Keys, seeing: Make, bad: list[str]) -> dict[str, dict[str, str]]:
    """Have a worker meet ``bad`` jobs, and a good one behind them; the dead letters."""
    good = admit(client, keys, [job(1000, png(1))])
    async with working(seeing()), tended(client, keys):
        await until(all_in(client, keys, bad, "dead"))
        await until(all_in(client, keys, good, "ready"))
    assert len(metas(client, keys, good[0])) == 2
    return letters(client, keys)


async def test_a_hostile_image_is_a_named_failure_of_its_job_alone(
    client: redis.Redis, keys: Keys, seeing: Make
) -> None:
    jobs = {name: replace(make(), id=f"d/0/{i}") for i, (name, (make, _)) in enumerate(HOSTILE.items())}
    admit(client, keys, list(jobs.values()))
    found = await ends(client, keys, seeing, [one.id for one in jobs.values()])
    said = {name: found[one.id] for name, one in jobs.items()}
    assert {(letter["reason"], letter["attempts"]) for letter in said.values()} == {("refused", "1")}
    assert not {name: letter for name, letter in said.items() if not re.search(HOSTILE[name][1], letter["detail"])}
    assert max(len(letter["detail"]) for letter in said.values()) < 1000
    play.assert_conserved(client, keys)


async def test_a_record_that_names_an_image_is_refused_and_nothing_is_opened(
    client: redis.Redis, keys: Keys, seeing: Make
) -> None:
    bodies = []
    for i, named in enumerate(NAMED.values()):
        record = unpack(job(i, png(1)).to_bytes(), "a job")
        at = next(key for key, value in record.items() if value == [png(1)])
        bodies.append((job(i), pack(record | {at: [named]})))
    call = scripts.admit(keys, bodies, lane="train", source="train", position=0, model=play.MODEL, gate=None)
    assert run(client, call).admitted == len(bodies)
    found = await ends(client, keys, seeing, [one.id for one, _ in bodies])
    assert {letter["reason"] for letter in found.values()} == {"refused"}
    assert all("images" in letter["detail"] for letter in found.values()), found
