"""The verbs that show samples, on the history of a run whose Redis is gone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.console.cli import main as cli
from penstock.history.part import parts_of
from penstock.history.row import Use
from penstock.history.writer import HistoryWriter
from tests.unit.penstock.history.rows import row

HOSTILE = "\x1b]0;gone\x07\x1b[2J<script>alert(1)</script>\u202egnp.exe\r\x00 end"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of a run that is over: two prompts twice each, and an evaluation of versions 1 and 2."""
    folder = tmp_path / "runs" / "demo"
    (folder / "redis").mkdir(parents=True)
    (folder / "run.json").write_text('{"state": "finished", "started_s": 1.0}')
    (folder / "redis.json").write_text('{"url": "redis://127.0.0.1:1/0"}')
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    trained = [row(f"math/0/{line}", k, reward=line + k / 4) for line in range(2) for k in range(2)]
    writer.write(trained, [Use(one.job, one.k, "policy", 7, version=5, staleness=2, loss_tokens=2) for one in trained])
    writer.write([row("math/1/0", answer=HOSTILE, reward=-1.0, fate="filtered", reason="zero_std")])
    writer.write(
        [row(f"heldout/{v}/{line}", lane="eval", reward=v / 2, answer=f"by {v}") for v in (1, 2) for line in range(3)]
    )
    writer.close()
    return tmp_path / "runs"


def call(runs: Path, *arguments: str) -> int:
    return cli.execute([*arguments, "--directory", str(runs)])


def asked(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert call(runs, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_evaluations_are_told_by_category_with_votes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = HistoryWriter(runs / "demo" / "history", 2, max_bytes=2**30)
    told = [("sum", ["5", "5"]), ("sum", ["5", "6"]), ("", ["6", "6"])]
    writer.write(
        [
            row(
                f"kinds/3/{line}",
                k,
                lane="eval",
                reward=float(pred == "5"),
                reward_info={"pred": pred, "category": kind},
            )
            for line, (kind, preds) in enumerate(told)
            for k, pred in enumerate(preds)
        ]
    )
    writer.close()
    [found] = asked(runs, capsys, "eval", "ls", "--dataset", "kinds")
    assert (found["prompts"], found["answers"], found["pass_at"]) == (3, 6, {"1": 0.5, "2": pytest.approx(2 / 3)})
    none, sums = asked(runs, capsys, "eval", "ls", "--dataset", "kinds", "--categories")
    assert (none["category"], none["reward_mean"], none["majority_at"]) == ("(none)", 0.0, {"2": 0.0})
    assert (sums["category"], sums["prompts"], sums["majority_at"]) == ("sum", 2, {"2": 0.75})
    assert call(runs, "eval", "ls", "--categories", "--where", "category=sum") == 0
    assert "1: 0.75, 2: 1" in capsys.readouterr().out
    plain = asked(runs, capsys, "eval", "ls", "--categories", "--dataset", "heldout")
    assert [(one["version"], one["category"], one["prompts"]) for one in plain] == [(1, "(none)", 3), (2, "(none)", 3)]


def test_samples_are_listed_in_plain_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(runs, "samples", "ls", "--dataset", "math") == 0

    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "samples"
    assert head.split() == ["id", "reward", "oldest", "newest", "num_generated", "fate", "reason", "prompt", "answer"]
    assert [line.split()[0] for line in lines] == ["math/1/0/0", "math/0/1/1", "math/0/1/0", "math/0/0/1", "math/0/0/0"]
    assert lines[1].split()[1:5] == ["1.25", "3", "4", "3"]
    assert "filtered  zero_std" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--best", "--limit", "2", "--lane", "train"], ["math/0/1/1", "math/0/1/0"]),
        (["--worst", "--limit", "1"], ["math/1/0/0"]),
        (["--sort=reward", "--limit", "1"], ["math/1/0/0"]),
        (["--prompt", "math/0/0"], ["math/0/0/1", "math/0/0/0"]),
        (["--job", "math/0/0", "--sort", "recorded"], ["math/0/0/0", "math/0/0/1"]),
        (["--batch", "7", "--min-reward", "1"], ["math/0/1/1", "math/0/1/0"]),
        (["--text", "five says", "--max-reward", "0.2"], ["math/0/0/0"]),
        (["--fate", "filtered"], ["math/1/0/0"]),
        (["--sub", "nobody"], []),
        (["--where", "batch=7", "--where", "reward>=1"], ["math/0/1/1", "math/0/1/0"]),
        (["--where", "reward>1", "--where", "reward<1.25"], []),
        (["--where", "reward=1.25", "--where", "reward>0"], ["math/0/1/1"]),
        (["--where", "answer~five says", "--where", "reward<=0.2", "--dataset", "math"], ["math/0/0/0"]),
        (["--where", "fate=filtered"], ["math/1/0/0"]),
    ],
)
def test_filters_and_orders(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: list[str]
) -> None:
    assert [one["id"] for one in asked(runs, capsys, "samples", "ls", *arguments)] == wanted


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("reward", "invalid --where 'reward': give FIELD=VALUE"),
        ("id=math/0/1/0", "samples can be filtered by job=, version=, "),
        ("version>3", "samples can be filtered by"),
        ("version=x", "give a number from 0"),
        ("reward>x", "give a number"),
        ("fate=none", "choose from trained"),
        ("prompt~?", "holds no letter and no digit"),
    ],
)
def test_a_condition_that_samples_are_not_found_by_is_a_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str], where: str, said: str
) -> None:
    for verb in (["samples", "ls"], ["export", str(runs / "out.jsonl")]):
        assert call(runs, *verb, "--where", where) == 2
        err = capsys.readouterr().err
        assert (said in err, err.count("\n")) == (True, 1), err
    assert call(runs, "samples", "ls", "--batch", "7", "--where", "batch=8") == 2
    assert not (runs / "out.jsonl").exists()


