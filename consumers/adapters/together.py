"""Let rank 0 talk to the run for all training processes: gather prompts, scatter answers.

    every rank: its items ─> rank 0: of all, in the order of the ranks ─> an answer each ─> every rank: its own

Bytes (msgpack) go over a separate gloo group without a time limit by default: a rollout may take longer than a
collective's timeout. A rank that dies ends the call of every other. Before a gather rank 0 receives from each other
rank separately, so that it can name the one that hangs; the others name rank 0.
"""

import datetime
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, PenstockError, ProtocolError, WaitTimeout
from penstock.protocol.records.causes import Cause, RanksAbsent, decode
from penstock.protocol.records.codec import pack, unpack

log = logging.getLogger(__name__)

#: Longest wait for another rank by default.
TIMEOUT_S = 30 * 24 * 3600.0
#: Seconds between two reports of a wait, and between two log lines.
TELL_S, LOG_S = 1.0, 60.0
#: Errors that a rank may raise on the others, by name.
ERRORS: dict[str, Callable[..., PenstockError]] = {
    kind.__name__: kind for kind in (ConfigError, ProtocolError, WaitTimeout)
}


class Together:
    """The ranks of one training, as started by torch's launchers (RANK, WORLD_SIZE). A single rank needs no group.

    Args:
        blocked_on: called on rank 0 with the cause of its wait, repeatedly, None at the end; in a thread.
        timeout_s: longest wait for another rank; None: 30 days.
    """

    def __init__(
        self, blocked_on: Callable[[Cause | None], None] = lambda _: None, timeout_s: float | None = None
    ) -> None:
        self._blocked_on = blocked_on
        self._timeout_s = timeout_s or TIMEOUT_S
        self._rank = int(os.environ.get("RANK", "0"))
        self._size = int(os.environ.get("WORLD_SIZE", "1"))
        self._group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Return True on the rank that talks to the run."""
        return self._rank == 0

    def share(
        self, items: Callable[[], Sequence[Any]], answer: Callable[[list[Any]], list[dict[str, Any]]]
    ) -> dict[str, list[Any]]:
        """Call ``answer`` on rank 0 with all ranks' items; return this rank's part as columns. Collective, blocks.

        Raises on every rank the errors of ``items`` on any rank, or of ``answer``; RuntimeError if another rank dies or
        times out.
        """
        if self._size == 1:
            return _columns(answer([_plain(item) for item in items()]))
        raised: BaseException | None = None
        try:
            asked = {"items": list(items())}
        except BaseException as exc:  # sent to the other ranks before it is raised
            raised, asked = exc, _error(exc, self._rank)
        every = [unpack(data, "What another rank asks") for data in self._gather(pack(asked))]
        parts: list[bytes] = []
        if failed := [one for one in every if "error" in one]:
            parts = [pack(failed[0])] * self._size
        elif self.leads:
            try:
                parts = _parts([one["items"] for one in every], answer)
            except BaseException as exc:
                raised = exc
                parts = [pack(_error(exc, 0))] * self._size
        found = unpack(self._scatter(parts), "What rank 0 hands out")
        if raised is not None:
            raise raised
        if "error" in found:
            raise ERRORS.get(found["error"], ProtocolError)(
                f"Of rank {found['rank']}: {found['text']}", **_about(found["about"])
            )
        columns: dict[str, list[Any]] = found["columns"]
        return columns

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            if not dist.is_initialized():
                raise ConfigError(f"WORLD_SIZE is {self._size}, but torch.distributed is not begun: train, then ask.")
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._timeout_s))
        return self._group

    def _call_roll(self, group: dist.ProcessGroup) -> None:
        """Wait until every rank is present; rank 0 receives from them one by one."""
        here = torch.zeros(1)
        if not self.leads:
            with self._naming(RanksAbsent(("rank 0",), "gather")):
                dist.send(here, dst=0, group=group)
            return
        for rank in range(1, self._size):
            with self._naming(RanksAbsent((f"rank {rank} of {self._size}",), "ask")):
                dist.recv(here, src=rank, group=group)

    @contextmanager
    def _naming(self, cause: Cause) -> Iterator[None]:
        """Report, and log each minute, what this rank waits for inside of the ``with`` block, if it takes a moment."""
        ended = threading.Event()
        teller = threading.Thread(target=self._name, args=(cause, ended), name="whom ranks wait for", daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def _name(self, cause: Cause, ended: threading.Event) -> None:
        waited_s = told_s = 0.0
        while not ended.wait(TELL_S):
            waited_s += TELL_S
            if self.leads:
                self._blocked_on(cause)
            if waited_s - told_s >= LOG_S:
                told_s = waited_s
                log.warning("rank %d has waited %.0f s for %s", self._rank, waited_s, cause)
        if self.leads and waited_s:
            self._blocked_on(None)

    def _gather(self, data: bytes) -> list[bytes]:
        """Gather the bytes of all ranks on rank 0; return [] elsewhere."""
        group = self._open()
        self._call_roll(group)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        longest = max(int(size) for size in sizes)
        mine = _tensor(data, longest)
        all_ = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._size)] if self.leads else None
        dist.gather(mine, all_, dst=0, group=group)
        return [bytes(one[: int(size)].numpy()) for one, size in zip(all_ or [], sizes, strict=False)]

    def _scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each rank its entry of ``parts``, which rank 0 has; return this rank's."""
        group = self._open()
        sizes = torch.tensor([len(part) for part in parts] if self.leads else [0] * self._size)
        with self._naming(RanksAbsent(("rank 0",), "answer")):
            dist.broadcast(sizes, src=0, group=group)
        longest = int(sizes.max())
        mine = torch.empty(longest, dtype=torch.uint8)
        dist.scatter(mine, [_tensor(part, longest) for part in parts] if self.leads else None, src=0, group=group)
        return bytes(mine[: int(sizes[self._rank])].numpy())


def _tensor(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _about(about: dict[str, Any]) -> dict[str, Any]:
    if not about.get("cause"):
        return about
    name, fields = about["cause"]
    return {**about, "cause": decode(name, fields, "An error")}


def _error(exc: BaseException, rank: int) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if isinstance(exc, WaitTimeout):
        about = {"count": exc.count, "cause": exc.cause and [exc.cause.name, exc.cause.fields()]}
    return {"error": type(exc).__name__, "text": str(exc), "rank": rank, "about": about}


def _parts(every: Sequence[Sequence[Any]], answer: Callable[[list[Any]], list[dict[str, Any]]]) -> list[bytes]:
    """Encode for each rank the answers to its items."""
    answers = answer([_plain(item) for items in every for item in items])
    parts, begin = [], 0
    for items in every:
        parts.append(pack({"columns": _columns(answers[begin : begin + len(items)])}))
        begin += len(items)
    return parts


def _columns(answers: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [answer[name] for answer in answers] for name in (answers[0] if answers else ())}


def _plain(item: Any) -> Any:
    """Convert a tuple as msgpack would."""
    return tuple(item)
