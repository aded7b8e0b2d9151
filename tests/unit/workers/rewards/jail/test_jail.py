"""How a program is watched from its start to its end."""

import select
import subprocess

from penstock.workers.rewards.jail.jail import _Watch
from penstock.workers.rewards.jail.task import End, Limits

MANY = 1024**2


def test_a_program_that_floods_before_anybody_looks_has_begun_all_the_same() -> None:
    floods = ["sh", "-c", "echo ready >&2; printf '%100s'; exec sleep 600"]
    program = subprocess.Popen(floods, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    select.select([program.stdout], [], [])
    watch = _Watch(program, None, Limits(60.0, MANY, 8, MANY, output_bytes=10))

    ended = watch.until_end()

    watch.close()
    assert (ended.how, ended.errors) == (End.TOO_MUCH_OUTPUT, "")
