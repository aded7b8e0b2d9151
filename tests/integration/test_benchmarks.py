"""Each benchmark that needs no engine and no peer, at its smallest, as its user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALLEST = {
    "trajectory_path": (
        ["--legs", "bare,penstock,history", "--groups", "64", "--rounds", "1", "--tokens", "128"],
        ["samples_per_s", "ratio_bare", "ratio_history", "ratio_transferqueue_best"],
    ),
    "scale": (
        ["--jobs", "1000", "--groups", "100", "--cycles", "2"],
        ["slowdown_max", "bytes_per_job", "bytes_per_group"],
    ),
    "buffer": (["--samples", "1000", "--count", "2"], ["cut_slowdown", "ingest_per_s", "bytes_per_sample"]),
    "balance": ([], ["seconds", "imbalance"]),
    "rewards": (
        ["--checks", "3", "--quick", "20", "--hang-checks", "11", "--rate", "20", "--pairs", "2"],
        ["pool_overhead_p50_ms", "jail_adds_p50_ms", "hangs_p50_ratio", "hangs_p99_ratio", "hangs_p99_null"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_prints_its_table_and_writes_its_keys(name: str, tmp_path: Path) -> None:
    sizes, keys = SMALLEST[name]
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{keys[0]} = " in done.stdout
    figures = json.loads(file.read_text())
    assert set(keys) | {"machine", "versions", "command", "rows"} <= set(figures)
    assert figures["versions"]["python"]
    assert figures[keys[0]] > 0
