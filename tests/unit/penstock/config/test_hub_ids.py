"""Ids at the Hugging Face Hub in place of paths; the cache of huggingface_hub is local, and the Hub is not reached."""

import json
from pathlib import Path

import pytest

from penstock.config.load import check_files, load_config
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset

RUN = "run: demo\nmodel: {path: %s}\ndata: {train: [{name: t, path: %s}]}\n"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of the model owner/small in a cache; the Hub cannot be reached."""
    cache = tmp_path / "cache" / "models--owner--small"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    return snapshot


def load(model: str, data: str = "t.jsonl", *overrides: str):  # type: ignore[no-untyped-def]
    Path("run.yaml").write_text(RUN % (model, data))
    return load_config(Path("run.yaml"), list(overrides), {})


def test_a_model_comes_from_the_cache_of_the_hub(cached: Path) -> None:
    config = load("owner/small")

    assert config.model.path == str(cached)
    check_files(config, data=False)
    assert load("other", "t.jsonl", "--model.path=owner/small").model.path == str(cached)


def test_a_dataset_comes_from_the_cache_of_the_hub(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "unpacked")
    cache = tmp_path / "cache" / "datasets--owner--rows"
    (cache / "snapshots" / "4567").mkdir(parents=True)
    (cache / "snapshots" / "4567" / "train.jsonl").write_text('{"prompt": "1=", "label": "1"}\n')
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("4567")

    dataset = Dataset(load("owner/small", "owner/rows").data.train[0], None)

    assert len(dataset) == 1
    assert dataset.take(0).text == "1="


def test_an_existing_folder_wins(cached: Path) -> None:
    Path("owner/small").mkdir(parents=True)

    assert load("owner/small").model.path == str(Path("owner/small").absolute())


def test_a_model_that_is_nowhere_stops_a_start(cached: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load("owner/none")

    assert "there is no folder owner/none, and the Hugging Face Hub does not give a model" in caplog.text
    with pytest.raises(ConfigError, match="owner/none is not a folder"):
        check_files(config, data=False)


def test_a_model_that_a_script_makes_is_a_path(cached: Path) -> None:
    made = load("data/model", "t.jsonl", "--prepare=[make.py]")

    assert made.model.path == str(Path("data/model").absolute())


def test_an_id_of_a_dataset_is_read_by_datasets_and_a_file_is_a_file(cached: Path) -> None:
    assert load("m", "owner/rows").data.train[0].path == "hf:owner/rows"
    assert load("m", "'owner/rows@[:8]'").data.train[0].path == "hf:owner/rows@[:8]"
    assert load("m", "data/train.jsonl").data.train[0].path == str(Path("data/train.jsonl").absolute())
    Path("owner").mkdir()
    assert load("m", "owner/rows").data.train[0].path == str(Path("owner/rows").absolute())


def test_what_prepare_makes_is_no_id_before_it_exists(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a first `make run`: the folder of the example has no data yet, and the command starts elsewhere."""
    Path("run.yaml").write_text(RUN % ("owner/small", "owner/rows") + "prepare: [prepare.py, --out, owner]\n")
    folder = Path.cwd()
    monkeypatch.chdir(folder.parent)

    config = load_config(folder / "run.yaml", [], {})

    assert config.model.path == str(folder / "owner" / "small")
    assert config.data.train[0].path == str(folder / "owner" / "rows")
