"""The trace of a job, a prompt and a batch, from the files of a run alone."""

from pathlib import Path
from typing import Any

import pytest

from penstock.console.read.stages import Asked, asked_of
from penstock.console.read.trace import trace_batch, trace_job, trace_prompt
from penstock.errors import ConfigError
from penstock.history.row import WHOLE_JOB, Use
from tests.unit.console.read.trace.samples import sample
from tests.unit.console.read.trace.test_perfetto import sources


def told(folder: Path, *rows: Any, uses: list[Use] | None = None, job: str = "math/0/7") -> dict[str, Any]:
    found = trace_job(sources(folder, list(rows), uses), job)
    assert found is not None
    return found


def test_a_job_is_told_from_its_prompt_to_its_step(tmp_path: Path) -> None:
    uses = [Use("math/0/7", k, "actor", 2, 1, staleness=k, loss_tokens=3) for k in range(2)]
    found = told(tmp_path, sample(), sample(k=1), uses=uses)
    assert [(one["worker"], one["end"]) for one in found["tries"]] == [
        ("w-1", "crashed"),
        ("w-2", "failed reward_raised"),
        ("w-1", "committed"),
    ]
    assert [(one["id"], one["try"]) for one in found["samples"]] == [("math/0/7/0", 3), ("math/0/7/1", 3)]
    (batch,) = found["batches"]
    wanted = {
        "subscription": "actor",
        "batch": 2,
        "version": 1,
        "samples": 2,
        "staleness": 1,
        "loss_tokens": 6,
        "step": 2,
    }
    assert batch == wanted | {"cut_s": 1060.0, "trained_s": 1070.0}
    events = [(one["at_s"] - 1000, one["event"], one["who"]) for one in found["events"]]
    assert events[:6] == [
        (0, "admitted", "producer"),
        (10, "leased", "w-1"),
        (20, "crashed", "w-1"),
        (25, "leased", "w-2"),
        (30, "failed", "w-2"),
        (40, "leased", "w-1"),
    ]
    assert events[-2:] == [(60, "cut", "actor"), (70, "trained", "actor")]
    assert events == sorted(events, key=lambda one: one[0])


def test_what_falls_into_one_millisecond_is_told_in_the_order_in_which_it_happens(tmp_path: Path) -> None:
    """Redis says when a group was cut in whole milliseconds, a worker when it committed in parts of them."""
    uses = [Use("math/0/7", 0, "actor", 2, 1, staleness=0, loss_tokens=3)]
    at = {"rewarded_s": 1050.1231, "committed_s": 1050.1234, "ready_s": 1050.123, "cut_s": 1050.123}

    events = told(tmp_path, sample(**at), uses=uses)["events"]

    assert [one["event"] for one in events][-4:] == ["committed", "ready", "cut", "trained"]


@pytest.mark.parametrize(("lane", "done"), [("eval", "evaluated"), ("score", "scored")])
def test_nobody_trained_what_was_only_to_be_scored(tmp_path: Path, lane: str, done: str) -> None:
    uses = [Use("math/0/7", 0, lane, 2, -1, staleness=0, loss_tokens=3)]
    *_, last = told(tmp_path, sample(lane=lane, fate=done), uses=uses)["events"]

    assert (last["event"], last["who"], last["what"]) == (done, lane, "batch 2")


def test_of_one_sample_the_others_are_left_out(tmp_path: Path) -> None:
    rows = [sample(k=k) for k in range(3)]
    found = trace_job(sources(tmp_path, rows), "math/0/7", "math/0/7/1")
    assert found is not None
    assert [one["id"] for one in found["samples"]] == ["math/0/7/1"]
    told = {
        one["what"].partition(":")[0] for one in found["events"] if one["event"] in ("drawn", "rewarded", "committed")
    }
    assert told == {"sample 1", "end of try 3"}
    assert trace_job(sources(tmp_path, rows), "math/0/7", "math/0/7/9") is None


