"""What an engine says of its tokens, over a span of time."""

from pathlib import Path

import pytest

from benchmarks.steady import DecodeLog

LINE = (
    "[2026-01-01 00:00:00] Decode batch, #running-req: {many}, #token: 900, token usage: 0.01, cuda graph: True, "
    "gen throughput (token/s): {rate}, #queue-req: 0\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "engine.log"
    file.write_text("$ python -m sglang.launch_server\n")
    return file


def test_a_line_is_taken_once_it_is_whole(file: Path) -> None:
    log, line = DecodeLog(file), LINE.format(many=64, rate=1234.5)

    with file.open("a") as out:
        out.write(line[:40])
    log.read()
    assert log.lines == []
    with file.open("a") as out:
        out.write(line[40:] + "[2026-01-01 00:00:00] Prefill batch, #new-seq: 8\n")
    log.read()

    assert [(many, rate) for _, many, rate in log.lines] == [(64, 1234.5)]
    log.close()


def test_each_line_counts_for_the_time_that_it_tells_of(file: Path) -> None:
    log = DecodeLog(file)
    log.lines = [(0.0, 8, 999.0), (2.0, 8, 100.0), (4.0, 4, 300.0), (6.0, 4, 999.0)]

    assert log.between(1.0, 4.0) == pytest.approx(((100.0 + 2 * 300.0) / 3, (8 + 2 * 4) / 3))
    log.close()


def test_of_a_time_without_lines_there_is_no_rate(file: Path) -> None:
    log = DecodeLog(file)
    log.lines = [(0.0, 8, 100.0), (1.0, 8, 100.0)]

    assert log.between(2.0, 3.0) == (0.0, 0.0)
    log.close()
