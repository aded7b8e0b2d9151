"""What ``Trainer.publish`` does with weights: write and prove them, then hand them to engines that are ready.

    all ranks    gather ───────────────> gather again, if it is sent
    rank 0       write, read back ─> announce ─> open ─> wait for workers ─> decide ─> send ─> done

Every step after the announcement may fail without harm: the folder is there, and who missed the transfer loads it.
"""

import json
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from consumers.weights import ipc, publish
from consumers.weights.checkpoint_engine import ParameterServers, check_installed, gpu_ids
from consumers.weights.collective import SendGroup, TransferFailed, agree_with_engines, flatten
from consumers.weights.publish import Written
from consumers.weights.sources import Source, buckets
from penstock.config import Config
from penstock.errors import PublishError
from penstock.protocol import transfers
from penstock.protocol.keys import Keys
from penstock.protocol.presence import FRESH_S, WorkerPresence, WorkerState, live_workers
from penstock.protocol.records.codec import unpack
from penstock.protocol.records.publication import Publication
from penstock.protocol.transfers import Decision, Enrollment
from penstock.protocol.waits import Waiting
from penstock.redis.control import Control
from penstock.system.disk import until_room
from penstock.system.tokens import new_token

log = logging.getLogger(__name__)

_LOOK_S = 0.003


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a transfer."""

    transport: str
    #: Workers that were sent to.
    workers: tuple[str, ...]
    #: Why it failed; '' where it did not.
    failure: str
    #: Seconds of waiting for workers, and of sending.
    wait_s: float
    send_s: float


class Publisher:
    """The weights' way out of one trainer. All ranks have one; rank 0 leads."""

    def __init__(self, config: Config, keys: Keys, control: Control, waiting: Waiting) -> None:
        self._config = config
        self._keys = keys
        self._control = control
        self._waiting = waiting
        self._model = config.model.name
        self._group: SendGroup | None = None
        #: Workers of the group -> first rank.
        self._ranks: dict[str, int] = {}
        #: Of the last publication.
        self.last: Sent | None = None
        self._servers: ParameterServers | None = None
        if self.transport == "nccl":
            agree_with_engines()
        if self.transport == "checkpoint_engine":
            check_installed()

    @property
    def transport(self) -> str:
        return self._config.trainer.transport

    def close(self) -> None:
        """Leave the process group, end the parameter servers."""
        self._drop_group()
        if self._servers is not None:
            self._servers.close()

    # --- ranks of a sharded source ----------------------------------------------------------------------------------

    def follow(self, source: Source) -> int:
        """Rank other than 0: walk with rank 0 until it says that it is done; returns the version.

        Blocks for rank 0. Raises PublishError with rank 0's reason.
        """
        if not source.is_sharded:
            return 0
        config = publish.read_config(Path(self._config.model.path))
        while True:
            word, value = _broadcast(None)
            if word == "walk":
                for _ in source.tensors(config):
                    pass
            elif word == "done":
                return int(value)
            elif word == "wait":
                continue
            else:
                raise PublishError(f"Rank 0 could not publish: {value}")

    def tell(self, source: Source, word: str, value: Any = None) -> None:
        """Rank 0: have the others ``walk`` or ``wait``, or tell them that it is ``done`` or ``failed``."""
        if source.is_sharded and dist.get_world_size() > 1:
            _broadcast((word, value))

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def write(self, source: Source, into: Path, version: int) -> Written:
        """Write and prove a version; raises PublishError. Blocks for gathering and disk, for room on it too."""
        trainer = self._config.trainer

        def once() -> Written:
            self.tell(source, "walk")
            return publish.write_weights(
                source,
                self._config.model.path,
                into,
                version,
                keep=trainer.keep_versions,
                in_use=self.in_use,
                max_bucket_bytes=trainer.bucket_bytes,
            )

        def say(what: str) -> None:
            self._waiting.for_(what)
            # Nor must a collective of the other ranks run out of its time.
            self.tell(source, "wait")

        return until_room(once, tell=say)

    def in_use(self) -> Collection[int]:
        """Versions that engines hold, load or are about to load, or that somebody has pinned."""
        pins = self._control.do(lambda client: client.hvals(self._keys.pins(self._model)))
        held = {worker.version for worker in self._workers()}
        return {int(pin) for pin in pins} | held | self._wanted()

    def _wanted(self) -> set[int]:
        """Versions that workers have said they load, or would go back to."""
        raw = self._control.do(lambda client: client.hgetall(self._keys.loading(self._model)))
        there = {worker.name for worker in self._workers()}
        found: set[int] = set()
        for name, data in raw.items():
            record = unpack(data, "versions that a worker loads")
            # Said before its presence is: who has only just come counts too.
            if isinstance(record, dict) and (name.decode() in there or time.time() - float(record["at"]) < FRESH_S):
                found.update(int(version) for version in record["versions"])
        return found

    def open(self, publication: Publication) -> None:
        """Let workers enroll for a version that is about to be announced: they hear of it only then."""
        if self.transport != "disk":
            self._control.call(transfers.open_(self._keys, self._model, transfers.id_of(publication)))
        if self.transport == "checkpoint_engine":
            self.servers.begin(transfers.id_of(publication), Path(publication.path))

    @property
    def servers(self) -> ParameterServers:
        """The parameter servers of checkpoint-engine. Raises ConfigError."""
        if self._servers is None:
            trainer = self._config.trainer
            self._servers = ParameterServers(gpu_ids(trainer.parameter_server_gpus), trainer.bucket_bytes)
        return self._servers

    def send(self, source: Source, publication: Publication) -> Sent | None:
        """Send an announced version to the workers that are ready; whatever fails is told and goes by disk.

        Blocks for at most twice ``trainer.transfer_timeout_s``.
        """
        if self.transport == "disk":
            return None
        began = time.monotonic()
        id_ = transfers.id_of(publication)
        ready = self._await_workers(publication)
        waited = time.monotonic()
        failure = ""
        if ready:
            try:
                if self.transport == "checkpoint_engine":
                    self._deliver_by_servers(id_, ready, began + self._config.trainer.transfer_timeout_s)
                else:
                    self._deliver(source, publication, id_, ready)
            except TransferFailed as exc:
                failure = str(exc)
                log.warning("version %d goes by disk: %s", publication.version, exc)
                self._drop_group()
        else:
            self._control.call(transfers.decide(self._keys, self._model, Decision(id_)))
        ended = time.monotonic()
        self.last = Sent(self.transport, tuple(ready), failure, waited - began, ended - waited)
        return self.last

    def _workers(self) -> list[WorkerPresence]:
        return self._control.do(lambda client: live_workers(client, self._keys))

    def _expected(self) -> set[str]:
        """Workers that will be ready soon: their engines serve, and can take weights this way."""
        return {one.name for one in self._workers() if one.state == WorkerState.SERVING and one.ranks}

    def _await_workers(self, publication: Publication) -> dict[str, Enrollment]:
        """Workers that enrolled, once all that serve have, or the time is over."""
        deadline = time.monotonic() + self._config.trainer.transfer_timeout_s
        expected, looked = self._expected(), time.monotonic()
        while True:
            state = self._control.do(lambda client: client.hgetall(self._keys.transfer(self._model)))
            ready = transfers.enrolled(state)
            now = time.monotonic()
            if now - looked > 0.5:
                expected, looked = self._expected(), now
            missing = expected - ready.keys()
            if not missing or now > deadline:
                break
            self._waiting.for_(f"worker {min(missing)} to be ready for version {publication.version}")
            time.sleep(_LOOK_S)
        self._waiting.end()
        if missing:
            log.warning("version %d goes by disk to %s: not ready in time", publication.version, sorted(missing))
        return ready

    def _deliver(self, source: Source, publication: Publication, id_: str, ready: dict[str, Enrollment]) -> None:
        decision = self._decide(id_, ready)
        if not self._control.call(transfers.decide(self._keys, self._model, decision)):
            raise TransferFailed("another version took its place")
        if decision.transport == "cuda_ipc":
            ready = self._await_frozen(id_, ready)
        elif self._group is not None and decision.group != "" and not self._connected:
            self._group.connect()
            self._connected = True
        self._send_buckets(source, publication, id_, ready)

    def _decide(self, id_: str, ready: dict[str, Enrollment]) -> Decision:
        trainer = self._config.trainer
        if self.transport == "cuda_ipc":
            ranks = dict.fromkeys(ready, 0)
            return Decision(id_, ranks, "cuda_ipc", bucket_bytes=trainer.bucket_bytes)
        group = self._group
        stays = group is not None and self._ranks.keys() == ready.keys()
        if group is None or not stays or any(one.group != group.name for one in ready.values()):
            self._drop_group()
            self._ranks = {}
            world = 1
            for worker, one in sorted(ready.items()):
                self._ranks[worker] = world
                world += one.num_ranks
            name = f"penstock-{new_token()[:12]}"
            group = SendGroup(name, self.transport, trainer.transfer_address, world, trainer.transfer_timeout_s)
            self._group, self._connected = group, False
        return Decision(
            id_,
            dict(self._ranks),
            self.transport,
            group.name,
            trainer.transfer_address,
            group.port,
            group.world_size,
            trainer.bucket_bytes,
        )

    _connected = False

    def _drop_group(self) -> None:
        group, self._group, self._connected = self._group, None, False
        if group is not None:
            group.close()

    def _await_frozen(self, id_: str, ready: dict[str, Enrollment]) -> dict[str, Enrollment]:
        """cuda_ipc: engines are written to only while their workers hold them still."""
        frozen = self._await_reports(id_, "f", ready, "to hold its engine still")
        return {name: one for name, one in ready.items() if name in frozen}

    def _deliver_by_servers(self, id_: str, ready: dict[str, Enrollment], deadline: float) -> None:
        """Parameter servers hand the folder's tensors to engines; whatever fails, nobody waits for it afterwards."""
        decision = Decision(id_)
        try:
            self._check_served(ready)
            self.servers.loaded(deadline - time.monotonic())
            decision = Decision(id_, dict.fromkeys(ready, 0), self.transport)
        except TransferFailed:
            self.servers.abandon()
            raise
        finally:
            decided = self._control.call(transfers.decide(self._keys, self._model, decision))
        try:
            if not decided:
                raise TransferFailed("another version took its place")
            self._hand_over(id_, ready)
        except TransferFailed as exc:
            self.servers.abandon()
            for worker in ready:
                self._control.call(transfers.report(self._keys, self._model, id_, "s", worker, str(exc)))
            raise

    def _check_served(self, ready: dict[str, Enrollment]) -> None:
        """Every parameter server has exactly one process of an engine, on this machine, or it would wait for ever."""
        for one in ready.values():
            ipc.check_local(one.url)
        num_ranks, num_gpus = sum(one.num_ranks for one in ready.values()), len(self.servers.gpus)
        if num_ranks != num_gpus:
            raise TransferFailed(
                f"engines that are ready have {num_ranks} processes, and there are parameter servers on {num_gpus} "
                "GPUs (trainer.parameter_server_gpus): checkpoint-engine serves one process on each"
            )

    def _hand_over(self, id_: str, ready: dict[str, Enrollment]) -> None:
        timeout_s = self._config.trainer.transfer_timeout_s
        if missing := ready.keys() - self._await_reports(id_, "f", ready, "to hold its engine still").keys():
            raise TransferFailed(f"worker {min(missing)} did not hold its engine still in time")
        handles = json.dumps(self.servers.update(timeout_s))
        for worker in ready:
            self._control.call(transfers.report(self._keys, self._model, id_, "h", worker, handles))
        took = self._await_reports(id_, "r", ready, "to take the weights", stop_at_failure=True)
        failed = [(worker, why) for worker, why in took.items() if why]
        failed += [(worker, "it did not answer in time") for worker in ready if worker not in took]
        if failed:
            raise TransferFailed(f"worker {failed[0][0]} did not take the weights: {failed[0][1]}")
        self.servers.finish(timeout_s)

    def _await_reports(
        self, id_: str, what: str, ready: dict[str, Enrollment], until: str, *, stop_at_failure: bool = False
    ) -> dict[str, str]:
        """What workers report, once all have or the time is over."""
        deadline = time.monotonic() + self._config.trainer.transfer_timeout_s
        fields = [f"{what}:{name}" for name in ready]
        while True:
            values = self._control.do(lambda client: client.hmget(self._keys.transfer(self._model), fields))
            said = {name: text.decode() for name, text in zip(ready, values, strict=True) if text is not None}
            missing = ready.keys() - said.keys()
            if not missing or time.monotonic() > deadline or (stop_at_failure and any(said.values())):
                break
            self._waiting.for_(f"worker {min(missing)} {until}")
            time.sleep(_LOOK_S)
        self._waiting.end()
        return said

    def _send_buckets(self, source: Source, publication: Publication, id_: str, ready: dict[str, Enrollment]) -> None:
        """Walk through the weights again and send them. A failure waits for the end: other ranks are in the walk."""
        self.tell(source, "walk")
        config = publish.read_config(Path(self._config.model.path))
        failure: TransferFailed | None = None
        engines = {worker: (one.url, one.num_ranks) for worker, one in ready.items()}
        walk = buckets(source, config, self._config.trainer.bucket_bytes)
        bucket = next(walk, None)
        while bucket is not None:
            following = next(walk, None)
            if failure is None:
                try:
                    if self.transport == "cuda_ipc":
                        version = str(publication.version) if following is None else None
                        self._send_handles(bucket, engines, version, id_)
                    else:
                        assert self._group is not None
                        self._group.broadcast(flatten(bucket, self._device))
                except TransferFailed as exc:
                    failure = exc
                except RuntimeError as exc:  # the device: out of memory, for instance
                    failure = TransferFailed(f"the weights could not be sent ({exc!r})")
            bucket = following
        for worker in engines:
            self._report_sent(id_, worker, "")
        if failure is not None:
            raise failure

    def _send_handles(self, bucket: Any, engines: dict[str, tuple[str, int]], version: str | None, id_: str) -> None:
        """To every engine that is still in it; one that fails is told to its worker, and is out."""
        timeout_s = self._config.trainer.transfer_timeout_s
        on_device = [(name, tensor.to(self._device)) for name, tensor in bucket]
        for worker, why in ipc.send(on_device, engines, version, timeout_s).items():
            log.warning("worker %s takes this version from the disk: %s", worker, why)
            self._report_sent(id_, worker, why)
            del engines[worker]

    def _report_sent(self, id_: str, worker: str, why: str) -> None:
        if self.transport == "cuda_ipc":
            self._control.call(transfers.report(self._keys, self._model, id_, "s", worker, why))

    @property
    def _device(self) -> torch.device:
        if self.transport == "gloo":
            return torch.device("cpu")
        device = self._config.trainer.device
        return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _broadcast(message: "tuple[str, Any] | None") -> "tuple[str, Any]":
    """Rank 0's message to every rank of the trainer. Blocks for rank 0."""
    box: list[Any] = [message]
    dist.broadcast_object_list(box, src=0)
    word, value = box[0]
    return str(word), value


def tell_failure(publisher: Publisher, source: Source, exc: BaseException) -> None:
    """Rank 0 gives up: no other rank may wait for it."""
    with suppress(RuntimeError):
        publisher.tell(source, "failed", str(exc) or repr(exc))
