"""A delta leads from one folder of weights to another byte for byte, or ends with one error."""

import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.consumers.weights.publish import Written
from penstock.errors import PublishError
from penstock.system.checksum import bytes_xxh3
from penstock.weights import safetensors_files
from penstock.weights.deltas import blocks, folder, head, write
from penstock.weights.deltas.apply import apply_delta
from penstock.weights.deltas.folder import WeightsFolder
from penstock.weights.deltas.head import MAGIC, TAIL, DeltaHead
from penstock.weights.deltas.write import write_delta
from penstock.weights.index import TensorEntry
from penstock.weights.safetensors_files import METADATA_BYTES, header_of, header_rooms
from tests.unit.penstock.weights.deltas.version_folders import a_model, moved, publish


class Step(NamedTuple):
    before: Written
    after: Written
    delta: Path
    num_bytes: int


def a_step(path: Path, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Step:
    old, new = publish(path, 1, before), publish(path, 2, after)
    delta = path / "delta"
    with WeightsFolder(old.path, old.index_digest) as base, WeightsFolder(new.path, new.index_digest) as target:
        return Step(old, new, delta, write_delta(base, target, 1, 2, delta))


def apply(step: Step, into: Path, delta: Path | None = None) -> None:
    into.mkdir()
    with WeightsFolder(step.before.path, step.before.index_digest) as base:
        apply_delta(delta or step.delta, base, into, step.after.index_digest)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    model = a_model()
    return a_step(tmp_path_factory.mktemp("step"), model, moved(model, 1))


def test_the_target_is_made_again_file_by_file(step: Step, tmp_path: Path) -> None:
    before = contents(step.before.path)

    apply(step, tmp_path / "into")

    assert contents(tmp_path / "into") == contents(step.after.path)
    assert contents(step.before.path) == before


@pytest.mark.parametrize("piece_bytes", [64, 1000 // 8 * 8, 2**20])
def test_a_tensor_may_have_any_number_of_pieces(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocks, folder, head):
        monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    model = a_model(size=1500)

    step = a_step(tmp_path, model, moved(model, 1))
    apply(step, tmp_path / "into")

    assert contents(tmp_path / "into") == contents(step.after.path)


def test_what_is_new_or_of_another_kind_comes_whole_and_what_is_gone_is_gone(tmp_path: Path) -> None:
    before = a_model()
    names = list(before)
    after = moved(before, 1)
    del after[names[0]]
    after[names[1]] = after[names[1]].to(torch.float32)
    after[names[2]] = after[names[2]].reshape(-1).clone()
    after["new"] = torch.arange(100)

    step = a_step(tmp_path, before, after)
    apply(step, tmp_path / "into")

    assert contents(tmp_path / "into") == contents(step.after.path)


def test_files_that_did_not_change_are_further_names_of_the_base(tmp_path: Path) -> None:
    before = a_model()
    after = before | {"layer.0.bfloat16": before["layer.0.bfloat16"] + 1}

    step = a_step(tmp_path, before, after)
    apply(step, tmp_path / "into")

    shared = [name for name in contents(tmp_path / "into") if (tmp_path / "into" / name).stat().st_nlink > 1]
    assert "config.json" in shared
    assert len([name for name in shared if name.endswith(".safetensors")]) >= 2
    assert contents(tmp_path / "into") == contents(step.after.path)


def test_a_small_change_of_bf16_is_a_small_file(tmp_path: Path) -> None:
    model = {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)}

    step = a_step(tmp_path, model, moved(model, 1, 0.02))

    assert step.num_bytes < 0.02 * step.after.num_bytes


def test_a_delta_from_another_base_is_refused(step: Step, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with (
        WeightsFolder(step.after.path, step.after.index_digest) as base,
        pytest.raises(PublishError, match="is no change of"),
    ):
        apply_delta(step.delta, base, tmp_path / "into", step.after.index_digest)


def test_a_delta_to_another_version_is_refused(step: Step, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with (
        WeightsFolder(step.before.path, step.before.index_digest) as base,
        pytest.raises(PublishError, match="leads to another version"),
    ):
        apply_delta(step.delta, base, tmp_path / "into", step.before.index_digest)


def test_a_base_whose_bytes_moved_is_found_out(tmp_path: Path) -> None:
    model = a_model()
    step = a_step(tmp_path, model, moved(model, 1))
    file = max(step.before.path.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    spoilt = bytearray(file.read_bytes())
    spoilt[-1000] ^= 1
    file.write_bytes(spoilt)

    with pytest.raises(PublishError, match="checksum differs"):
        apply(step, tmp_path / "into")


def test_a_folder_with_another_index_is_no_base(step: Step) -> None:
    with pytest.raises(PublishError, match="not the index that was announced"):
        WeightsFolder(step.before.path, step.after.index_digest)


def test_no_thread_and_no_file_stays_open(step: Step, tmp_path: Path) -> None:
    # What other tests left may end meanwhile.
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))

    apply(step, tmp_path / "into")

    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files


def test_no_thread_outlives_one_that_ends_early(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error keeps what was running, as one in a cycle does: the collector would wait for it in any thread."""
    threads = set(threading.enumerate())
    (tmp_path / "into").mkdir()
    with (
        WeightsFolder(step.before.path, step.before.index_digest) as before,
        WeightsFolder(step.after.path, step.after.index_digest) as after,
    ):
        with pytest.raises(PublishError, match="this worker stops") as applied:
            apply_delta(step.delta, before, tmp_path / "into", step.after.index_digest, stopped=lambda: True)
        assert set(threading.enumerate()) <= threads, applied

        monkeypatch.setattr(write, "KINDS", ())
        with pytest.raises(ValueError, match="not in tuple") as written:
            write_delta(before, after, 1, 2, tmp_path / "delta")
        assert set(threading.enumerate()) <= threads, written


def test_it_can_be_stopped_at_any_piece(step: Step, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with (
        WeightsFolder(step.before.path, step.before.index_digest) as base,
        pytest.raises(PublishError, match="this worker stops"),
    ):
        apply_delta(step.delta, base, tmp_path / "into", step.after.index_digest, lambda: True)


# --- a file that somebody else wrote, or that was cut or flipped ----------------------------------------------------

SLOW = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60
)


def is_target_or_error(step: Step, tmp_path: Path, data: bytes) -> None:
    number = len(list(tmp_path.iterdir()))
    delta, into = tmp_path / f"delta-{number}", tmp_path / f"into-{number}"
    delta.write_bytes(data)
    try:
        apply(step, into, delta)
    except PublishError:
        return
    assert contents(into) == contents(step.after.path)


@SLOW
@given(data=st.data())
def test_a_flip_is_seen_or_does_no_harm(step: Step, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(step.delta.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))

    is_target_or_error(step, tmp_path, bytes(whole))


@SLOW
@given(data=st.data())
def test_a_cut_is_seen(step: Step, tmp_path: Path, data: st.DataObject) -> None:
    whole = step.delta.read_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    (tmp_path / "cut").write_bytes(cut)
    into = tmp_path / f"into-{len(list(tmp_path.iterdir()))}"

    with pytest.raises(PublishError):
        apply(step, into, tmp_path / "cut")


HUGE = st.one_of(st.integers(-5, 5), st.integers(2**20, 2**64 - 1), st.integers(-(2**63), -1))


@SLOW
@given(data=st.data())
def test_a_head_that_claims_anything_makes_no_room_for_it(step: Step, tmp_path: Path, data: st.DataObject) -> None:
    whole = step.delta.read_bytes()
    own, body = split(whole)
    fields = own.to_map()
    place = data.draw(st.sampled_from(["base_version", "version", "index_bytes", "files", "blocks", "shape"]))
    value = data.draw(st.one_of(HUGE, st.text(max_size=3), st.none(), st.lists(HUGE, max_size=4)))
    if place == "files":
        data.draw(st.sampled_from(fields["files"]))[data.draw(st.integers(0, 2))] = value
    elif place == "blocks":
        data.draw(st.sampled_from(sorted(fields["blocks"].items())))[1][0][data.draw(st.integers(0, 3))] = value
    elif place == "shape":
        fields["blocks"][data.draw(st.sampled_from(sorted(fields["blocks"])))] = value
    else:
        fields[place] = value
    is_target_or_error(step, tmp_path, joined(fields, body))


def test_a_head_is_held_to_its_index_before_it_is_made(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of empty lists would take seventy times its bytes."""
    own, body = split(step.delta.read_bytes())
    (tmp_path / "delta").write_bytes(joined(own.to_map() | {"files": [[]] * 100_000}, body))
    monkeypatch.setattr(DeltaHead, "from_bytes", None)

    with pytest.raises(PublishError, match="a head of more bytes than its index needs"):
        apply(step, tmp_path / "into", tmp_path / "delta")


def test_a_header_is_held_to_its_index_before_it_is_read(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, body = split(step.delta.read_bytes())
    name = next(name for name, how, _ in own.files if how == "tensors")
    text = b'{"a":[' + b"{}," * 100_000 + b"0]}"
    header = len(text).to_bytes(8, "little") + text
    files = [[name, "tensors", len(header)]] + [one for one in own.files if one[0] != name]
    start = len(MAGIC) + own.index_bytes
    (tmp_path / "delta").write_bytes(joined(own.to_map() | {"files": files}, body[:start] + header + body[start:]))
    spoilt = tmp_path / "spoilt"
    shutil.copytree(step.before.path, spoilt)
    (spoilt / name).write_bytes(header)

    with WeightsFolder(step.before.path, step.before.index_digest) as base:
        monkeypatch.setattr(safetensors_files.json, "loads", None)
        (tmp_path / "into").mkdir()
        with pytest.raises(PublishError, match="a header of 300017 bytes"):
            apply_delta(tmp_path / "delta", base, tmp_path / "into", step.after.index_digest)
    with pytest.raises(PublishError, match=r"is not a whole safetensors file \(a header of 300009 bytes"):
        WeightsFolder(spoilt, step.before.index_digest)


@pytest.mark.parametrize("name", ["w", '\u00e9"\n\\', "\U0001f600" * 50])
def test_any_header_and_head_that_a_trainer_writes_are_taken(name: str, tmp_path: Path) -> None:
    before = {f"{name}{n}": torch.full((1,) * dims, 1.0) for n, dims in enumerate((0, 1, 4, 9))}
    step = a_step(tmp_path, before, {one: tensor + 1 for one, tensor in before.items()})

    apply(step, tmp_path / "into")

    assert contents(tmp_path / "into") == contents(step.after.path)
    entries = [TensorEntry(one, "float32", (2**20, 1, 1, 1, 2**20, 1, 1), 0, "f") for one in before] * 1000
    layout = {f"{entry.name}{n}": ("float32", entry.shape) for n, entry in enumerate(entries)}
    listed = [entry._replace(name=one) for one, entry in zip(layout, entries, strict=True)]
    assert len(header_of(layout)) <= header_rooms(listed)["f"] - METADATA_BYTES + 100


@SLOW
@given(junk=st.binary(max_size=200))
def test_junk_is_no_delta(step: Step, tmp_path: Path, junk: bytes) -> None:
    for data in (junk, MAGIC + junk, MAGIC + junk + TAIL.pack(len(junk), bytes_xxh3(junk), MAGIC)):
        into = tmp_path / f"into-{len(list(tmp_path.iterdir()))}"
        (tmp_path / "junk").write_bytes(data)
        with pytest.raises(PublishError):
            apply(step, into, tmp_path / "junk")


def split(whole: bytes) -> tuple[DeltaHead, bytes]:
    size, _, _ = TAIL.unpack(whole[-TAIL.size :])
    end = len(whole) - TAIL.size
    return DeltaHead.from_bytes(whole[end - size : end]), whole[: end - size]


def joined(fields: dict[str, object], body: bytes) -> bytes:
    from penstock.records.codec import pack

    try:
        data = pack(fields)
    except OverflowError:
        data = pack({})
    return body + data + TAIL.pack(len(data), bytes_xxh3(data), MAGIC)
