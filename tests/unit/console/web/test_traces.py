"""Traces on the page, of a run whose Redis is gone."""

from pathlib import Path

import pytest

from penstock.history.row import Use
from penstock.history.writer import HistoryWriter
from tests.unit.console.read.trace.samples import sample
from tests.unit.console.web.run_files import make_run
from tests.unit.console.web.test_pages import HOSTILE, ask


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A job of 70 samples, and one with hostile words."""
    folder = make_run(tmp_path)
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    many = [sample(k=k) for k in range(70)]
    writer.write(many, [Use(one.job, one.k, "actor", 3, version=2) for one in many])
    writer.write([sample("math/1/7", prompt=HOSTILE.replace("\ud800", ""), worker="x" * 200)])
    writer.close()
    return tmp_path


def test_a_job_is_drawn_or_one_sample_of_it(runs: Path) -> None:
    told = ask(runs, "/runs/demo/trace", of="math/0/7")["told"]
    assert (len(told["samples"]), told["num_samples"], len(told["events"])) == (64, 70, told["num_events"])
    found = ask(runs, "/runs/demo/trace", of="math/0/7/69")
    assert (found["kind"], found["of"], found["problems"]) == ("job", "math/0/7/69", [])
    told = found["told"]
    assert [one["id"] for one in told["samples"]] == ["math/0/7/69"]
    assert {one["sample"] for one in told["events"]} == {"", "math/0/7/69"}
    assert [one["name"] for one in told["samples"][0]["stages"]][:3] == ["queued", "starting", "prefill"]
    assert set(told["meaning"]) == {stage["name"] for stage in told["samples"][0]["stages"]}
    assert [one["end"] for one in told["tries"]] == ["crashed", "failed reward_raised", "committed"]


def test_prompts_and_batches_list_their_jobs(runs: Path) -> None:
    found = ask(runs, "/runs/demo/trace", of="math/7")
    assert (found["kind"], [one["job"] for one in found["told"]["jobs"]]) == ("prompt", ["math/0/7", "math/1/7"])
    found = ask(runs, "/runs/demo/trace", of="actor:3")
    assert (found["kind"], [one["samples"] for one in found["told"]["jobs"]]) == ("batch", [70])


@pytest.mark.parametrize(("of", "status"), [("math/9/9", 404), ("99", 404), ("math/9", 404), (HOSTILE, 400), ("", 400)])
def test_what_is_not_there_is_refused(runs: Path, of: str, status: int) -> None:
    found = ask(runs, "/runs/demo/trace", of=of.replace("\ud800", ""))
    assert (found["status"], "error" in found) == (status, True)
