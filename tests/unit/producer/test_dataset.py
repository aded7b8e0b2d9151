"""Prompts: lines by number, an order by seed and position, and mistakes as sentences."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import parse_path
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import HeldOut, check_overlap
from penstock.producer.main import fingerprint
from penstock.producer.mixture import Mixture
from penstock.producer.prompt import Template
from penstock.producer.sources import jsonl
from penstock.producer.sources.jsonl import JsonLines
from penstock.producer.sources.rows import BadLine
from penstock.records.job import Job
from tests.hostile import SAME
from tests.missing import module


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dataset(tmp_path: Path, rows: list[Any], name: str = "d", suffix: str = "", **over: Any) -> Dataset:
    template = over.pop("template", None)
    config = DatasetConfig(name=name, path=write(tmp_path / f"{name}.jsonl", rows) + suffix, **over)
    return Dataset(config, template)


def lines(count: int, word: str = "p") -> list[dict[str, str]]:
    return [{"prompt": f"{word}{i}", "label": str(i)} for i in range(count)]


def test_a_line_becomes_a_job_whose_id_is_its_place(tmp_path: Path) -> None:
    rows = [{"q": "two?", "a": 2, "info": {"hard": True}}]
    made = dataset(tmp_path, rows, input_key="q", label_key="a", metadata_key="info", sampling={"top_k": 1}, n=3)
    job = made.job(made[0], 4, n=8, lane="train", sampling={"top_k": 5, "stop": ["x"]})
    assert (job.id, job.n, job.prompt, job.label) == ("d/4/0", 3, "two?", "2")
    assert (job.metadata, job.sampling) == ({"hard": True}, {"top_k": 1, "stop": ["x"]})


def test_prompts_may_be_token_ids_or_messages(tmp_path: Path) -> None:
    def template(messages: list[dict[str, Any]]) -> str:
        return "".join(f"<{one['role']}>{one['content']}" for one in messages)

    rows = [{"prompt": [5, 6]}, {"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": "plain"}]
    made = dataset(tmp_path, rows, label_key=None, apply_chat_template=True, template=Template(template))
    assert made[0].ids == [5, 6]
    assert [one.text for one in list(made)[1:]] == ["<user>hi", "<user>plain"]


def test_answers_may_be_given(tmp_path: Path) -> None:
    values = ["text", [5, 6], ["text", "other"], [[5], "x", [6, 7]], None]
    keys: dict[str, Any] = {"answer_key": "answer", "label_key": None}
    made = dataset(tmp_path, [{"prompt": "p", "answer": value} for value in values], **keys)
    assert [one.answers for one in made] == [["text"], [[5, 6]], ["text", "other"], [[5], "x", [6, 7]], []]
    assert made.job(made[1], 0, n=1, lane="train", sampling={}).answers == [[5, 6]]
    other = dataset(tmp_path, [{"prompt": "p", "answer": "another"}] * 5, **keys)
    assert fingerprint(Mixture([made], 0)) != fingerprint(Mixture([other], 0))
    for row, says in (
        ({"prompt": "p"}, "the row has no column 'answer'"),
        ({"prompt": "p", "answer": {"x": 1}}, "is not an answer"),
    ):
        with pytest.raises(ConfigError, match=f"line 1: .*{says}|line 1: {says}"):
            list(dataset(tmp_path, [row], **keys))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"}\nnot json\n', "line 2 of .* is not JSON"),
        (b'{"prompt": "a"}\n\xff\xfe\n', "line 2 of .* is not JSON in UTF-8"),
        (b'{"prompt": "a"}\n[1]\n', "line 2 of .* is not a JSON object"),
        (
            b'{"prompt": "a"}\n{"text": "b"}\n',
            "line 2: the row has no column 'prompt'; correct the dataset's input_key",
        ),
        (
            b'{"prompt": "a"}\n{"prompt": 3}\n',
            "line 2: the prompt is invalid; use text, a list of messages or a list of token ids",
        ),
        (
            b'{"prompt": [{"role": "user"}]}\n',
            "line 1: the prompt is a list of chat messages; set the dataset's apply_chat_template",
        ),
        (b"", "has no prompts"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=f"dataset d.*{says}"):
        list(Dataset(DatasetConfig(name="d", path=str(tmp_path / "d.jsonl"), label_key=None)))


def test_a_missing_file_and_bad_metadata_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; correct the dataset's path"):
        Dataset(DatasetConfig(name="d", path=str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match="line 1: 'info' is not a map"):
        list(dataset(tmp_path, [{"prompt": "a", "label": "", "info": 3}], metadata_key="info"))

    def template(_: object) -> str:
        raise ValueError("roles must alternate")

    with pytest.raises(ConfigError, match=r"line 1: .*template rejected the messages \(roles must alternate\)"):
        list(dataset(tmp_path, lines(1), apply_chat_template=True, template=Template(template)))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "\\ud800", "label": ""}', r"half of a surrogate pair \('\\ud800'\), which is not text"),
        (b'{"prompt": "p", "label": {"deep": ["\\udfff"]}}', "half of a surrogate pair"),
        (b'{"prompt": "p", "label": "", "info": {"id": 18446744073709551616}}', "an integer beyond 64 bits"),
        (b'{"prompt": "p", "label": -9223372036854775809}', "an integer beyond 64 bits"),
        (b'{"prompt": "p", "label": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "p", "label": ' + b"[" * 2000 + b"]" * 2000 + b"}", "nested too deeply"),
        (b'{"prompt": "' + b"x" * 9 * 2**20 + b'", "label": ""}', "too large for a record"),
        (b'{"prompt": "p", "label": ' + b"1" * 5000 + b"}", "is not JSON"),
    ],
)
def test_what_no_record_can_hold_is_refused_with_its_line(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": ""}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"line 2.*{says}"):
        list(Dataset(DatasetConfig(name="d", path=str(path), metadata_key="info")))


def test_a_line_of_100_mb_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(ConfigError, match=r"line 1 of .*d\.jsonl has more than 16 MiB; split or remove it"):
        list(Dataset(DatasetConfig(name="d", path=str(path))))


def test_a_byte_order_mark_and_blank_lines_at_the_end_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "label": "1"}\r\n{"prompt": "b", "label": "2"}\r\n\r\n \n')
    assert [one.text for one in Dataset(DatasetConfig(name="d", path=str(path)))] == ["a", "b"]
    path.write_bytes(b'{"prompt": "a", "label": "1"}\n\n{"prompt": "b", "label": "2"}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*d\.jsonl is blank; remove it"):
        list(Dataset(DatasetConfig(name="d", path=str(path))))


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a mark"])
@pytest.mark.parametrize("blanks", [b"", b"\n", b" \r\n" * 2000, b" "], ids=["none", "one", "many", "a last one"])
def test_blank_lines_at_the_end_are_not_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, blanks: bytes
) -> None:
    monkeypatch.setattr("penstock.producer.sources.jsonl.CHUNK_BYTES", 64)
    path, line = tmp_path / "d.jsonl", b'{"prompt": "a", "label": "1"}'
    path.write_bytes(begin + line + b"\n" + line + (b"\n" + blanks if blanks else b""))
    with monkeypatch.context() as patch:
        patch.delattr("os.pread")
        made = JsonLines(path, "d")
    assert [made.row(index)["label"] for index in range(len(made))] == ["1", "1"]
    assert made.num_bytes == path.stat().st_size
    path.write_bytes(begin + blanks)
    assert len(JsonLines(path, "d")) == 0


def test_gzip_is_read_as_lines_and_a_cut_file_is_told(tmp_path: Path) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in lines(2000)).encode()
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(rows))
    config = DatasetConfig(name="d", path=f"{path}@[1:3]")
    assert [(one.index, one.text) for one in Dataset(config)] == [(1, "p1"), (2, "p2")]
    path.write_bytes(gzip.compress(rows)[:-100])
    with pytest.raises(ConfigError, match=r"d\.jsonl\.gz cannot be read after line \d+ .*: correct or replace it"):
        Dataset(config)
    path.write_bytes(rows)
    with pytest.raises(ConfigError, match=r"cannot be read after line 0"):
        Dataset(config)


def test_a_label_that_is_not_there_is_told_and_one_that_is_keeps_its_type(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: column 'answer' is missing; correct the dataset's label_key, or set `label_key: n"
    ):
        list(dataset(tmp_path, lines(2), label_key="answer"))
    with pytest.raises(ConfigError, match="line 2: column 'label' is null"):
        list(dataset(tmp_path, [*lines(1), {"prompt": "p", "label": None}]))
    assert dataset(tmp_path, [{"prompt": "p"}], label_key=None)[0].label == ""

    values = ["7", 7, 7.5, True, ["a", "ä"], {"tests": ["x == 1"]}, ""]
    made = dataset(tmp_path, [{"prompt": "p", "label": value} for value in values])
    jobs = [Job.from_bytes(made.job(one, 0, n=1, lane="train", sampling={}).to_bytes()) for one in made]
    assert [job.raw_label for job in jobs] == values
    assert [job.label for job in jobs] == ["7", "7", "7.5", "true", '["a", "ä"]', '{"tests": ["x == 1"]}', ""]


def test_a_slice_keeps_the_numbers_of_the_lines(tmp_path: Path) -> None:
    made = dataset(tmp_path, lines(6), suffix="@[2:4]")
    assert [(one.index, one.text) for one in made] == [(2, "p2"), (3, "p3")]
    assert parse_path("f.jsonl@[:3]")[1:] == (0, 3)
    assert parse_path("f.jsonl@[3:]")[1] == 3
    with pytest.raises(ConfigError, match="has no prompts"):
        dataset(tmp_path, lines(3), suffix="@[7:9]")


def test_parquet_files_are_read_as_lines(tmp_path: Path) -> None:
    pyarrow, parquet = module("pyarrow"), module("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(lines(3)), tmp_path / "d.parquet")
    made = Dataset(DatasetConfig(name="d", path=str(tmp_path / "d.parquet")))
    assert [one.text for one in made] == ["p0", "p1", "p2"]


def test_every_epoch_is_another_permutation_of_all_lines_and_a_function_of_the_seed(tmp_path: Path) -> None:
    parts = [dataset(tmp_path, lines(5, "a"), "a"), dataset(tmp_path, lines(3, "b"), "b")]

    def epochs(seed: int) -> list[list[str | None]]:
        source = Mixture(parts, seed)
        assert len(source) == 8
        return [[source.at(8 * epoch + i)[2].text for i in range(8)] for epoch in range(3)]

    every = sorted([f"a{i}" for i in range(5)] + [f"b{i}" for i in range(3)])
    assert [sorted(map(str, epoch)) for epoch in epochs(1)] == [every] * 3
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1) == epochs(1)
    assert epochs(1) != epochs(2)
    assert [Mixture(parts, 1).at(17)[1]] == [2], "a position names its epoch"


def test_without_shuffle_lines_come_in_order(tmp_path: Path) -> None:
    source = Mixture([dataset(tmp_path, lines(4), shuffle=False)], seed=1)
    assert [source.at(i)[2].text for i in range(8)] == ["p0", "p1", "p2", "p3"] * 2


def test_the_fingerprint_changes_with_whatever_a_position_means(tmp_path: Path) -> None:
    train, held_out = dataset(tmp_path, lines(4)), dataset(tmp_path, lines(2, "e"), "e")
    known = fingerprint(Mixture([train], 1), [held_out])
    assert fingerprint(Mixture([dataset(tmp_path, lines(4))], 1), [held_out]) == known
    others = [
        fingerprint(Mixture([train], 2), [held_out]),
        fingerprint(Mixture([dataset(tmp_path, lines(5))], 1), [held_out]),
        fingerprint(Mixture([dataset(tmp_path, lines(4), shuffle=False)], 1), [held_out]),
        fingerprint(Mixture([dataset(tmp_path, [*lines(3), {"prompt": "other", "label": "3"}])], 1), [held_out]),
        fingerprint(Mixture([dataset(tmp_path, lines(4), "renamed")], 1), [held_out]),
        fingerprint(Mixture([train], 1), [dataset(tmp_path, lines(3, "e"), "e")]),
        fingerprint(Mixture([train], 1)),
    ]
    assert known not in others
    assert len(set(others)) == len(others)


def test_a_fingerprint_renders_nothing_and_knows_the_template(tmp_path: Path) -> None:
    def template(_: object) -> str:
        raise AssertionError("rendered")

    made = [
        Mixture([dataset(tmp_path, lines(4), apply_chat_template=True, template=Template(template, digest))], 1)
        for digest in ("a", "b", "a")
    ]
    first, other, again = map(fingerprint, made)
    assert first == again != other


def test_lines_are_read_when_they_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": ""}\nnot json\n{"prompt": "c", "label": ""}')
    made = Dataset(DatasetConfig(name="d", path=str(path)))
    assert len(made) == 3
    assert [made[0].text, made[2].text] == ["a", "c"]
    with pytest.raises(BadLine, match=r"line 2 of .*d\.jsonl is not JSON"):
        made[1]


def test_a_file_that_changes_under_a_run_is_told(tmp_path: Path) -> None:
    made = dataset(tmp_path, lines(3))
    assert made[0].text == "p0"
    write(tmp_path / "d.jsonl", lines(5, "other"))
    with pytest.raises(ConfigError, match="changed while being read: restore it"):
        made[1]


@SAME
@given(rows=st.lists(st.text(max_size=20), min_size=1, max_size=40), chunk=st.integers(1, 50), ends=st.booleans())
def test_the_index_finds_every_line_however_the_file_is_read(rows: list[str], chunk: int, ends: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "CHUNK_BYTES", chunk)
        text = "\n".join(json.dumps({"prompt": row}) for row in rows) + "\n" * ends
        for name, content in (("d.jsonl", text.encode()), ("d.jsonl.gz", gzip.compress(text.encode()))):
            Path(folder, name).write_bytes(content)
            found = jsonl.JsonLines(Path(folder, name), "d")
            assert [found.row(i)["prompt"] for i in range(len(found))] == rows


def test_T18_a_held_out_prompt_of_a_large_dataset_is_refused_when_it_is_taken(tmp_path: Path) -> None:
    train = dataset(tmp_path, lines(4))
    held = HeldOut([dataset(tmp_path, [{"prompt": "new"}, {"prompt": "p3"}], "e", label_key=None)])
    held.check(train, train[0])
    with pytest.raises(BadLine, match="dataset d, line 4: this prompt is held out, as line 2 of dataset e"):
        held.check(train, train[3])


def test_T18_a_held_out_prompt_that_is_trained_on_is_refused_with_its_line(tmp_path: Path) -> None:
    train = dataset(tmp_path, lines(4))
    check_overlap([train], [dataset(tmp_path, lines(4, "e"), "e")])
    with pytest.raises(ConfigError, match=r"dataset e: 1 of its prompts are also trained on \(line 2 is the first\)"):
        check_overlap([train], [dataset(tmp_path, [{"prompt": "new"}, {"prompt": "p3"}], "e", label_key=None)])


def test_a_label_that_is_bytes_names_its_line(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"prompt": ["p"], "label": [b"\xff"]})
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match="line 1: its 'label' is not a valid label"):
        list(Dataset(DatasetConfig(name="d", path=str(tmp_path / "d.parquet"), input_key="prompt")))