def test_a_buried_job_is_told_until_it_was_tried_again(tmp_path: Path) -> None:
    buried = sample(
        k=WHOLE_JOB, fate="buried", reason="reward_raised", tries="train:w-1:1010000:1020000:failed reward_raised"
    )
    found = told(tmp_path, buried)
    assert (found["state"], found["samples"], len(found["tries"])) == ("buried", [], 1)
    again = told(tmp_path, buried, sample())
    assert (again["state"], len(again["samples"]), len(again["tries"])) == ("trained", 1, 3)


def test_tries_that_cannot_be_read_are_told_and_hide_nothing(tmp_path: Path) -> None:
    found = told(tmp_path, sample(tries="\x1b[2J"))
    assert "holds tries that no lease wrote" in found["problems"][0]
    assert (found["tries"], found["samples"][0]["try"]) == ([], None)
    assert trace_job(sources(tmp_path, []), "math/0/7") is None


def test_a_batch_and_a_prompt_list_their_jobs(tmp_path: Path) -> None:
    rows = [sample(), sample("math/1/7", reward=1.0), sample("math/1/8")]
    found = sources(tmp_path, rows, [Use(job, 0, "actor", 2, 1) for job in ("math/0/7", "math/1/8")])
    batch = trace_batch(found, asked_of("actor:2"))
    assert batch is not None
    assert (batch["step"], batch["version"], batch["cut_s"], batch["train_s"]) == (2, 1, 1060.0, 4.0)
    assert [(one["job"], one["tries"], one["took_s"]) for one in batch["jobs"]] == [
        ("math/0/7", 3, 55.0),
        ("math/1/8", 3, 55.0),
    ]
    assert trace_batch(found, asked_of("3")) is None
    assert [(one["job"], one["reward_mean"]) for one in trace_prompt(found, asked_of("math/7"))] == [
        ("math/0/7", 0.5),
        ("math/1/7", 1.0),
    ]


def test_a_batch_by_its_number_alone_is_one_subscriptions(tmp_path: Path) -> None:
    rows = [sample("math/0/7"), sample("math/1/7", lane="eval"), sample("math/1/8")]
    uses = [Use("math/0/7", 0, "actor", 2, 1), Use("math/1/7", 0, "absent", 2, 5), Use("math/1/8", 0, "critic", 4, 3)]
    found = sources(tmp_path, rows, uses)

    def told(text: str) -> tuple[str, int, list[str]]:
        batch = trace_batch(found, asked_of(text))
        assert batch is not None
        return batch["subscription"], batch["version"], [one["job"] for one in batch["jobs"]]

    assert told("2") == told("actor:2") == ("actor", 1, ["math/0/7"])
    assert told("absent:2") == ("absent", 5, ["math/1/7"])
    assert told("4") == ("critic", 3, ["math/1/8"])


def test_of_a_batch_that_is_too_large_it_is_said_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [sample(f"math/0/{line}") for line in range(3)]
    found = sources(tmp_path, rows, [Use(row.job, 0, "actor", 2, 1) for row in rows])
    monkeypatch.setattr("penstock.console.read.trace.MOST_SAMPLES", 2)
    batch = trace_batch(found, asked_of("actor:2"))
    assert batch is not None
    assert (len(batch["jobs"]), batch["problems"]) == (2, ["It has 3 samples: 2 of them are shown."])


def test_what_can_be_traced() -> None:
    assert asked_of("d/0/1") == Asked(job="d/0/1")
    assert asked_of("d/0/1/2.3") == Asked(job="d/0/1", sample="d/0/1/2.3")
    assert asked_of("d/12") == Asked(dataset="d", line=12)
    assert asked_of("12") == Asked(batch=12)
    assert asked_of("actor:12") == Asked(batch=12, subscription="actor")


@pytest.mark.parametrize("text", ["", "d", "d/x/1", "a/b/c/d/e", "-1", "1:", ":1", "a b:1", "d/0/1/2.x", "9" * 30])
def test_what_cannot_be_traced_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot trace"):
        asked_of(text)
