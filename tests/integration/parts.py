"""The real buffer and trainer, and a worker played by verbs that writes real payloads."""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard, TypeVar
from urllib.request import urlopen

import redis
import torch

from penstock import payloads
from penstock.buffer.main import Buffer
from penstock.config import Config
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.session import Session
from penstock.consumers.trainer import Trainer
from penstock.metrics.server import targets
from penstock.producer.main import Producer
from penstock.protocol import scripts
from penstock.protocol.scripts import RawLease, run
from penstock.protocol.waits import read_waits
from penstock.records.cause import Cause
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from tests.integration import play

C = TypeVar("C", bound=Cause)


#: Longest wait of a test for what must happen.
PATIENCE_S = 400.0


def make_config(url: str, run: str, folder: Path, **sections: dict[str, Any]) -> Config:
    """A run of small batches: bound 1, async, groups of 2 samples; ``sections`` override."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    values: dict[str, Any] = {
        "run": run,
        "directory": folder / "runs",
        "redis": {"url": url},
        "model": {"path": str(model)},
        "data": {"train": [{"name": "d", "path": str(folder / "train.jsonl"), "shuffle": False}]},
        "rollout": {"n": 2},
        "staleness": {"mode": "async", "bound": 1},
        "trainer": {"batch_groups": 2, "keep_versions": 2},
        "buffer": {"lease_s": 2.0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(values)


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> Any:
    """Poll until ``condition()`` is true; its value. Fails the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what or condition}"
        time.sleep(0.01)
    return value


class Part(Protocol):
    """A process's object: ``run`` blocks until ``stop``."""

    def run(self) -> object: ...

    def stop(self) -> None: ...


@contextlib.contextmanager
def running(part: Part) -> Iterator[None]:
    """Run a part in a thread; what kills it fails the test."""
    died: list[BaseException] = []

    def body() -> None:
        try:
            part.run()
        except BaseException as exc:
            died.append(exc)

    thread = threading.Thread(target=body, name=type(part).__name__, daemon=True)
    thread.start()
    try:
        yield
    finally:
        part.stop()
        thread.join(PATIENCE_S)
        if died:
            raise died[0]
    assert not thread.is_alive(), f"{type(part).__name__} did not stop"


class _Beside:
    """``work`` as a part."""

    def __init__(self, work: Callable[[threading.Event], None]) -> None:
        self._work, self._ended = work, threading.Event()

    def run(self) -> None:
        self._work(self._ended)

    def stop(self) -> None:
        self._ended.set()


def beside(work: Callable[[threading.Event], None]) -> contextlib.AbstractContextManager[None]:
    """Run ``work`` in a thread until the event that it is given; what kills it fails the test."""
    return running(_Beside(work))


@contextlib.contextmanager
def buffering(config: Config) -> Iterator[Buffer]:
    """The real buffer in a thread."""
    buffer = Buffer(config)
    with running(buffer):
        yield buffer


@contextlib.contextmanager
def producing(config: Config, prompts: int = 1000) -> Iterator[Producer]:
    """The real producer in a thread; its file of prompts is made when it is not there."""
    path = Path(config.data.train[0].path)
    if not path.exists():
        path.write_text("".join(f'{{"prompt": "p{i}", "label": "x"}}\n' for i in range(prompts)))
    producer = Producer(config)
    with running(producer):
        yield producer


def kill(trainer: Trainer, client: redis.Redis, *, owner: bool = True) -> None:
    """As kill -9 leaves a trainer: it says nothing any more, nothing is given back; then its lease runs out.

    ``owner``: it is the process that owns the subscription.
    """
    trainer.session.subscriber.ownership.stop()
    trainer.stream.drop()
    if owner:
        silence(trainer.session, client)


def silence(session: Session, client: redis.Redis) -> None:
    """The owner of a subscription renews its lease no more, and the lease runs out."""
    subscriber = session.subscriber
    subscriber.ownership.stop()
    client.pexpire(subscriber.keys.owner(subscriber.name), 1)
    until(lambda: not client.exists(subscriber.keys.owner(subscriber.name)))


def publish(trainer: Trainer | Requests, step: int = 0) -> int:
    return trainer.publish({"weight": torch.full((1,), float(step))}, step=step)


def step(trainer: Trainer, timeout: float = PATIENCE_S) -> Any:
    """Next batch, trained in thought, committed and published."""
    batch = trainer.next(timeout=timeout)
    trainer.commit(batch)
    publish(trainer, batch.n)
    return batch


def admit(client: redis.Redis, keys: Keys, count: int, *, n: int = 2, cohorts: bool = False, first: int = -1) -> None:
    """Admit the next ``count`` jobs of dataset d past the gate."""
    at = int(client.hget(keys.source, "train") or 0) if first < 0 else first
    pairs = [(one, one.to_bytes()) for one in (play.job(at + i, n) for i in range(count))]
    call = scripts.admit(
        keys, pairs, lane="train", source="train", position=at, model=play.MODEL, gate=None, cohorts=cohorts
    )
    assert run(client, call).admitted == count


