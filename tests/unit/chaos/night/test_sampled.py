"""A small history holds the faults, what is of no job, and all of the jobs that it keeps."""

import json
import lzma
import random
from pathlib import Path
from typing import Any

from tests.chaos.night.sampled import of_jobs, sampled

FAULT = {"act": {"number": 1, "kind": "kill:worker"}, "mono": 5}


def write(folder: Path, jobs: int) -> None:
    """A producer, and a worker that leases, commits, and asks in vain."""
    (folder / "history").mkdir(parents=True)
    rng = random.Random(1)
    producer, worker = Part(folder, "producer-1"), Part(folder, "worker-2")
    for number in range(jobs):
        name = f"sums/0/{number}"
        producer.record("admit", {"jobs": [[name, 2]]}, {"jobs": [name]})
        worker.record("lease", {"worker": "w"}, {"jobs": [[name, rng.randbytes(8).hex(), 0, []]]})
        worker.record("lease", {"worker": "w"}, {"jobs": []})
        worker.record("commit", {"job": name, "token": rng.randbytes(8).hex()}, {"new": 1})
    worker.record("cut", {"jobs": [f"sums/0/{n}" for n in range(jobs)], "rows": [["sums/0/0", 0, "t"]]}, {})
    worker.record("publish", {"version": 1}, {})
    (folder / "nemesis.jsonl").write_text(json.dumps(FAULT) + "\n" + '{"torn')


class Part:
    """The history of one process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / "history" / f"{name}.jsonl"
        self.path.write_text(json.dumps({"who": name, "pid": 1}) + "\n")
        self.seq = 0

    def record(self, op: str, facts: dict[str, Any], answer: dict[str, Any]) -> None:
        call = self.seq + 1
        self.seq += 2
        stamp = {"mono": 10 * self.seq, "wall": 1}
        lines = [
            {"seq": call, "op": op, "facts": facts},
            {"seq": self.seq, "of": call, "outcome": "yes", "facts": answer},
        ]
        with self.path.open("a") as file:
            file.writelines(json.dumps(stamp | line) + "\n" for line in lines)


def read(packed: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(packed).splitlines()]


def test_a_short_history_is_kept_whole_but_for_questions_in_vain(tmp_path: Path) -> None:
    write(tmp_path, 3)

    head, fault, *records = read(sampled(tmp_path))

    assert (head["jobs"], fault) == ("1 in 1", FAULT)
    assert [one["op"] for one in records if "op" in one].count("lease") == 3
    assert {one["file"] for one in records} == {"producer-1", "worker-2"}
    assert not any("wall" in one for one in records)


def test_a_long_one_is_kept_of_some_jobs_and_of_these_all(tmp_path: Path) -> None:
    write(tmp_path, 400)

    packed = sampled(tmp_path, most=4000)
    head, _, *records = read(packed)

    assert len(packed) <= 4000
    assert head["jobs"] != "1 in 1"
    calls = [one for one in records if "op" in one]
    committed = {one["facts"]["job"] for one in calls if one["op"] == "commit"}
    (cut,) = (one for one in calls if one["op"] == "cut")
    assert 0 < len(committed) < 400
    assert set(cut["facts"]["jobs"]) == committed
    assert sum(one["op"] == "lease" for one in calls) == len(committed)
    assert [one["facts"] for one in calls if one["op"] == "publish"] == [{"version": 1}]


def test_where_no_job_fits_the_faults_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 50)

    head, *rest = read(sampled(tmp_path, most=10))

    assert (head["jobs"], rest) == ("none", [FAULT])


def test_the_end_of_a_call_that_is_left_out_is_left_out() -> None:
    call = {"seq": 1, "file": "w", "op": "commit", "facts": {"job": "a"}}
    end = {"seq": 2, "file": "w", "of": 1, "outcome": "yes", "facts": {}}
    told = call | {"seq": 3, "op": "told", "facts": {"sample": "b/1"}}

    assert list(of_jobs([call, end, told], lambda job: job == "b")) == [told]


def test_of_a_run_with_more_of_no_job_than_fits_the_first_part_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 20)
    trainer = Part(tmp_path, "trainer-3")
    for version in range(2000):
        trainer.record("publish", {"version": version, "weights": random.Random(version).randbytes(8).hex()}, {})

    packed = sampled(tmp_path, most=4000)
    head, _, *records = read(packed)

    assert len(packed) <= 4000
    assert head["first"] != "1 in 1"
    times = [one["mono"] for one in records]
    assert times == sorted(times)
    assert head["kept"] == len(records) > 50
