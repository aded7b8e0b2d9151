"""What the pages say of a measurement is what its file in benchmarks/results says: a new file wants a new sentence."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS, HISTORY, OPERATIONS = "docs/benchmarks.md", "docs/history.md", "docs/operations.md"
REWARDS = "cpu2-rewards.json"


@pytest.mark.parametrize(
    ("page", "file", "sentence"),
    [
        ("README.md", "h200-digits.json", "from {accuracy_first:.2f} to {accuracy_last:.2f} of the held-out prompts"),
        ("README.md", "h200-digits.json", "({seconds:.0f} s, {seconds_of_engine_start} of them SGLang's start"),
        ("README.md", "h100x2-publish.json", "stood still for {blocked_s[1.5b]:.2f} s at each publication by NCCL, "),
        ("README.md", "h100x2-publish.json", "{send_s[1.5b]:.2f} s of it the send; with the folder"),
        ("README.md", "h100x2-publish.json", "it was {blocked_folder_first_s[1.5b]:.1f} s ("),
        (BENCHMARKS, "h200-engine_overhead.json", "{tokens_per_s:,.0f} tokens/s through penstock, "),
        (BENCHMARKS, "h200-engine_overhead.json", "{direct_tokens_per_s:,.0f} by the direct client: {ratio:.2f}"),
        (BENCHMARKS, "h200-memory.json", "{offload_s[all]:.1f} s, back with the newest weights in {onload_s[all]:.1f}"),
        (BENCHMARKS, "cpu2-scale.json", "10^5 groups | {slowdown_max:.2f} |"),
        (BENCHMARKS, "cpu2-scale.json", "{bytes_per_job:.0f} per job, {bytes_per_group:,.0f} per group of 8"),
        (BENCHMARKS, "cpu2-buffer.json", "slowdown {cut_slowdown:.2f} (worst sampler)"),
        (BENCHMARKS, "cpu2-buffer.json", "| {ingest_per_s:,.0f} samples/s; leader"),
        (BENCHMARKS, "cpu2-engine_overhead.json", "which do not tell it from 0.95 | {ratio:.2f} ("),
        (BENCHMARKS, "cpu2-modes.json", "sync {seconds[sync]:.0f}, one_step {seconds[one_step]:.0f}, "),
        (BENCHMARKS, "cpu2-modes.json", ", async {seconds[async]:.0f} ("),
        (BENCHMARKS, "cpu2-on_expiry.json", "mask {mask[lost_share]:.2f}, drop {drop[lost_share]:.2f}"),
        (BENCHMARKS, "cpu2-on_expiry.json", "| 1, {mask[length_ratio]:.2f}, {drop[length_ratio]:.2f};"),
        (BENCHMARKS, "cpu2-history.json", "| {text_ratio} and {random_ratio} |"),
        (BENCHMARKS, "cpu2-history.json", "| {text_rows_per_cpu_s:,} and {random_rows_per_cpu_s:,} rows |"),
        (HISTORY, "cpu2-history.json", "{text_ratio} in the benchmark;"),
        (HISTORY, "cpu2-history.json", "token ids and logprobs are random, {random_ratio}."),
        (HISTORY, "cpu2-history.json", "{text_rows_per_cpu_s:,} and {random_rows_per_cpu_s:,} such rows of 400 tokens"),
        (BENCHMARKS, "cpu2-page.json", "{view_ms_max:.0f} ms, {page_ms_max:.0f} ms"),
        (BENCHMARKS, "h100-delta.json", "{num_versions} versions of a 1.5B shape in bfloat16 on one H100"),
        (BENCHMARKS, "h100-delta.json", "{restarts[worker]} kills of the worker, one new trainer"),
        (BENCHMARKS, "h100-delta.json", "| {bytes_share:.2%} (at most {bytes_share_max:.2%}), every copy"),
        (BENCHMARKS, "h100-delta.json", "with the {num_anchors} versions that are there whole"),
        (BENCHMARKS, "cpu2-delta_format.json", "{rows[7][bytes_share]:.2%} and {rows[8][bytes_share]:.1%}, float32 "),
        (BENCHMARKS, "cpu2-delta_format.json", "and {rows[11][bytes_share]:.1%}; before zstandard"),
        (BENCHMARKS, "cpu2-delta_format.json", "; before zstandard {rows[0][write_cpu_s_per_gib]:.1f} and "),
        (BENCHMARKS, "cpu2-delta_format.json", "{rows[6][apply_cpu_s_per_gib]:.1f}, "),
        (BENCHMARKS, "cpu2-delta_format.json", "{rows[8][write_cpu_s_per_gib]:.1f} and "),
        (BENCHMARKS, "h100x2-publish.json", "0.5B shape: `publish` blocks {blocked_s[0.5b]:.3f} s, median of "),
        (BENCHMARKS, "h100x2-publish.json", "1.5B shape: {blocked_s[1.5b]:.3f} s, median of "),
        (BENCHMARKS, "h100x2-publish.json", "first {blocked_folder_first_s[0.5b]:.2f} s), {send_s[0.5b]:.3f} s of it"),
        (BENCHMARKS, "h100x2-publish.json", "in the pause {tokens_lost_in_pause[0.5b]:,.0f} (95"),
        (BENCHMARKS, "h100x2-publish.json", ") and {tokens_lost_in_pause[1.5b]:,.0f} ("),
        (BENCHMARKS, "h100x2-publish-before.json", "{blocked_s[0.5b]:.3f} and {blocked_s[1.5b]:.3f} s), and"),
        (BENCHMARKS, "h100-publish.json", "| {blocked_s[1.5b]:.3f} s, median of "),
        (BENCHMARKS, "h100-publish.json", "the send {send_s[1.5b]:.3f} s; tokens lost {tokens_lost[1.5b]:,.0f} ("),
        (BENCHMARKS, "h100x2-timeline.json", "in the pause {lost_in_pause[pause]:,.0f}"),
        (BENCHMARKS, "h100-delta.json", "{tokens_lost[disk]:,.0f} (2 updates), by delta {tokens_lost[delta]:,.0f}"),
        (BENCHMARKS, REWARDS, "| {pool_overhead_p50_ms:.1f} ms; {jail_adds_p50_ms[bwrap]:.1f} and "),
        (BENCHMARKS, REWARDS, "{jail_adds_p50_ms[bwrap]:.1f} and {jail_adds_p50_ms[filters]:.1f} ms"),
        (BENCHMARKS, REWARDS, "{pairs} pairs of legs"),
        (BENCHMARKS, REWARDS, "{hangs_p50_ratio:.2f} ({hangs_p50_ratio_low:.3f} to {hangs_p50_ratio_high:.2f})"),
        (BENCHMARKS, REWARDS, "{hangs_p99_ratio:.2f} ({hangs_p99_ratio_low:.3f} to {hangs_p99_ratio_high:.2f})"),
        (OPERATIONS, "chaos/slowdown.jsonl", "trained {ratio:.2f} of the groups"),
    ],
)  # fmt: skip
def test_a_figure_is_that_of_its_file(page: str, file: str, sentence: str) -> None:
    last: dict[str, Any] = json.loads(_last(RESULTS / file))
    said = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert sentence.format(**last).replace("%", " %").strip() in said


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("h100-timeline.json", "in `h100-timeline` {share:.0%} of all bins of 50 ms lie in holes of 0.25 s and more"),
        ("h100x2-timeline.json", "In `h100x2-timeline`, where it was, {share:.1%} of the bins lie in such holes"),
    ],
)
def test_so_many_bins_lie_in_holes_as_the_page_says(file: str, sentence: str) -> None:
    events = json.loads((RESULTS / file).read_text(encoding="utf-8"))["events"]
    bins = [event["before"] + event["bins"] for event in events]
    runs = [len(list(run)) for one in bins for empty, run in itertools.groupby(one, key=lambda n: n == 0) if empty]
    share = sum(run for run in runs if run >= 5) / sum(map(len, bins))
    said = " ".join((ROOT / BENCHMARKS).read_text(encoding="utf-8").split())
    assert sentence.format(share=share).replace("%", " %") in said


def _last(file: Path) -> str:
    """The map in a file, or on its last line."""
    text = file.read_text(encoding="utf-8")
    return text.splitlines()[-1] if file.suffix == ".jsonl" else text


def test_the_deltas_are_as_small_as_the_page_of_trainers_says() -> None:
    rows = json.loads((RESULTS / "h100-delta.json").read_text(encoding="utf-8"))["rows"]
    shares = [row["delta_bytes"] / row["full_bytes"] for row in rows if row["delta_bytes"]]
    said = " ".join((ROOT / "docs" / "consumers.md").read_text(encoding="utf-8").split())
    assert f"were {min(shares):.1%} to {max(shares):.1%} of its bytes".replace("% to", " to").replace("%", " %") in said
    whole = [row["full_bytes"] * row["is_anchor"] + row["delta_bytes"] for row in rows]
    assert f"| {sum(whole) / sum(row['full_bytes'] for row in rows):.0%} | |".replace("%", " %") in (
        ROOT / BENCHMARKS
    ).read_text(encoding="utf-8")
