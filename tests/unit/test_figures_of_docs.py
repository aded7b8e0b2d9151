"""What the pages say of a measurement is what its file in benchmarks/results says: a new file wants a new sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS, OPERATIONS = "docs/benchmarks.md", "docs/operations.md"


@pytest.mark.parametrize(
    ("page", "file", "sentence"),
    [
        ("README.md", "h200-digits.json", "on one H200: from {accuracy_first:.2f} to {accuracy_last:.2f} in 60 steps"),
        ("README.md", "h200-digits.json", "({seconds:.0f} s, including {seconds_of_engine_start} s of SGLang startup"),
        ("README.md", "h100x2-publish.json", "on two H100s with NCCL: {blocked_s[1.5b]:.2f} s, "),
        ("README.md", "h100x2-publish.json", "including {send_s[1.5b]:.2f} s for the send; "),
        ("README.md", "h100x2-publish.json", "; {blocked_folder_first_s[1.5b]:.1f} s if the folder is written first"),
        (BENCHMARKS, "cpu2-trajectory_path.json", "{samples_per_s:,.0f} samples/s; {ratio_bare:.2f} times "),
        (BENCHMARKS, "cpu2-trajectory_path.json", ": {ratio_bare_low:.2f} to {ratio_bare_high:.2f}) the rate "),
        (BENCHMARKS, "cpu2-trajectory_path.json", "{ratio_transferqueue_8:.2f} times that of TransferQueue at 8 "),
        (BENCHMARKS, "cpu2-trajectory_path.json", "{ratio_transferqueue_64:.2f} times at 64 |"),
        (BENCHMARKS, "cpu2-scale.json", "worst slowdown {slowdown_max:.2f}; {bytes_per_job:.0f} bytes per job, "),
        (BENCHMARKS, "cpu2-scale.json", "{bytes_per_group:,.0f} per group of 8"),
        (BENCHMARKS, "cpu2-buffer.json", "slowdown {slowdown[p50_ms]:.2f}; by priority {cut_slowdown:.1f}, "),
        (BENCHMARKS, "cpu2-trainer_wait.json", "| {share:.2%}, including {agree_share:.2%} for each other |"),
        (BENCHMARKS, "cpu2-balance.json", "| {seconds:.3f} s, {imbalance:.0e} |"),
        (BENCHMARKS, "cpu2-worker_cpu.json", "| {rows[3][ms_per_sample]:.2f}, {rows[4][ms_per_sample]:.2f} and "),
        (BENCHMARKS, "cpu2-worker_cpu.json", "{rows[5][ms_per_sample]:.2f} ms |"),
        (BENCHMARKS, "cpu2-engine_overhead.json", "| {ratio:.2f} (rounds "),
        (BENCHMARKS, "h200-engine_overhead.json", "{tokens_per_s:,.0f} tokens/s through penstock, "),
        (BENCHMARKS, "h200-engine_overhead.json", "{direct_tokens_per_s:,.0f} by the direct client: {ratio:.2f}"),
        (BENCHMARKS, "h100-engine_rate.json", "| {engine_share[penstock]:.2f} (95"),
        (BENCHMARKS, "cpu2-agents.json", "| {ratio:.1f} times the tokens/s |"),
        (BENCHMARKS, "h100x2-publish.json", "0.5B: {blocked_s[0.5b]:.3f} s, {blocked_folder_first_s[0.5b]:.2f} s; "),
        (BENCHMARKS, "h100x2-publish.json", "1.5B: {blocked_s[1.5b]:.3f} s, {blocked_folder_first_s[1.5b]:.2f} s |"),
        (BENCHMARKS, "h100-publish.json", "1.5B: {blocked_s[1.5b]:.3f} s, {blocked_folder_first_s[1.5b]:.2f} s |"),
        (BENCHMARKS, "h100x2-publish.json", "| {tokens_lost_in_pause[0.5b]:,.0f} (0.5B), "),
        (BENCHMARKS, "h100x2-publish.json", ", {tokens_lost_in_pause[1.5b]:,.0f} (1.5B) |"),
        (BENCHMARKS, "h200-weights.json", "disk {pause_s[in_place/disk]:.2f}, {pause_s[abort/disk]:.2f}, "),
        (BENCHMARKS, "h200-weights.json", "CUDA IPC {pause_s[in_place/cuda_ipc]:.2f}, {pause_s[abort/cuda_ipc]:.2f}, "),
        (BENCHMARKS, "h200-memory.json", "| {offload_s[all]:.1f} s, {onload_s[all]:.1f} s |"),
        (BENCHMARKS, "h100-delta.json", "{num_versions} versions of a 1.5B shape"),
        (BENCHMARKS, "h100-delta.json", "| {bytes_share:.2%} (at most {bytes_share_max:.2%}), every copy bit-equal; "),
        (BENCHMARKS, "h100-delta.json", "with {num_anchors} complete versions 9% |"),
        (BENCHMARKS, "cpu2-delta_format.json", "| {rows[6][bytes_share]:.2%}, {rows[7][bytes_share]:.2%}, "),
        (BENCHMARKS, "cpu2-delta_format.json", "{rows[7][bytes_share]:.2%}, {rows[8][bytes_share]:.1%} |"),
        (BENCHMARKS, "h200x2-async.json", "| {trainer_wait_share:.2f}; staleness at most {staleness_max} |"),
        (BENCHMARKS, "h200-trainer_step-1.5b.json", "| {trainer_step_s:.2f} s, {mfu:.2f} of the GPU's peak |"),
        (BENCHMARKS, "h100-finite_check.json", "0.5B: {rows[0][check_ms]:.1f} ms, 1.5B: {rows[1][check_ms]:.1f} ms"),
        (BENCHMARKS, "cpu2-modes.json", "sync {seconds[sync]:.0f}, one_step {seconds[one_step]:.0f}, "),
        (BENCHMARKS, "cpu2-modes.json", ", async {seconds[async]:.0f} |"),
        (BENCHMARKS, "cpu2-on_expiry.json", "mask {mask[lost_share]:.2f}, drop {drop[lost_share]:.2f} |"),
        (BENCHMARKS, "cpu2-corrections.json", "| bypass {last_bypass:.2f}, decoupled {last_decoupled:.2f} |"),
        (BENCHMARKS, "h200-instruct.json", "{held_out_final:.2f}; TRL after 20 steps at least {lowest_trl_final:.2f}"),
        (BENCHMARKS, "cpu2-history.json", "| {text_ratio} and {random_ratio}; "),
        (BENCHMARKS, "cpu2-history.json", "; {text_rows_per_cpu_s:,} and {random_rows_per_cpu_s:,} rows |"),
        (BENCHMARKS, "cpu2-history_cost.json", "| {ratio:.2f} (95%: {ratio_low:.2f} to {ratio_high:.2f}) |"),
        (BENCHMARKS, "cpu2-rewards.json", "| {pool_overhead_p50_ms:.1f} ms; {jail_adds_p50_ms[bwrap]:.1f} and "),
        (BENCHMARKS, "cpu2-rewards.json", "{jail_adds_p50_ms[filters]:.1f} ms |"),
        (BENCHMARKS, "cpu2-page.json", "| {view_ms_max:.0f} ms, {page_ms_max:.0f} ms |"),
        (BENCHMARKS, "chaos/slowdown.jsonl", "| {ratio:.2f} | `python -m tests.chaos.slowdown`"),
        (OPERATIONS, "chaos/slowdown.jsonl", "trained {ratio:.2f} of the groups"),
    ],
)  # fmt: skip
def test_a_figure_is_that_of_its_file(page: str, file: str, sentence: str) -> None:
    last: dict[str, Any] = json.loads(_last(RESULTS / file))
    said = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert sentence.format(**last).replace("%", " %").strip() in said


@pytest.mark.parametrize(
    "row", [line for line in (ROOT / BENCHMARKS).read_text().splitlines() if ".json" in line and line.startswith("| ")]
)
def test_a_row_has_the_command_of_its_file(row: str) -> None:
    _, _, command, files = (cell.strip() for cell in row.strip("|").split("|"))
    if command == "as above" or files.endswith(".jsonl`"):
        return
    for name in re.findall(r"`([^`]+)`", files):
        recorded = json.loads((RESULTS / name).read_text(encoding="utf-8"))["command"]
        assert recorded.startswith(command.strip("`"))


def _last(file: Path) -> str:
    """The map in a file, or on its last line."""
    text = file.read_text(encoding="utf-8")
    return text.splitlines()[-1] if file.suffix == ".jsonl" else text


def test_the_deltas_are_as_small_as_the_page_of_workers_says() -> None:
    rows = json.loads((RESULTS / "h100-delta.json").read_text(encoding="utf-8"))["rows"]
    shares = [row["delta_bytes"] / row["full_bytes"] for row in rows if row["delta_bytes"]]
    said = " ".join((ROOT / "docs" / "workers.md").read_text(encoding="utf-8").split())
    assert f"were {min(shares):.1%} to {max(shares):.1%} of its bytes".replace("% to", " to").replace("%", " %") in said
    whole = [row["full_bytes"] * row["is_anchor"] + row["delta_bytes"] for row in rows]
    assert f"complete versions {sum(whole) / sum(row['full_bytes'] for row in rows):.0%} |".replace("%", " %") in (
        ROOT / BENCHMARKS
    ).read_text(encoding="utf-8")
