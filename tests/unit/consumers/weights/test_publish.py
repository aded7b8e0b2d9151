"""Versions of weights on disk: complete and proven, or not there."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.consumers.clock import versions_in
from penstock.consumers.weights import write
from penstock.consumers.weights.write import Written, write_weights
from penstock.errors import PublishError
from penstock.system.disk import file_xxh3
from penstock.weights.index import INDEX_FILE, in_buckets, read_index
from tests.batch_factory import tiny_model
from tests.tiny_model import make_tiny_mixture


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Folder of a first policy: config, tokenizer, and things that are no part of a version; no weights to be like."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "._tokenizer.json").write_text("what macOS leaves beside files")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_a_version_is_a_folder_that_loads(source: Path, tmp_path: Path) -> None:
    model = tiny_model(7)
    written = write_weights(model, source, tmp_path / "weights", 3)
    assert written.path == tmp_path / "weights" / "v00000003"
    names = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    names |= {"weights.index"}
    assert {file.name for file in written.path.iterdir()} == names
    loaded = AutoModelForCausalLM.from_pretrained(written.path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_what_is_told_of_a_version_is_what_the_files_hold(source: Path, tmp_path: Path) -> None:
    written = write_weights(tiny_model(), source, tmp_path / "weights", 1)
    stored = load_file(written.path / "model.safetensors")
    files = {file.name: file_xxh3(file) for file in written.path.iterdir() if file.name != INDEX_FILE}
    index = read_index(written.path, written.index_digest)
    assert index.files == files
    assert index.sizes == {name: (written.path / name).stat().st_size for name in files}
    entries = index.entries()
    assert {entry.name: (entry.dtype, entry.shape) for entry in entries} == {
        name: ("float32", tuple(tensor.shape)) for name, tensor in stored.items()
    }


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "made"])
def test_the_experts_of_a_mixture_are_written_one_by_one_as_engines_load_them(tmp_path: Path, loaded: bool) -> None:
    """Transformers 5 holds them in one tensor, and its files do not."""
    folder = make_tiny_mixture(tmp_path / "mixture", 3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert any("experts.gate_up_proj" in name for name in model.state_dict())
    if not loaded:
        model, state = type(model)(model.config), model.state_dict()
        model.load_state_dict(state)
    written = write_weights(model, folder, tmp_path / "weights", 1)
    found, wanted = load_file(written.path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    with pytest.raises(PublishError, match=r"lacks 72 tensors .*experts\.0\..*, and has 6 others, such as .*experts"):
        write_weights(model.state_dict(), folder, tmp_path / "weights", 2)


def names_in(written: Written) -> set[str]:
    return {entry.name for entry in read_index(written.path, written.index_digest).entries()}


@pytest.mark.parametrize("copied", [False, True])
def test_tied_weights_are_stored_once(source: Path, tmp_path: Path, copied: bool) -> None:
    """Also where a gathered state dict holds two copies: the config says that they are one."""
    state = tiny_model().state_dict()
    if copied:
        state = {name: tensor.clone() for name, tensor in state.items()}
    assert "lm_head.weight" in state
    written = write_weights(state, source, tmp_path / "weights", 1)
    assert names_in(written) == state.keys() - {"lm_head.weight"}


def test_untied_weights_are_stored_both(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    state = {name: tensor.clone() for name, tensor in tiny_model().state_dict().items()}
    assert "lm_head.weight" in names_in(write_weights(state, source, tmp_path / "weights", 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_dtypes_and_shapes_come_back(source: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    state = {"a": whole.T, "b": whole[1:3], "c": whole[0, 0], "d": whole[:0]}
    written = write_weights(state, source, tmp_path / "weights", 1)
    stored = load_file(written.path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in state.items())
    (entry,) = (one for one in read_index(written.path, written.index_digest).entries() if one.name == "a")
    assert (entry.dtype, entry.shape) == (str(dtype).removeprefix("torch."), (6, 4))


@pytest.mark.parametrize("kind", ["value", "header", "truncated"])
def test_T16_what_reads_back_different_is_never_a_version(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into, save = tmp_path / "weights", write.save
    write_weights(tiny_model(), source, into, 1)

    def save_on_a_bad_disk(tensors: dict[str, torch.Tensor], file: Path) -> int:
        checksum, data = save(tensors, file), bytearray(file.read_bytes())
        data[-1 if kind == "value" else 20] ^= 1
        file.write_bytes(data[:-100] if kind == "truncated" else data)
        return checksum

    monkeypatch.setattr(write, "save", save_on_a_bad_disk)
    with pytest.raises(PublishError, match=r"model\.safetensors was read back changed: check the disk"):
        write_weights(tiny_model(1), source, into, 2)
    assert [path.name for path in into.iterdir()] == ["v00000001"]


def test_a_kill_before_the_rename_leaves_no_version_and_the_next_one_cleans_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "weights"
    child = os.fork()
    if not child:  # as by kill -9: no handler runs
        try:
            monkeypatch.setattr(write, "_put_in_place", lambda *_: os._exit(9))
            write_weights({"a": torch.ones(3)}, source, into, 1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert versions_in(into) == []
    assert len(list(into.iterdir())) == 1
    write_weights(tiny_model(), source, into, 1)
    assert [path.name for path in into.iterdir()] == ["v00000001"]


def test_the_last_versions_are_kept(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    for version in (1, 2, 9, 10, 11):
        write_weights({"a": torch.full((2,), float(version))}, source, into, version, keep=3)
    assert versions_in(into) == [9, 10, 11]
    # Folders of another life with higher numbers cannot push a new version out.
    write_weights({"a": torch.ones(2)}, source, into, 3, keep=2)
    assert 3 in versions_in(into)


def test_a_version_that_was_never_announced_is_replaced(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    write_weights({"a": torch.zeros(2)}, source, into, 1)
    path = write_weights({"a": torch.ones(2)}, source, into, 1).path
    assert load_file(path / "model.safetensors")["a"].tolist() == [1, 1]
    assert [folder.name for folder in into.iterdir()] == ["v00000001"]


def test_what_cannot_be_published_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"config\.json cannot be read \(.*\): give the local folder"):
        write_weights(tiny_model(), tmp_path / "nowhere", tmp_path / "weights", 1)
    with pytest.raises(PublishError, match="no tensor to publish"):
        write_weights({}, source, tmp_path / "weights", 1)
    with pytest.raises(PublishError, match="must be at least 1"):
        write_weights(tiny_model(), source, tmp_path / "weights", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match="version 1 cannot be written to"):
        write_weights(tiny_model(), source, tmp_path / "file", 1)


def test_a_large_model_is_written_in_files_of_one_bucket_each(source: Path, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tiny_model(3).state_dict().items() if name != "lm_head.weight"}
    largest = max(tensor.numel() * 4 for tensor in state.values())
    written = write_weights(state, source, tmp_path / "weights", 1, max_bucket_bytes=largest)
    files = sorted(written.path.glob("*.safetensors"))
    assert len(files) > 2
    assert all(sum(tensor.numel() * 4 for tensor in load_file(file).values()) <= largest for file in files)
    loaded = AutoModelForCausalLM.from_pretrained(written.path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    entries = read_index(written.path, written.index_digest).entries()
    assert [len(bucket) for bucket in in_buckets(entries, largest)] == [len(load_file(file)) for file in files]


def test_T16_weights_of_another_shape_than_the_first_policys_are_never_a_version(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    state = dict(tiny_model(1).state_dict())
    for name, changed, sentence in (
        ("model.norm.weight", state["model.norm.weight"][:2], "has shape"),
        ("model.norm.weight", state["model.norm.weight"].int(), "is I32"),
        ("surplus", torch.ones(2), "'surplus'"),
    ):
        with pytest.raises(PublishError, match=sentence):
            write_weights(state | {name: changed}, tmp_path / "model", tmp_path / "weights", 1)
    del state["model.norm.weight"]
    with pytest.raises(PublishError, match="lacks 1 tensors"):
        write_weights(state, tmp_path / "model", tmp_path / "weights", 1)
    assert not list((tmp_path / "weights").iterdir())


def test_a_version_in_use_is_not_deleted(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "weights"
    for version in (1, 2, 3, 4, 5):
        write_weights({"a": torch.ones(2)}, source, into, version, keep=2, in_use=lambda: {2})
    assert versions_in(into) == [2, 4, 5]