def test_evaluations_are_filtered_and_sorted_as_other_lists(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(runs, capsys, "eval", "ls", "--sort", "-version", "--limit", "1")
    assert [one["version"] for one in found] == [2]
    assert asked(runs, capsys, "eval", "ls", "--where", "reward_mean>1") == []


def test_pages_go_on_where_the_one_before_ended(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    more: list[str] = []
    while True:
        assert call(runs, "samples", "ls", "--json", "--limit", "4", "--best", *more) == 0
        out, err = capsys.readouterr()
        seen += [one["id"] for one in json.loads(out)]
        if not err:
            break
        more = [err.split("--after=")[1].strip()]
        more.insert(0, "--after")
    assert len(seen) == len(set(seen)) == 11


def test_they_are_counted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(runs, capsys, "samples", "ls", "--count", "--lane", "eval") == 6
    assert call(runs, "samples", "ls", "--count") == 0
    assert capsys.readouterr().out == "11 samples\n"


def test_one_is_shown_with_all_that_is_known(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(runs, capsys, "samples", "show", "math/0/1/0")
    known = row("math/0/1", 0)
    assert found["answer"] == known.answer
    assert found["reward_info"] == {"format": 1, "why": "near"}
    assert found["uses"] == [{"subscription": "policy", "batch": 7, "version": 5, "staleness": 2, "loss_tokens": 2}]
    assert known.logprobs is not None
    assert np.array_equal(np.array(found["logprobs"], np.float32), known.logprobs)
    assert found["versions"] == [-1, -1, -1, -1, 3, 3, 4]

    assert call(runs, "samples", "show", "math/0/1/0") == 0
    said = capsys.readouterr().out
    for words in (
        "id: math/0/1/0",
        "reward: 1",
        "fate: trained",
        "oldest: 3",
        "It is five, says 0.",
        "151000",
        "-1.72",
    ):
        assert words in said
    assert call(runs, "samples", "show", "math/0/1/0", "--no-tokens") == 0
    assert "151000" not in capsys.readouterr().out


def test_evaluations_over_versions(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(one["version"], one["prompts"], one["reward_mean"]) for one in asked(runs, capsys, "eval", "ls")] == [
        (1, 3, 0.5),
        (2, 3, 1.0),
    ]
    found = asked(runs, capsys, "eval", "show", "heldout/2")
    assert [(one["version"], one["answer"]) for one in found] == [(1, "by 1"), (2, "by 2")]
    assert call(runs, "eval", "show", "heldout/2") == 0
    assert "by 2" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["samples", "ls"], ["samples", "show", "math/1/0/0"]])
def test_no_answer_moves_a_terminal(runs: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    for form in ([], ["--json"]):
        assert call(runs, *command, *form) == 0
        said = capsys.readouterr().out
        assert "gone" in said
        assert not {"\x1b", "\x07", "\u202e", "\r", "\x00"} & set(said)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["samples", "show", "math/0/1/9"], 2, "has no sample 'math/0/1/9'"),
        (["samples", "show", "math"], 2, "no id of a sample"),
        (["samples", "ls", "--fate", "lost"], 2, "choose from trained, masked"),
        (["samples", "ls", "--sort", "length_"], 2, "choose from recorded, reward"),
        (["samples", "ls", "--after", "x"], 2, "no place in the order of recorded"),
        (["samples", "ls", "--text", "?"], 2, "no letter and no digit"),
        (["samples", "ls", "--best", "--worst"], 2, "give one of them"),
        (["eval", "show", "heldout"], 2, "give DATASET/LINE"),
        (["eval", "show", "heldout/9"], 2, "has no answer to line 9"),
        (["samples", "ls", "--run", "another"], 2, "another"),
        (["samples", "ls", "--run", "../demo"], 2, "not a name"),
    ],
)
def test_mistakes_are_one_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert call(runs, *arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_file_that_was_cut_is_told_and_the_rest_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs / "demo" / "history"
    whole = parts_of(folder)[0].path(folder)
    writer = HistoryWriter(folder, 2, max_bytes=2**30)
    writer.write([row("math/3/3")])
    writer.close()
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])

    assert call(runs, "samples", "ls") == 0

    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["math/3/3/0"]
    assert str(whole) in err
    assert "It is left out." in err


