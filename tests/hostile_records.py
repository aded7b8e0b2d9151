"""Feeds every decoder of records mutants and bombs within 2 GiB; run as a process of its own by the test of it.

Prints how many were refused; whatever is neither read nor refused by an error of penstock's own ends it.
"""

import json
import random
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.errors import PenstockError
from penstock.protocol.memory_control import MemoryWish
from penstock.protocol.presence import EnginePresence, WorkerPresence
from penstock.protocol.scripts import whole_of
from penstock.protocol.transfers import Decision, Enrollment
from penstock.records.codec import pack, unpack
from penstock.records.job import Job
from penstock.records.manifest import Manifest, Row
from penstock.records.publication import Offer, Publication, Whole
from penstock.records.sample import Sample
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.weights.index import WeightsIndex
from penstock.workers.jobs.prefixes import growth_to_bytes, partial_from_bytes, partial_to_bytes
from penstock.workers.rewards.wire import Verdict, sample_from_json, sample_to_json
from tests.integration.play import meta

Decode = Callable[[bytes], object]
JOB = Job("d/0/1", 2, prompt="p", prompt_ids=[1, 2], label="x", metadata={"a": [1, {"b": 2.5}]}, answers=["a", [1]])
WORST: list[Any] = [2**40, -1, -(2**63), 2**64 - 1, 1e308, float("nan"), "", "x" * 70_000, [], {}, None, True, b"x",
                    [2**40], {"x": [[]]}, [[2**40, -(2**40)]]]  # fmt: skip


def sample() -> Sample:
    made = Sample(JOB, 0, text="ab", turns=["ab"])
    made.append([1, 2])
    made.append([3, 4], version=5, logprobs=[-0.1, -0.2])
    made.prompt_length = 2
    return made


def manifest() -> Manifest:
    rows = [Row("d/0/1", k, "t", "control", 1, 2, 4, 2, 2, 2, 5, 5, 5, 1.0, "completed") for k in range(3)]
    return Manifest(
        sub="a", n=1, train_version=1, bound=1, on_expiry="mask", mode="async", mask_below=-1, rows=rows,
        num_loss_tokens=6, num_samples=3, num_groups=1, num_first_use=1, staleness_max=0, staleness_mean=0.0,
    )  # fmt: skip


def decoders() -> dict[str, tuple[bytes, Decode]]:
    whole = sample()
    whole.append([8])
    whole.append([9], version=5, logprobs=[-0.1])
    whole.parts = [4]
    parted = replace(meta(0, "t"), length=6, parts=[[3, 1, 1, 0, 0, [[0, 1]]], [3, 2, 1, 0, 0, [[0, 1]]]])
    prefix = partial_to_bytes(whole)
    whole.append([7], version=6, logprobs=[-0.3])
    publication = Publication("policy", 3, "disk", "/w", abandoned=[[1, 2]], index="a" * 32)
    offer = Offer("http://h:1", 3, "a" * 32)
    metas = b"".join(meta(k, "token", 3).to_bytes() for k in range(3))
    worker = WorkerPresence(name="w.1", at=1.0, engines=[EnginePresence(url="http://h:1")])
    found: dict[str, tuple[bytes, Decode]] = {
        "presence": (pack(worker.to_record()), lambda data: WorkerPresence.from_record(unpack(data, "presence"))),
        "job": (JOB.to_bytes(), lambda data: range(Job.from_bytes(data, "job").n).index(0)),
        "meta": (meta(0, "t").to_bytes(), lambda data: SampleMeta.from_bytes(data, "meta").num_loss),
        "parted": (
            parted.to_bytes(),
            lambda data: [one.num_loss for one in SampleMeta.from_bytes(data, "x").all_parts],
        ),
        "metas": (metas, lambda data: [one.num_loss for one in iter_metas(data, "metas")]),
        "manifest": (manifest().to_bytes(), lambda data: Manifest.from_bytes(data, "manifest")),
        "publication": (publication.to_bytes(), lambda data: Publication.from_bytes(data, "publication")),
        "whole": (Whole(3, "/w", "a" * 32, 9, 0.5).to_bytes(), lambda data: whole_of(data, 3, "policy")),
        "offer": (offer.to_bytes(), lambda data: Offer.from_bytes(data, "offer").url),
        "partial": (prefix, lambda data: partial_from_bytes(data, JOB, 0)),
        "grown": (prefix + growth_to_bytes(whole, 6, len(whole.turns)), lambda data: partial_from_bytes(data, JOB, 0)),
        "verdict": (Verdict(1.0, {"a": [1]}).to_json().encode(), Verdict.from_json),
        "check": (sample_to_json(sample(), 10**6).encode(), lambda data: sample_from_json(data.decode("latin-1"))),
    }
    for cls in (MemoryWish, Enrollment, Decision, WeightsIndex):
        found[cls.__name__] = (pack({"version": 1}), cls.from_bytes)
    return found


def mutants(good: bytes, draw: random.Random, count: int) -> list[bytes]:
    """Flips, cuts, insertions of headers that claim much, and whole fields at their worst."""
    heads = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff",
             b"\xdd\x00\x3f\xff\xff", b"\x91" * 2000, b"[" * 100_000, b"9" * 5000]  # fmt: skip
    found = []
    for _ in range(count):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data) or 1)
            what = draw.randrange(4)
            if what == 0 and data:
                data[at] = draw.randrange(256)
            elif what == 1:
                del data[at : at + draw.randint(1, 8)]
            elif what == 2:
                data[at:at] = draw.choice(heads)
            else:
                data = data[:at]
        found.append(bytes(data))
    return found


def worst(good: bytes) -> list[bytes]:
    """Each field in turn is something else."""
    packed = good[:1] not in (b"{", b"[")
    try:
        value = unpack(good, "good") if packed else json.loads(good)
    except PenstockError:
        return []
    names = value.keys() if isinstance(value, dict) else range(len(value))
    found = []
    for name in list(names):
        for bad in WORST:
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[name] = bad
            try:
                found.append(pack(copy) if packed else json.dumps(copy).encode())
            except TypeError:
                continue
    return found


def bombs() -> list[bytes]:
    nested = b"\xdd\x00\x3f\xff\xff" * 1000
    return [nested, nested + bytes(4_000_000), b"\xdd\x00\x3f\xff\xff" + b"\x90" * 100, b"\x91" * 5_000_000]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 * 1024**3, 2 * 1024**3))
    draw, refused, read = random.Random(7), 0, 0
    for name, (good, decode) in decoders().items():
        for data in [*mutants(good, draw, int(sys.argv[1])), *worst(good), *bombs()]:
            try:
                decode(data)
                read += 1
            except PenstockError:
                refused += 1
            except BaseException as exc:
                print(f"{name}: {exc!r:.300} of {data[:200]!r}")
                raise
    print(f"refused {refused}, read {read}")


if __name__ == "__main__":
    main()
