"""How a program is watched from its start to its end."""

import os
import subprocess

from penstock.workers.rewards.jail.jail import READY, _Watch
from penstock.workers.rewards.jail.task import End, Limits

MANY = 1024**2


def test_a_program_that_floods_before_anybody_looks_has_begun_all_the_same() -> None:
    program = subprocess.Popen(["sleep", "600"])
    ends = [os.pipe() for _ in range(3)]
    for begin, _ in ends:
        os.set_blocking(begin, False)
    (output, out), (errors, err), (told, _) = ends
    os.write(err, READY)
    os.write(out, b"x" * 100)
    watch = _Watch(program.pid, output, errors, told, Limits(60.0, MANY, 8, MANY, output_bytes=10))

    ended = watch.until_end()

    watch.close()
    program.wait()
    for pair in ends:
        for end in pair:
            os.close(end)
    assert (ended.how, ended.errors) == (End.TOO_MUCH_OUTPUT, "")
