"""The history of a run: bytes of a row beside its raw payload, rows written a second, and the time of a question.

Rows of groups of 8 samples. Sizes and rows a second are of prompts of 100 tokens and answers of 300, of two kinds:

- text: words drawn by Zipf's law from 30,000, each spelled by one to three of 60,000 tokens; six in ten tokens were
  drawn with a probability near 1, the others with any.
- random: each token any of 150,000, drawn with any probability: nothing is gained but by keeping each value in as few
  bits as it needs.

No two neighbours are alike, so nothing is gained from repetition that a real policy's answers have. The raw payload is
what a worker hands in of a sample: int32 tokens, float32 logprobs, masks and versions.

Rows a second are those of the files' writer alone: a recorder also reads records and payloads from Redis.

Questions are asked of rows of the first kind with prompts of 24 tokens and answers of 72, by a reader that has just
opened the files, several times; the median counts, in all and of the processor alone. So the files are in the kernel's
cache, and a first question after a long while takes longer by what the disk needs. The same rows are once in one file,
once in many. A command is ``penstock samples ls`` with the start of its process.

    python -m benchmarks.history --samples 1000000 --folder DIR --json FILE
"""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import Report, execute, median, versions
from penstock.history.blocks import Piece
from penstock.history.filters import Filters, Sort
from penstock.history.part import parts_of
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow, Use
from penstock.history.writer import HistoryWriter
from penstock.payloads import encode
from penstock.records.job import Job
from penstock.records.sample import Sample

GROUP = 8
#: Tokens of a prompt and of an answer: of rows whose size is measured, and of those that are asked for.
LONG, SHORT = (100, 300), (24, 72)
NUM_WORDS, NUM_TOKENS, NUM_RANDOM = 30_000, 60_000, 150_000
#: Distinct samples, which are used in turns; rows of one commit; and of one version.
DISTINCT, COMMIT, VERSION = 2048, 2048, 50_000
ROUNDS = 5
#: Rows whose size is measured.
SIZED_ROWS = 16_384
#: The 10^6 rows are in about so many files.
PARTS = 24


def main(
    samples: Annotated[int, typer.Option(help="Rows.")] = 100_000,
    folder: Annotated[Path | None, typer.Option(help="Where files are made, and used again; a temporary one.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the result.")] = None,
) -> None:
    """Write histories and ask them."""
    columns = {
        "question": "question",
        "one_ms": "one file, ms",
        "one_cpu_ms": "of the processor",
        "many_ms": "many files, ms",
        "many_cpu_ms": "of the processor",
    }
    report = Report(f"history of {samples:,} samples", columns)
    report.versions = versions()
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")) if folder is None else folder
        _measure(Path(made), samples, report)
    report.finish(json)