def test_every_verb_over_a_history_that_was_cut_anywhere_says_so_and_goes_on(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs / "demo" / "history"
    whole = parts_of(folder)[0].path(folder)
    content = whole.read_bytes()
    for index, kept in enumerate((1, 100, len(content) // 3, len(content) - 1)):
        whole.write_bytes(content[:kept])
        for verb in ("samples ls", "samples show math/0/1/0", "eval ls", "eval show heldout/2", "trace math/0/1"):
            code = call(runs, *verb.split())
            out, err = capsys.readouterr()
            assert code in (0, 2), (verb, kept, err)
            assert "Traceback" not in out + err
            assert str(whole) in err or kept != len(content) // 3, (verb, kept, err)
        assert call(runs, "export", str(runs / f"{index}.jsonl")) == 0
        capsys.readouterr()


def test_a_run_without_a_history_says_so(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in (runs / "demo" / "history").iterdir():
        one.unlink()
    assert call(runs, "samples", "ls") == 0
    out, err = capsys.readouterr()
    assert out == "samples: none\n"
    assert "has no history" in err


def test_samples_are_exported(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(runs, "export", str(tmp_path / "all.jsonl"), "--dataset", "math") == 0
    assert capsys.readouterr().out == f"5 samples are in {tmp_path / 'all.jsonl'}\n"
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [one["id"] for one in lines] == ["math/0/0/0", "math/0/0/1", "math/0/1/0", "math/0/1/1", "math/1/0/0"]
    assert lines[-1]["answer"] == HOSTILE
    assert lines[0]["uses"][0]["batch"] == 7

    assert call(runs, "export", str(tmp_path / "all.jsonl")) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_export_says_how_far_it_is(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.console.progress.LINE_EVERY_S", 0.0)
    monkeypatch.setattr("penstock.console.read.export.USES", 2)
    assert call(runs, "export", str(tmp_path / "all.jsonl"), "--dataset", "math") == 0
    told = capsys.readouterr().err
    assert [line.partition(" (")[0] for line in told.splitlines()] == [
        f"exporting samples: {done} of 5" for done in (0, 2, 4)
    ]

    assert call(runs, "export", str(tmp_path / "same.jsonl"), "--json") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
def test_what_cannot_be_written_is_one_sentence(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert call(runs, "export", "/proc/penstock.out", "--format", form) == 2
    told = capsys.readouterr().err
    assert told.startswith("penstock: /proc/penstock.out cannot be written (")
    assert told.count("\n") == 1

    missing = tmp_path / "no" / "such" / "out"
    assert call(runs, "export", str(missing), "--format", form) == 2
    assert f"there is no folder {missing.parent}: make it" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_times_that_nobody_told_are_null_wherever_they_are_read(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    writer = HistoryWriter(runs / "demo" / "history", 2, max_bytes=2**30)
    writer.write([row("math/2/0", first_token_s=0.0, cut_s=7.0)])
    writer.close()
    assert call(runs, "export", str(tmp_path / "one.parquet"), "--format", "parquet", "--job", "math/2/0") == 0
    (one,) = parquet.read_table(tmp_path / "one.parquet").to_pylist()
    capsys.readouterr()

    for told in (one, asked(runs, capsys, "samples", "show", "math/2/0/0")):
        assert (told["first_token_s"], told["cut_s"]) == (None, 7.0)


def test_a_sample_whose_reward_is_a_number_alone_is_not_shown_as_without_one(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = HistoryWriter(runs / "demo" / "history", 2, max_bytes=2**30)
    writer.write([row("math/2/0", reward=1.0, reward_info={}, num_turns=1, attempts=1)])
    writer.close()
    assert call(runs, "samples", "show", "math/2/0/0", "--no-tokens") == 0

    told = capsys.readouterr().out
    assert "reward: 1" in told
    assert "reward: none" not in told
    assert "num_turns: 1" in told
    assert "attempts: 1" in told


def test_samples_are_exported_as_parquet(runs: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    assert call(runs, "export", str(tmp_path / "all.parquet"), "--format", "parquet") == 0
    found = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert len(found) == 11
    known = row("math/0/0", 0)
    assert known.logprobs is not None
    assert np.array_equal(np.array(found[0]["logprobs"], np.float32), known.logprobs)
    assert json.loads(found[0]["reward_info"]) == known.reward_info

    assert call(runs, "export", str(tmp_path / "set"), "--format", "datasets", "--no-tokens") == 0
    assert pq.read_table(tmp_path / "set" / "data" / "eval.parquet").num_rows == 6
    assert "tokens" not in pq.read_table(tmp_path / "set" / "data" / "train.parquet").column_names
    assert "split: train\n    path: data/train.parquet" in (tmp_path / "set" / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))
