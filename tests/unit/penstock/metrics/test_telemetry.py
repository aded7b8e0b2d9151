"""Spans as a part tells them: the same ids everywhere, to a file or a collector, and nothing waits for either."""

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import text
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.metrics import telemetry
from penstock.metrics.telemetry import NoSpans, name_of, open_spans
from tests.missing import module


@pytest.fixture(autouse=True)
def _opentelemetry() -> None:
    module("opentelemetry.sdk.trace")


def config_of(traces: str | None, **telemetry: Any) -> Config:
    values = {"run": "r", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    return Config.model_validate(values | {"telemetry": {"traces": traces} | telemetry})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nobody_asked_and_nothing_is_loaded() -> None:
    assert isinstance(open_spans(config_of(None), "worker"), NoSpans)


def test_spans_of_several_parts_are_one_tree(tmp_path: Path) -> None:
    config = config_of(str(tmp_path / "spans.jsonl"))
    for part in ("worker", "producer"):  # whoever is first
        spans = open_spans(config, part, "one")
        if part == "producer":
            spans.add("d/0/0", telemetry.ROOT, 1.0, 2.0, lane="train")
        else:
            spans.add("d/0/0", "attempt", 2.0, 4.0, of="tok")
            spans.add("d/0/0", "reward", 3.0, 1.0, of="tok/0", under=name_of("attempt", "tok"), sample="d/0/0/0")
            spans.add("d/0/1", "attempt", 2.0, 4.0, of="tok")
        spans.close()
    attempt, reward, other, root = lines(tmp_path / "spans.jsonl")
    assert {one["context"]["trace_id"] for one in (attempt, reward, root)} == {root["context"]["trace_id"]}
    assert other["context"]["trace_id"] != root["context"]["trace_id"]
    assert root["parent_id"] is None
    assert attempt["parent_id"] == root["context"]["span_id"]
    assert reward["parent_id"] == attempt["context"]["span_id"]
    assert reward["start_time"] == reward["end_time"], "a clock that went back makes no span of less than nothing"
    assert root["attributes"] == {"penstock.job": "d/0/0", "penstock.lane": "train"}
    about = root["resource"]["attributes"]
    assert about == {"service.name": "penstock", "service.instance.id": "producer one", "penstock.run": "r"}


def test_every_part_chooses_the_same_share_of_the_jobs(tmp_path: Path) -> None:
    chosen = []
    for part in ("worker", "buffer"):
        path = tmp_path / part
        spans = open_spans(config_of(str(path), share=0.3), part)
        for index in range(400):
            spans.add(f"d/0/{index}", part, 1.0, 2.0)
        spans.close()
        chosen.append({one["attributes"]["penstock.job"] for one in lines(path)})
    assert chosen[0] == chosen[1]
    assert 60 < len(chosen[0]) < 180


def test_a_collector_that_is_not_there_is_told_once_and_waited_for_by_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "EVERY_S", 0.01)
    monkeypatch.setattr(telemetry, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(telemetry, "MAX_SENT", 8)
    caplog.set_level(logging.INFO)
    spans = open_spans(config_of("http://127.0.0.1:1"), "worker")
    began = time.process_time()
    for index in range(64):
        spans.add(f"d/0/{index}", "attempt", 1.0, 2.0)
    assert time.process_time() - began < 5
    spans.close()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["spans cannot be sent to http://127.0.0.1:1 (telemetry.traces), and are left out"]


def test_a_file_that_cannot_be_written_is_refused_and_one_that_is_full_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.traces: .* cannot be written"):
        open_spans(config_of(str(tmp_path)), "worker")
    monkeypatch.setattr(telemetry, "MAX_FILE_BYTES", 10)
    spans = open_spans(config_of(str(tmp_path / "spans.jsonl")), "worker")
    spans.add("d/0/0", "attempt", 1.0, 2.0)
    spans.close()
    assert (tmp_path / "spans.jsonl").read_text() == ""
    assert "it would have more than 10 bytes" in caplog.text


def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"telemetry\.traces: .*pipe cannot be written \(No such device or address\)"):
        open_spans(config_of(str(pipe)), "worker")
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        spans = open_spans(config_of(str(pipe)), "worker")
        spans.add("d/0/0", "attempt", 1.0, 2.0)
        spans.close()
        assert json.loads(reader.readline())["name"] == "attempt"


def test_a_span_of_a_time_that_is_none_is_left_out(tmp_path: Path) -> None:
    spans = open_spans(config_of(str(tmp_path / "spans.jsonl")), "worker")
    for time_s in (math.nan, math.inf, -math.inf, -1.0, 1e300, 2.0**70):
        spans.add("d/0/0", "attempt", time_s, 2.0)
        spans.add("d/0/0", "attempt", 1.0, time_s)
    spans.add("d/0/0", "attempt", 1.0, 2.0)
    spans.close()
    assert [one["end_time"] for one in lines(tmp_path / "spans.jsonl")] == ["1970-01-01T00:00:02.000000Z"]


@pytest.mark.parametrize("traces", ["", "http://", "ftp://host", "https://user:secret@host", "http://host:0"])
def test_what_spans_cannot_be_sent_to_is_refused(traces: str) -> None:
    with pytest.raises(ValueError, match=r"telemetry\.traces is") as refused:
        config_of(traces)
    assert "secret@host" not in str(refused.value.errors()[0]["msg"])  # type: ignore[attr-defined]


def test_passwords_of_a_collector_are_masked_wherever_they_turn_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(text, "_known", [])
    # The second is none that the library can read, and it says so with all of it.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hush%20one,Bearer hush-two")
    open_spans(config_of("http://127.0.0.1:1"), "worker").close()
    assert "Bearer hush-two" in caplog.text
    shown = text.redact(f"{caplog.text} api-key: hush one, or hush%20one")
    assert "hush" not in shown
