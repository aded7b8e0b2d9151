"""What the processes of a run recorded: operations with their outcomes, in the order in which they began."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Facts = dict[str, Any]


@dataclass(slots=True)
class Operation:
    """One operation of one process."""

    op: str
    #: FILE:SEQ of its call.
    where: str
    #: The history it stands in: one process.
    process: str
    began: int
    facts: Facts
    #: yes, no, or unknown: nobody was told.
    outcome: str = "unknown"
    #: When its answer was recorded; None: never.
    ended: int | None = None
    #: What the answer said.
    answer: Facts = field(default_factory=dict)

    @property
    def happened(self) -> bool:
        return self.outcome == "yes"

    @property
    def may_have_happened(self) -> bool:
        return self.outcome != "no"


class History:
    """Operations by kind, in the order in which they began."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._by_op: dict[str, list[Operation]] = defaultdict(list)
        for operation in sorted(operations, key=lambda one: one.began):
            self._by_op[operation.op].append(operation)

    def of(self, *ops: str) -> list[Operation]:
        """Operations of these kinds; in order within each kind, and of several kinds together."""
        if len(ops) == 1:
            return self._by_op.get(ops[0], [])
        return sorted((one for op in ops for one in self._by_op.get(op, ())), key=lambda one: one.began)

    def all(self) -> Iterator[Operation]:
        """Every operation, kind by kind."""
        return (one for found in self._by_op.values() for one in found)

    def counts(self) -> dict[str, int]:
        return {op: len(found) for op, found in sorted(self._by_op.items())}


def read(folder: Path) -> History:
    """All histories of a folder. Raises ValueError where a line is broken that is not the last of its file."""
    return History(one for path in sorted(folder.glob("*.jsonl")) for one in read_file(path))


def read_file(path: Path) -> Iterator[Operation]:
    """Operations of one process; a torn last line is what a kill leaves."""
    *lines, _torn = path.read_bytes().split(b"\n")
    return operations_of(path.name, map(orjson.loads, lines))


def operations_of(name: str, records: Iterable[Facts]) -> Iterator[Operation]:
    """Calls and ends, put together. Raises ValueError where they do not fit, or one is missing."""
    calls: dict[int, Operation] = {}
    expected = 1
    for record in records:
        if "seq" not in record:
            continue
        seq = record["seq"]
        if seq != expected:
            raise ValueError(f"{name} goes from record {expected - 1} to {seq}: a part of the history is missing.")
        expected += 1
        if "op" in record:
            calls[seq] = Operation(record["op"], f"{name}:{seq}", name, record["mono"], record["facts"])
        else:
            call = calls[record["of"]]
            call.outcome, call.ended, call.answer = record["outcome"], record["mono"], record["facts"]
    return iter(calls.values())
