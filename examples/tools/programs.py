"""Run programs of a model in the jail of reward ``code``, in a process of its own: a jail forks, which a worker, whose
process has threads, must not.

    python -m examples.tools.programs          # a JSON line in, a JSON line out, until stdin closes
"""

import asyncio
import json
import sys

from penstock.config.reward import JailConfig, RewardConfig
from penstock.workers.rewards.jail.detect import find_jail
from penstock.workers.rewards.jail.task import End, Task

CONFIG = RewardConfig(jail=JailConfig(memory_bytes=256 * 1024**2, output_bytes=4096))
#: Characters of a program's output that the model is given.
MAX_OUTPUT = 40


class Programs:
    """Run programs, one at a time. The process starts with the first, and ends with this process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()

    async def run(self, code: str) -> str:
        """Return what a program prints, or how it ended. Blocks for seconds at most.

        Raises:
            RuntimeError: no jail works on this machine.
        """
        async with self._free:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "examples.tools.programs"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(code).encode() + b"\n")
                answer = await process.stdout.readline()
            except asyncio.CancelledError:
                # The next program must not read this one's answer.
                process.kill()
                self._process = None
                raise
        if not answer:
            raise RuntimeError("the process of programs ended; its error is in the worker's log")
        return str(json.loads(answer))


def output_of(code: str) -> str:
    """Run one program in the jail; return what it prints, or how it ended."""
    ended = find_jail(CONFIG).run(Task(code))
    if ended.how is End.DONE:
        return ended.output.decode(errors="replace").strip()[:MAX_OUTPUT]
    lines = ended.errors.strip().splitlines()
    return (lines[-1] if lines else ended.how.value)[:MAX_OUTPUT]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(output_of(json.loads(line))), flush=True)