class Player:
    """A worker: leases by verbs, answers with real payloads, commits."""

    def __init__(self, client: redis.Redis, keys: Keys, name: str = "w1") -> None:
        self.client, self.keys, self.name = client, keys, name

    def lease(self, most: int = 1, *, version: int) -> list[RawLease]:
        return play.lease(self.client, self.keys, self.name, most, version)

    def answer(
        self,
        held: RawLease,
        versions: Sequence[int],
        *,
        ks: Sequence[int] | None = None,
        length: int = 2,
        with_reward: bool = False,
        **drawn: Any,
    ) -> scripts.Committed:
        """Commit samples ``ks`` (all by default): ``length`` tokens under each of ``versions``.

        ``with_reward``: a reward of the whole group is to come.
        ``drawn``: ``temperature`` and ``logprob_kind``, as the engine has them.
        """
        job = Job.from_bytes(held.body)
        ks = range(job.n) if ks is None else ks
        samples = [make_sample(job, k, versions, length) for k in ks]
        return self.commit(held, samples, min(versions), with_reward=with_reward, **drawn)

    def commit(
        self,
        held: RawLease,
        samples: Sequence[Sample],
        version: int,
        *,
        stored: bool = True,
        with_reward: bool = False,
        **drawn: Any,
    ) -> scripts.Committed:
        """Commit samples as they are. ``stored`` False: the payload server has lost them."""
        records = []
        for sample in samples:
            data, (meta,) = payloads.pack([sample], token=held.token, server="control", **drawn)
            if stored:
                self.client.set(self.keys.payload(sample.id, held.token), data, nx=True, ex=600)
            records.append((sample.k, version, meta.to_bytes()))
        return run(self.client, scripts.commit(self.keys, held.job, held.token, records, with_reward=with_reward))

    @property
    def clock(self) -> int:
        return int(self.client.hget(self.keys.clock, scripts.version_field(play.MODEL)) or 0)

    def work(self, count: int, version: int) -> list[str]:
        """Lease and answer ``count`` jobs under one version."""
        held = self.lease(count, version=version)
        assert len(held) == count, f"{len(held)} of {count} jobs may be started under version {version}"
        for one in held:
            assert self.answer(one, [version]).outcome == "ready"
        return [one.job for one in held]


def make_sample(job: Job, k: int, versions: Sequence[int], length: int) -> Sample:
    sample = Sample(job, k)
    sample.append([1, 2, 3])
    sample.prompt_length = 3
    for version in versions:
        sample.append([5 + k] * length, version=version, logprobs=[-0.5] * length)
    sample.status, sample.finish_reason, sample.reward = "completed", "stop", float(k % 2)
    return sample


def jobs_of(batch: Any) -> list[str]:
    """Jobs of a batch in the order of its rows, each once."""
    return list(dict.fromkeys(row.job for row in batch.all_rows))


def waits(client: redis.Redis, keys: Keys) -> dict[str, Cause]:
    return {wait.who: wait.cause for wait in read_waits(client, keys)}


def matches(cause: Cause | None, kind: type[C], **fields: Any) -> TypeGuard[C]:
    """Whether a cause is of a kind with these fields; ``error`` is a part of the quoted error."""
    return isinstance(cause, kind) and all(
        value in getattr(cause, name) if name == "error" else getattr(cause, name) == value
        for name, value in fields.items()
    )


def until_waits(client: redis.Redis, keys: Keys, who: str, kind: type[C], **fields: Any) -> C:
    """Wait until ``who`` reports that it waits for such a cause (I8)."""

    def look() -> C | None:
        cause = waits(client, keys).get(who)
        return cause if matches(cause, kind, **fields) else None

    found: C = until(look, f"{who}: {kind.name} {fields}")
    return found


def wait_record(cause: Cause, since: float, at: float) -> bytes:
    """A wait as a part writes it into the hash ``waits``."""
    return pack({"cause": cause.name, "fields": cause.fields(), "since": since, "at": at})


def new_run(client: redis.Redis) -> Keys:
    keys = Keys("t" + uuid.uuid4().hex[:12])
    scripts.ensure_lanes(client, keys)
    return keys


def served(client: redis.Redis, keys: Keys, part: str) -> set[str]:
    """Lines of the metrics of one part; none before it shows where they are."""
    found = [group["targets"][0] for group in targets(client, keys) if group["labels"]["part"] == part]
    if not found:
        return set()
    with urlopen(f"http://{found[0]}/metrics", timeout=60) as answer:
        return set(answer.read().decode().splitlines())
