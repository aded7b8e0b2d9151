"""The worker's side of weights that come without the disk (penstock/protocol/transfers.py).

    prepare   enroll, wait for the decision; the engine goes on generating (drain: it has ended)
    receive   the engine is held still: it joins the group where that is a new one, and takes bucket after bucket; or
              the trainer writes to it; or it meets parameter servers of checkpoint-engine

Whatever goes wrong before the first bucket costs nothing; after it the engine's weights are mixed, and the folder is
loaded before it goes on. An engine that does not answer at all sits in a collective whose trainer or other member is
dead: it is lost, and its successor loads the folder.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import EngineDied, EngineError, ProtocolError
from penstock.protocol import transfers
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from penstock.protocol.transfers import COLLECTIVE, Decision, Enrollment
from penstock.protocol.waits import Waiting
from penstock.redis.control import AsyncControl, Client
from penstock.weights.index import TensorEntry, in_buckets, read_index
from workers.engine import Engine

log = logging.getLogger(__name__)

#: Takes the weights into an engine that is held still; False when they have to be loaded from the folder.
Receive = Callable[[], Awaitable[bool]]

_BLOCK_MS = 200
_LOOK_S = 0.003
#: The trainer gives up first, so that a member is not lost for being slow.
_MARGIN_S = 5.0
#: Names of GPUs, and of the sockets of their parameter servers on this machine.
_GPU = re.compile(r"GPU-[\w.:-]{1,100}")
_SOCKET = re.compile(r"ipc://@checkpoint-engine-[\w.:-]{1,200}\.sock")
_MAX_HANDLES = 1024


async def _read(streams: dict[str, bytes], client: Client) -> Any:
    return await client.xread(streams, block=_BLOCK_MS)


class Receiver:
    """Enrolls one engine for transfers, and has it receive them.

    Args:
        reader: a connection for blocking reads that nothing else uses meanwhile.
        timeout_s: ``trainer.transfer_timeout_s``.
        birth: counts the engine's starts: a new engine is in no group.
    """

    def __init__(
        self,
        engine: Engine,
        keys: Keys,
        worker: str,
        *,
        control: AsyncControl,
        reader: AsyncControl,
        waiting: Waiting,
        timeout_s: float,
        birth: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._worker = worker
        self._control = control
        self._reader = reader
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._birth = birth
        #: Birth of the engine that is in a group, and the group.
        self._group: tuple[int, str] = (-1, "")

    def may_take(self, publication: Publication) -> bool:
        """Whether this engine can get these weights without the disk."""
        return publication.transport != "disk" and bool(publication.index) and self._engine.info.num_ranks > 0

    async def prepare(self, publication: Publication) -> Receive | None:
        """Enroll, and wait until it is decided who receives. None: load the folder."""
        if not self.may_take(publication):
            return None
        model, id_ = publication.model, transfers.id_of(publication)
        stream = self._keys.transfers(model)
        newest = await self._control.do(lambda client: client.xrevrange(stream, count=1))
        after = newest[0][0] if newest else b"0-0"
        enrollment = Enrollment(self._worker, self._engine.url, self._engine.info.num_ranks, self._joined())
        if not await self._control.call(transfers.enroll(self._keys, model, id_, enrollment)):
            return None
        decision = await self._decided(stream, after, id_)
        if decision is None or self._worker not in decision.ranks:
            return None
        if decision.transport == "cuda_ipc":
            return lambda: self._receive_handles(publication, id_)
        if decision.transport == "checkpoint_engine":
            return lambda: self._receive_from_servers(publication, id_)
        index = await asyncio.to_thread(read_index, Path(publication.path), publication.index)
        return lambda: self._receive_buckets(publication, decision, index.entries())

    def _joined(self) -> str:
        birth, group = self._group
        return group if birth == self._birth() else ""

    async def _decided(self, stream: str, after: bytes, id_: str) -> Decision | None:
        deadline = time.monotonic() + self._timeout_s + _MARGIN_S
        try:
            while time.monotonic() < deadline:
                self._waiting.for_(f"the trainer to decide who receives version {id_}")
                found = await self._reader.do(partial(_read, {stream: after}))
                for entry, fields in found[0][1] if found else []:
                    after = entry
                    if fields.get(b"id") == id_.encode():
                        return Decision.from_bytes(fields.get(b"d", b""), f"decision on {id_}")
        except ProtocolError as exc:
            log.error("version %s is loaded from its folder: %s", id_, exc)
            return None
        finally:
            self._waiting.end()
        log.warning("version %s is loaded from its folder: the trainer did not decide in time", id_)
        return None

    # --- process group ----------------------------------------------------------------------------------------------

    async def _receive_buckets(self, publication: Publication, decision: Decision, entries: list[TensorEntry]) -> bool:
        if decision.transport not in COLLECTIVE or not await self._join(decision):
            return False
        buckets = list(in_buckets(entries, decision.bucket_bytes))
        for number, bucket in enumerate(buckets, start=1):
            body: dict[str, Any] = {
                "names": [entry.name for entry in bucket],
                "dtypes": [entry.dtype for entry in bucket],
                "shapes": [list(entry.shape) for entry in bucket],
                "group_name": decision.group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            if number == len(buckets):
                body["weight_version"] = str(publication.version)
            if not await self._told("/update_weights_from_distributed", body, f"bucket {number} of {len(buckets)}"):
                await self._leave()
                return False
        return True

    async def _join(self, decision: Decision) -> bool:
        if self._joined() == decision.group:
            return True
        await self._leave()
        body = {
            "master_address": decision.address,
            "master_port": decision.port,
            "rank_offset": decision.ranks[self._worker],
            "world_size": decision.world_size,
            "group_name": decision.group,
            "backend": decision.transport,
        }
        self._group = (self._birth(), decision.group)
        if await self._told("/init_weights_update_group", body, "the invitation to a group"):
            return True
        self._group = (-1, "")
        return False

    async def _leave(self) -> None:
        group = self._joined()
        self._group = (-1, "")
        if group:
            await self._told("/destroy_weights_update_group", {"group_name": group}, "the end of a group")

    async def _told(self, path: str, body: dict[str, Any], what: str) -> bool:
        """Whether the engine did as it was told. Raises EngineDied when it does not answer."""
        if refusal := await self._refusal(path, body):
            log.warning("the engine refused %s: %s", what, refusal)
        return not refusal

    async def _refusal(self, path: str, body: dict[str, Any]) -> str:
        """Why the engine did not do as it was told; '' where it did. Raises EngineDied when it does not answer."""
        try:
            answer = await self._engine.post(path, body, timeout_s=self._timeout_s + _MARGIN_S)
        except EngineDied:
            raise
        except EngineError as exc:
            raise EngineDied(f"the engine is stuck in a transfer of weights: {exc}") from exc
        return "" if answer.get("success") else (str(answer.get("message", answer))[:500] or "no reason was given")

    # --- memory of the trainer ----------------------------------------------------------------------------------------

    async def _receive_handles(self, publication: Publication, id_: str) -> bool:
        """The trainer writes to the engine; the worker says when, and waits."""
        said = await self._frozen_until(publication, id_, ("s",))
        if said is None:
            log.warning("version %s is loaded from its folder: the trainer did not send it in time", id_)
        elif said[1]:
            log.warning("version %s is loaded from its folder: %s", id_, said[1])
        return said is not None and not said[1]

    async def _receive_from_servers(self, publication: Publication, id_: str) -> bool:
        """The engine meets checkpoint-engine's parameter servers, at sockets that the trainer names."""
        said = await self._frozen_until(publication, id_, ("h", "s"))
        if said is None or said[0] == "s":
            log.warning("version %s is loaded from its folder: %s", id_, said[1] if said else "the trainer is silent")
            return False
        try:
            handles = read_handles(said[1])
        except ProtocolError as exc:
            return await self._report(publication, id_, str(exc))
        body = {"zmq_handles": handles, "flush_cache": False, "weight_version": str(publication.version)}
        try:
            refusal = await self._refusal("/update_weights_from_ipc", body)
        except EngineDied as exc:
            await self._report(publication, id_, f"its engine is lost: {exc}"[:500])
            raise
        return await self._report(publication, id_, refusal)

    async def _report(self, publication: Publication, id_: str, failure: str) -> bool:
        """Tell the trainer what came of it; whether it went well."""
        if failure:
            log.warning("version %s is loaded from its folder: %s", id_, failure)
        await self._control.call(transfers.report(self._keys, publication.model, id_, "r", self._worker, failure))
        return not failure

    async def _frozen_until(
        self, publication: Publication, id_: str, fields: tuple[str, ...]
    ) -> tuple[str, str] | None:
        """Say that the engine is held still, and wait for the first of the trainer's fields; None: it was silent."""
        model, names = publication.model, [f"{field}:{self._worker}" for field in fields]
        await self._control.call(transfers.report(self._keys, model, id_, "f", self._worker, ""))
        key = self._keys.transfer(model)
        deadline = time.monotonic() + 2 * self._timeout_s + _MARGIN_S
        while time.monotonic() < deadline:
            said = await self._control.do(lambda client: client.hmget(key, names))
            for field, text in zip(fields, said, strict=True):
                if text is not None:
                    return field, text.decode(errors="replace")
            await asyncio.sleep(_LOOK_S)
        return None


def read_handles(text: str) -> dict[str, str]:
    """GPU -> socket of its parameter server, as a trainer wrote it.

    The engine unpickles what comes out of these sockets: only checkpoint-engine's own names on this machine will do.

    Raises:
        ProtocolError: it is anything else.
    """
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    if (
        not isinstance(found, dict)
        or not 0 < len(found) <= _MAX_HANDLES
        or not all(_GPU.fullmatch(gpu) and isinstance(at, str) and _SOCKET.fullmatch(at) for gpu, at in found.items())
    ):
        raise ProtocolError(
            f"what should name parameter servers of checkpoint-engine on this machine does not: {text[:200]!r}"
        )
    return found
