"""What is read of a run is complete, or says what is omitted."""

from pathlib import Path

import pytest

import penstock.workers.fleet.state
from penstock.console.read import timeline as tracks_module
from penstock.console.read import weights
from penstock.console.read.evals import MAX_VERSIONS, answers_to, list_evals, prompts_over_versions
from penstock.console.read.parts import read_fleet
from penstock.console.read.stages import Asked
from penstock.console.read.timeline import tracks
from penstock.console.read.trace import trace_job, trace_prompt
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow
from tests.unit.console.read.trace.samples import sample
from tests.unit.console.read.trace.test_perfetto import sources
from tests.unit.penstock.history.rows import row


def reader(folder: Path, rows: list[SampleRow]) -> HistoryReader:
    samples = HistoryReader(folder / "history")
    samples.show_too(rows)
    return samples


def test_every_evaluated_version_is_listed_and_answers_are_complete(tmp_path: Path) -> None:
    versions = 5000
    samples = reader(tmp_path, [row(f"held/{version}/0", lane="eval", pieces={}) for version in range(versions)])
    assert len(list_evals(samples)) == versions
    assert len(answers_to(samples, "held", 0)) == versions


def test_prompts_over_versions_say_how_many_versions_they_leave_out(tmp_path: Path) -> None:
    samples = reader(tmp_path, [row(f"held/{version}/0", lane="eval") for version in range(MAX_VERSIONS + 3)])
    found = prompts_over_versions(samples, "held")
    assert (len(found["versions"]), found["versions_omitted"]) == (MAX_VERSIONS, 3)
    assert prompts_over_versions(reader(tmp_path, [row("held/1/0", lane="eval")]), "held")["versions_omitted"] == 0


def test_a_prompt_is_traced_through_all_jobs_that_asked_it(tmp_path: Path) -> None:
    found = trace_prompt(sources(tmp_path, [row(f"math/{epoch}/7") for epoch in range(250)]), Asked("", "", "math", 7))
    assert len(found) == 250


def test_a_job_is_traced_with_all_its_samples(tmp_path: Path) -> None:
    found = trace_job(sources(tmp_path, [sample(k=k) for k in range(1100)]), "math/0/7")
    assert found is not None
    assert len(found["samples"]) == 1100


def test_a_span_with_too_many_samples_says_that_some_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    tracks(sources(tmp_path, [sample(f"math/0/{line}") for line in range(600)]), 1000.0, 1100.0, problems)
    assert problems == []
    monkeypatch.setattr(tracks_module, "MOST_SAMPLES", 300)
    tracks(sources(tmp_path, [sample(f"math/0/{line}") for line in range(600)]), 1000.0, 1100.0, problems)
    assert problems == [
        "The span has more than 300 samples: the latest 300 are shown; name a shorter span to see the others."
    ]


def test_a_fleet_shows_all_its_processes_and_all_decisions_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "host": "h", "age_s": 0.5, "groups": {}, "endpoints": {},
        "processes": [{"name": f"p{number}"} for number in range(2500)],
        "autoscale": {"decisions": [{"at": number} for number in range(150)]},
    }  # fmt: skip
    monkeypatch.setattr(penstock.workers.fleet.state, "read_state", lambda *_: state)
    found = read_fleet(None, None)  # type: ignore[arg-type]
    assert found is not None
    assert (len(found["processes"]), len(found["decisions"])) == (2500, 150)


def test_the_size_of_a_folder_of_weights_counts_every_file(tmp_path: Path) -> None:
    for number in range(10_100):
        (tmp_path / str(number)).write_bytes(b"x")
    assert weights._size(str(tmp_path)) == 10_100