def _measure(folder: Path, samples: int, report: Report) -> None:
    rng = np.random.default_rng(0)
    for name in ("text", "random"):
        _sizes(Kind(name, rng, LONG), folder / name, report)
    one, many = folder / f"one-{samples}", folder / f"many-{samples}"
    asked = Kind("text", rng, SHORT)
    if not many.exists():
        _write({one: 2**50, many: 400 * samples // PARTS}, asked, samples)
    report.keys["parts"] = len(parts_of(many / "history"))
    questions: list[tuple[str, Callable[[Path], tuple[float, float]]]] = [
        (name, partial(_asked, filters=filters, sort=sort)) for name, filters, sort in _questions(samples)
    ]
    for arguments in (["--fate", "filtered", "--best"], ["--text", f'"{asked.phrase}"'], ["--worst", "--version", "3"]):
        questions.append((f"penstock samples ls {' '.join(arguments)}", partial(_command, arguments=arguments)))
    for question, ask in questions:
        (wall, cpu), (of_many, cpu_of_many) = ask(one), ask(many)
        report.rows.append(
            {"question": question, "one_ms": wall, "one_cpu_ms": cpu, "many_ms": of_many, "many_cpu_ms": cpu_of_many}
        )
    report.notes.append(f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.")


def _sizes(kind: "Kind", folder: Path, report: Report) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    took, used = _write({folder: 2**50}, kind, SIZED_ROWS)
    size = _size_of(folder) / SIZED_ROWS
    report.keys[f"{kind.name}_rows_per_s"] = round(SIZED_ROWS / took)
    report.keys[f"{kind.name}_rows_per_cpu_s"] = round(SIZED_ROWS / used)
    report.keys[f"{kind.name}_row_bytes"] = round(size)
    report.keys[f"{kind.name}_raw_bytes"] = round(kind.raw_bytes)
    report.keys[f"{kind.name}_ratio"] = round(size / kind.raw_bytes, 3)


def _size_of(folder: Path) -> int:
    return sum(one.stat().st_size for one in (folder / "history").iterdir())


def _questions(samples: int) -> list[tuple[str, Filters, Sort]]:
    last = samples // VERSION
    return [
        ("the latest", Filters(), Sort.RECORDED),
        ("best rewarded", Filters(), Sort.REWARD),
        ("longest", Filters(), Sort.LENGTH),
        ("a batch", Filters(batch=3), Sort.RECORDED),
        ("a prompt", Filters(job=f"math/0/{samples // GROUP // 2}"), Sort.RECORDED),
        ("a version, best", Filters(version=last // 2), Sort.REWARD),
        ("rewards from 0.5 to 0.6", Filters(least_reward=0.5, most_reward=0.6), Sort.RECORDED),
        ("rewards from 0.5 to 0.6, longest", Filters(least_reward=0.5, most_reward=0.6), Sort.LENGTH),
        ("filtered, best", Filters(fate="filtered"), Sort.REWARD),
        ("filtered and rewarded: none", Filters(fate="filtered", least_reward=0.9999), Sort.RECORDED),
        ("of the first version, filtered", Filters(fate="filtered", version=0), Sort.RECORDED),
        (
            "trained, of a version, from 0.5 to 0.6, best",
            Filters(fate="trained", version=1, most_reward=0.6),
            Sort.REWARD,
        ),
        ("of a subscription that took none: all rows", Filters(subscription="other"), Sort.RECORDED),
        ("text: a rare word", Filters(text="uniqueword"), Sort.RECORDED),
        ("text: a common word", Filters(text=_word(0)), Sort.RECORDED),
        ("text: two words", Filters(text=f"{_word(900)} {_word(1500)}"), Sort.RECORDED),
        ("text: a common word, best", Filters(text=_word(0)), Sort.REWARD),
        ("text: two words, filtered, best", Filters(text=f"{_word(90)} {_word(150)}", fate="filtered"), Sort.REWARD),
        ("text: of the prompt, best", Filters(prompt=f"{_word(900)} {_word(500)}"), Sort.REWARD),
    ]


def _asked(folder: Path, filters: Filters, sort: Sort) -> tuple[float, float]:
    """Milliseconds that a page of 50 rows took, and those of the processor; opening apart."""
    walls, cpus = [], []
    for _ in range(ROUNDS):
        with contextlib.closing(HistoryReader(folder / "history")) as reader:
            reader.row("none/0/0/0")
            began, used = time.monotonic(), time.process_time()
            reader.rows(filters, sort)
            cpus.append(time.process_time() - used)
            walls.append(time.monotonic() - began)
    return _ms(walls), _ms(cpus)


def _command(folder: Path, arguments: list[str]) -> tuple[float, float]:
    """The same of a command, from the start of its process to its end."""
    command = [str(Path(sys.executable).with_name("penstock")), "samples", "ls", "--run", folder.name, *arguments]
    walls, cpus = [], []
    for _ in range(ROUNDS):
        began, used = time.monotonic(), _of_children()
        subprocess.run([*command, "--directory", str(folder.parent)], check=True, stdout=subprocess.DEVNULL)
        cpus.append(_of_children() - used)
        walls.append(time.monotonic() - began)
    return _ms(walls), _ms(cpus)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ms(seconds: list[float]) -> float:
    return round(1000 * median(seconds), 1)


def _write(folders: Mapping[Path, int], kind: "Kind", samples: int) -> tuple[float, float]:
    """Runs with the same history, by the most bytes of a file; seconds that writing took, and of the processor."""
    unfinished = {folder: folder.with_name(f"{folder.name}.unfinished") for folder in folders}
    took = used = 0.0
    with contextlib.ExitStack() as stack:
        writers = []
        for folder, part_bytes in folders.items():
            shutil.rmtree(unfinished[folder], ignore_errors=True)
            (unfinished[folder] / "redis").mkdir(parents=True)
            # As `penstock run` leaves it.
            (unfinished[folder] / "run.json").write_text('{"state": "finished", "started_s": 1.0}')
            history = unfinished[folder] / "history"
            writer = HistoryWriter(history, 1, max_bytes=2**50, part_bytes=part_bytes, look_up=kind.pieces)
            writers.append(stack.enter_context(contextlib.closing(writer)))
        for start in range(0, samples, COMMIT):
            rows = [kind.row(at) for at in range(start, min(start + COMMIT, samples))]
            uses = [
                Use(row.job, row.k, "policy", at // COMMIT, version=start // VERSION)
                for at, row in enumerate(rows, start)
            ]
            began, began_cpu = time.monotonic(), time.process_time()
            for writer in writers:
                writer.write(rows, uses)
            took += time.monotonic() - began
            used += time.process_time() - began_cpu
    for folder, made in unfinished.items():
        made.rename(folder)
    return took, used


class Kind:
    """Rows of one kind."""

    def __init__(self, name: str, rng: np.random.Generator, lengths: tuple[int, int]) -> None:
        self.name = name
        self._prompt, self._answer = lengths
        spelling = _spelling(rng) if name == "text" else None
        self._texts = _texts(spelling) if spelling else [f" {_word(one)}" for one in range(NUM_RANDOM)]
        self._pool = [self._sample(rng, spelling) for _ in range(DISTINCT)]
        self.phrase = " ".join(self._pool[5].answer.split()[3:6])
        self.raw_bytes = sum(map(_raw_bytes, self._pool)) / DISTINCT

    def pieces(self, tokens: Collection[int]) -> Mapping[int, Piece]:
        return {one: (self._texts[one].encode(), False) for one in tokens}

    def row(self, at: int) -> SampleRow:
        """The pool's row as one of its own: other ids, rewards and versions; tokens of the prompt as its group has."""
        one, first, version = self._pool[at % DISTINCT], self._pool[at // GROUP * GROUP % DISTINCT], at // VERSION
        assert one.tokens is not None
        assert first.tokens is not None
        assert one.versions is not None
        tokens = one.tokens.copy()
        tokens[: self._prompt] = first.tokens[: self._prompt]
        fields = {name: getattr(one, name) for name in one.__slots__}
        fields |= {
            "job": f"math/0/{at // GROUP}",
            "k": at % GROUP,
            "prompt": first.prompt,
            "answer": one.answer + (" uniqueword" if at == 12_345 else ""),
            "tokens": tokens,
            "is_spelled": at != 12_345,
            "versions": np.where(one.versions < 0, -1, version).astype(np.int32),
            "oldest": version,
            "newest": version,
            "num_generated": at * 40_503 % 4096,
            "reward": (at * 2_654_435_761 % 2**32) / 2**32 if at % 10 else 0.0,
            "fate": "trained" if at % 10 else "filtered",
        }
        return SampleRow(**fields)

    def _sample(self, rng: np.random.Generator, spelling: list[list[int]] | None) -> SampleRow:
        length = self._prompt + self._answer
        generated = (np.arange(length) >= self._prompt).astype(np.uint8)
        tokens = _drawn(rng, spelling, length)
        words = [self._texts[one] for one in tokens]
        return SampleRow(
            "pool/0/0",
            0,
            lane="train",
            prompt="".join(words[: self._prompt]),
            answer="".join(words[self._prompt :]),
            label="42",
            is_spelled=True,
            tokens=np.array(tokens, np.int32),
            logprobs=np.where(generated, np.log(_chances(rng, spelling is not None, length)), 0).astype(np.float32),
            versions=np.where(generated, 0, -1).astype(np.int32),
            generated=generated,
            loss_mask=generated,
            prompt_length=self._prompt,
            num_generated=self._answer,
            reward_info={"format": 1.0},
            status="completed",
            finish_reason="stop",
            worker="worker-0",
            **_TIMES,
        )


_TIMES: dict[str, Any] = {
    "admitted_s": 1_790_000_000.0,
    "leased_s": 1_790_000_001.25,
    "started_s": 1_790_000_001.25,
    "drawn_s": 1_790_000_011.5,
    "committed_s": 1_790_000_012.125,
    "trained_s": 1_790_000_100.75,
    "generate_s": 10.25,
    "reward_s": 0.125,
}


def _drawn(rng: np.random.Generator, spelling: list[list[int]] | None, length: int) -> list[int]:
    if spelling is None:
        return [int(one) for one in rng.integers(0, NUM_RANDOM, length)]
    return [token for word in _zipf(rng, NUM_WORDS, length) for token in spelling[word]][:length]


def _chances(rng: np.random.Generator, is_text: bool, length: int) -> np.ndarray:
    if not is_text:
        return rng.uniform(1e-6, 1, length).astype(np.float32)
    near = 1 - 10 ** rng.uniform(-6, -1.5, length)
    return np.where(rng.random(length) < 0.6, near, rng.uniform(0.02, 1, length)).astype(np.float32)


def _spelling(rng: np.random.Generator) -> list[list[int]]:
    """Tokens of each word: the common ones have one, the others share what they are put together from."""
    shared = iter(rng.integers(0, 2**31, 3 * NUM_WORDS).tolist())
    half = NUM_TOKENS // 2
    return [
        [word]
        if word < half // 4
        else [next(shared) % half, *(half + next(shared) % half for _ in range(1 + word % 2))]
        for word in range(NUM_WORDS)
    ]


def _texts(spelling: list[list[int]]) -> list[str]:
    """What each token stands for: those of the first half begin a word."""
    half = NUM_TOKENS // 2
    return [f" {_word(one)}" if one < half else _word(one)[-3:] for one in range(NUM_TOKENS)]


def _word(number: int) -> str:
    """Three letters or more."""
    letters = ""
    for _ in range(4 if number >= 17_000 else 3):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def _zipf(rng: np.random.Generator, most: int, count: int) -> list[int]:
    """Numbers below ``most``, that of rank r about as often as 1 / r."""
    return [int(one) - 1 for one in most ** rng.random(count)]


def _raw_bytes(row: SampleRow) -> int:
    assert row.tokens is not None
    assert row.logprobs is not None
    assert row.generated is not None
    assert row.loss_mask is not None
    assert row.versions is not None
    sample = Sample(
        Job(row.job, 1),
        row.k,
        tokens=row.tokens.tolist(),
        logprobs=row.logprobs.tolist(),
        generated=row.generated.tolist(),
        loss_mask=row.loss_mask.tolist(),
        versions=row.versions.tolist(),
        prompt_length=row.prompt_length,
    )
    return len(encode(sample))


if __name__ == "__main__":
    execute(main)
