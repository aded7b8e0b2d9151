"""``penstock worker`` that also writes down, by the millisecond, what it hears of its engine.

    python -m benchmarks.watched_worker FOLDER worker --config FILE ...

``FOLDER/ticks`` counts tokens as they arrive in the worker (``benchmarks.ticks``). ``FOLDER/pauses`` has a line for
each time the engine was held still: when it was asked to, and when it had said that it goes on (monotonic seconds).

Answers are streamed, 16 tokens in an event. A worker whose engine does not say which weights drew a token has them so
anyway: nothing is asked of such an engine that is not asked of it in a run. Counting an event takes a microsecond.
"""

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.ticks import Ticks

TICKS, PAUSES = "ticks", "pauses"
#: Tokens of an event of a stream.
EVERY = 16


def watch(folder: Path) -> None:
    """Have the worker of this process count tokens and write pauses down."""
    from penstock.workers.sglang.client import SglangClient
    from penstock.workers.sglang.controls import SglangControls
    from penstock.workers.sglang.stream import Answer

    ticks, pauses = Ticks(folder / TICKS), (folder / PAUSES).open("a", buffering=1)
    add, generate, call = Answer.add, SglangClient.generate, SglangControls.call
    held: list[float] = []

    def counting(self: Answer, event: dict[str, Any]) -> tuple[list[int], list[float]]:
        new = add(self, event)
        ticks.add(len(new[0]))
        return new

    async def streaming(
        self: SglangClient, *args: Any, on_tokens: Any = None, interval: int = EVERY, **more: Any
    ) -> Any:
        return await generate(
            self, *args, on_tokens=on_tokens or _unheard, interval=interval if on_tokens else EVERY, **more
        )

    async def timing(self: SglangControls, method: str, path: str, *args: Any, **more: Any) -> Any:
        if path == "/pause_generation":
            held.append(time.monotonic())
        answer = await call(self, method, path, *args, **more)
        if path == "/continue_generation" and held:
            pauses.write(f"{held.pop()!r} {time.monotonic()!r}\n")
        return answer

    for owner, name, instead in (
        (Answer, "add", counting),
        (SglangClient, "generate", streaming),
        (SglangControls, "call", timing),
    ):
        setattr(owner, name, instead)


def _unheard(_: int, __: list[int], ___: list[float]) -> None:
    """What is drawn is counted where it arrives."""


def read_pauses(folder: Path) -> list[tuple[float, float]]:
    """Begin and end of each pause so far."""
    file = folder / PAUSES
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [(float(begin), float(end)) for begin, end in (line.split() for line in lines if line.endswith("\n"))]


if __name__ == "__main__":
    watch(Path(sys.argv.pop(1)))
    from penstock.cli import main

    main()
