"""Who can write to Redis can have a record refused, by name, and no more: bounded in time and memory."""

import contextlib
import resource
import subprocess
import sys

import redis

from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.codec import pack
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, until
from tests.integration.worker_process import Start, start

__all__ = ["start"]

#: Address space of a worker in bytes.
MOST_BYTES = 8 * 1024**3


async def test_a_job_that_asks_for_2_to_the_40_answers_is_refused_by_name_and_the_worker_goes_on(
    client: redis.Redis, keys: Keys, config: Make, start: Start
) -> None:
    forged = {
        "a field n that it cannot have: 1099511627776": pack({"id": "d/0/0", "n": 2**40, "prompt": "a="}),
        "a field n that it cannot have: -1": pack({"id": "d/0/1", "n": -1, "prompt": "a="}),
        "a field prompt_ids that": pack({"id": "d/0/2", "n": 1, "prompt_ids": ["x"]}),
        "a field prompt that": pack({"id": "d/0/3", "n": 1, "prompt": 7}),
        "record of job d/0/4 is not a record": b"\xdd\x00\x3f\xff\xff" * 1000 + bytes(1_000_000),
    }
    names = [f"d/0/{index}" for index in range(len(forged))]
    for index, body in enumerate(forged.values()):
        call = scripts.admit(
            keys, [(job(index), body)], lane="train", source="train", position=index, model="policy", gate=None
        )
        assert run(client, call).admitted == 1
    good = admit(client, keys, [job(len(forged))])
    worker = start(config())
    await until(lambda: worker.pid != worker.process.pid)
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))

    with contextlib.suppress(AssertionError):
        await until(lambda: worker.process.poll() is not None or all_in(client, keys, good, "ready")())
        await until(lambda: worker.process.poll() is not None or all_in(client, keys, names, "dead")())
    assert worker.process.poll() is None, worker.text()
    found = letters(client, keys)
    for says, name in zip(forged, names, strict=True):
        assert found[name]["reason"] == "refused"
        assert says in found[name]["detail"], found[name]
    play.assert_conserved(client, keys)


def test_every_decoder_of_records_refuses_mutants_and_bombs_within_2_gib() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile_records", "1500"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "refused" in done.stdout
