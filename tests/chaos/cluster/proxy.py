"""A TCP proxy between the parts of a run and their Redis, a process of its own that is told what to break.

Each part has a way of its own: a port, so that one part can be cut off while the others go on. A connection can be
ended before a request is passed on, before its reply, and in the middle of it; bytes of one direction can be held back,
and come late; a way can refuse, or be silent. What a client sent before it gave up is still passed on once the way is
open again, as a network does.

    python -m tests.chaos.cluster.proxy HOST PORT    is told by lines of JSON on its standard input, and ends with it
"""

import asyncio
import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any

import orjson

HOST = "127.0.0.1"
#: What is passed on at once, at most.
CHUNK_BYTES = 65536
#: Towards the server, and towards the client.
UP, DOWN = "up", "down"
#: Where a trap ends a connection.
REQUEST, REPLY, MID_REPLY = "request", "reply", "mid_reply"


@dataclass(slots=True)
class Trap:
    """Ends connections whose request holds ``match``, ``left`` times."""

    number: int
    where: str
    match: bytes
    left: int
    sprung: int = 0


@dataclass(slots=True)
class Gate:
    """One direction of a way: open, or held back."""

    delay_s: float = 0.0
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def passed(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self.open.wait()


class Way:
    """How one part reaches the server."""

    def __init__(self, target: "Target") -> None:
        self.target = target
        self.port = 0
        self.refuses = False
        self.gates = {UP: Gate(), DOWN: Gate()}
        self.traps: list[Trap] = []
        self.lines: set[Line] = set()
        self.server: asyncio.Server | None = None
        self.open()

    def open(self) -> None:
        """As on the first day."""
        self.refuses = False
        self.traps.clear()
        for gate in self.gates.values():
            gate.delay_s = 0.0
            gate.open.set()

    def refuse(self) -> None:
        """End every connection, and each new one at once."""
        self.refuses = True
        for line in list(self.lines):
            line.end()

    def trap_for(self, data: bytes) -> Trap | None:
        for trap in self.traps:
            if trap.left and trap.match in data:
                trap.left -= 1
                trap.sprung += 1
                return trap
        return None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        try:
            far = await asyncio.open_connection(self.target.host, self.target.port)
        except OSError:
            writer.transport.abort()
            return
        line = Line(self, (reader, writer), far)
        self.lines.add(line)
        try:
            await line.carry()
        finally:
            self.lines.discard(line)


class Line:
    """One connection."""

    def __init__(self, way: Way, near: Any, far: Any) -> None:
        self._way = way
        self._near_reader, self._near = near
        self._far_reader, self._far = far
        #: What becomes of the reply that is awaited.
        self._fate = ""

    def end(self) -> None:
        self._near.transport.abort()
        self._far.transport.abort()

    async def carry(self) -> None:
        try:
            await asyncio.gather(self._carry_up(), self._carry_down())
        except OSError:
            pass
        finally:
            self.end()

    async def _carry_up(self) -> None:
        while data := await self._near_reader.read(CHUNK_BYTES):
            trap = self._way.trap_for(data)
            if trap is not None and trap.where == REQUEST:
                self.end()
                return
            if trap is not None:
                self._fate = trap.where
            await self._way.gates[UP].passed()
            self._far.write(data)
            await self._far.drain()
        # The client has gone; what it sent before is on its way all the same.
        self._far.write_eof()

    async def _carry_down(self) -> None:
        while data := await self._far_reader.read(CHUNK_BYTES):
            if self._fate:
                await self._cut(data)
                return
            await self._way.gates[DOWN].passed()
            # A client that has gone is told nothing, and its requests are carried out all the same.
            with contextlib.suppress(OSError):
                self._near.write(data)
                await self._near.drain()
        self._near.transport.close()

    async def _cut(self, reply: bytes) -> None:
        if self._fate == MID_REPLY:
            self._near.write(reply[: max(1, len(reply) // 2)])
            with contextlib.suppress(OSError):
                await self._near.drain()
            self._near.transport.close()
        self._far.transport.abort()
        if self._fate == REPLY:
            self._near.transport.abort()


@dataclass(slots=True)
class Target:
    """Where the server is; a failover moves it."""

    host: str
    port: int


class Proxy:
    """All ways to one server, and what is told to them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ways: dict[str, Way] = {}
        self._traps: dict[int, list[Trap]] = {}

    async def serve(self) -> None:
        """Obey until standard input ends."""
        orders = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        while line := await orders.readline():
            word, *args = orjson.loads(line)
            try:
                said = {"ok": await getattr(self, f"do_{word}")(*args)}
            except Exception as exc:
                said = {"error": repr(exc)}
            print(orjson.dumps(said).decode(), flush=True)

    def _chosen(self, names: list[str]) -> list[Way]:
        return [self._ways[name] for name in names] if names else list(self._ways.values())

    async def do_way(self, name: str, port: int) -> int:
        """Port of the way ``name``, made at the first asking (on ``port``; 0: any)."""
        if name not in self._ways:
            way = Way(self._target)
            way.server = await asyncio.start_server(way.accept, HOST, port, limit=CHUNK_BYTES)
            way.port = way.server.sockets[0].getsockname()[1]
            self._ways[name] = way
        return self._ways[name].port

    async def do_retarget(self, host: str, port: int) -> None:
        self._target.host, self._target.port = host, port

    async def do_refuse(self, names: list[str]) -> None:
        for way in self._chosen(names):
            way.refuse()

    async def do_hold(self, directions: list[str], names: list[str]) -> None:
        for way in self._chosen(names):
            for direction in directions:
                way.gates[direction].open.clear()

    async def do_delay(self, seconds: float, names: list[str]) -> None:
        for way in self._chosen(names):
            for gate in way.gates.values():
                gate.delay_s = seconds

    async def do_trap(self, where: str, match: str, count: int, names: list[str]) -> int:
        number = len(self._traps)
        self._traps[number] = []
        for way in self._chosen(names):
            trap = Trap(number, where, match.encode(), count)
            way.traps.append(trap)
            self._traps[number].append(trap)
        return number

    async def do_sprung(self, number: int) -> int:
        return sum(trap.sprung for trap in self._traps[number])

    async def do_open(self, names: list[str]) -> None:
        for way in self._chosen(names):
            way.open()

    async def do_lines(self, names: list[str]) -> int:
        return sum(len(way.lines) for way in self._chosen(names))


def main() -> None:
    host, port = sys.argv[1:]
    asyncio.run(Proxy(Target(host, int(port))).serve())


if __name__ == "__main__":
    main()
