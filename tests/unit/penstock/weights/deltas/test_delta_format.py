"""A delta leads from one folder of weights to another byte for byte, or ends with one error."""

import os
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.consumers.weights.write import Written
from penstock.errors import PublishError
from penstock.weights import delta_format
from penstock.weights.delta_format import MAGIC, WeightsFolder, apply_delta, write_delta
from penstock.weights.index import INDEX_FILE, digest, index_in
from tests.unit.penstock.weights.deltas.version_folders import DTYPES, a_model, moved, publish


class Step(NamedTuple):
    before: Written
    after: Written
    delta: Path
    num_bytes: int


def a_step(path: Path, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Step:
    old, new = publish(path, 1, before), publish(path, 2, after)
    delta = path / "delta"
    return Step(old, new, delta, write_delta(folder_of(old), folder_of(new), delta))


def folder_of(written: Written) -> WeightsFolder:
    return WeightsFolder(written.path, written.index_digest)


def apply(step: Step, into: Path, delta: Path | None = None) -> None:
    into.mkdir()
    apply_delta(delta or step.delta, folder_of(step.before), into, step.after.index_digest)


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
    monkeypatch.setattr(delta_format, "PIECE_BYTES", piece_bytes)
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
    with pytest.raises(PublishError, match="has another base"):
        apply_delta(step.delta, folder_of(step.after), tmp_path / "into", step.after.index_digest)


def test_a_delta_to_another_version_is_refused(step: Step, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with pytest.raises(PublishError, match="leads to another version"):
        apply_delta(step.delta, folder_of(step.before), tmp_path / "into", step.before.index_digest)


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
    before, after = folder_of(step.before), folder_of(step.after)
    with pytest.raises(PublishError, match="this worker stops") as applied:
        apply_delta(step.delta, before, tmp_path / "into", step.after.index_digest, stopped=lambda: True)
    assert set(threading.enumerate()) <= threads, applied

    monkeypatch.setattr(delta_format, "encode", None)
    with pytest.raises(TypeError, match="not callable") as written:
        write_delta(before, after, tmp_path / "delta")
    assert set(threading.enumerate()) <= threads, written


def test_it_can_be_stopped_at_any_piece(step: Step, tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with pytest.raises(PublishError, match="this worker stops"):
        apply_delta(step.delta, folder_of(step.before), tmp_path / "into", step.after.index_digest, lambda: True)


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


@SLOW
@given(data=st.data())
def test_a_frame_of_any_length_and_content_makes_no_room_for_it(
    step: Step, tmp_path: Path, data: st.DataObject
) -> None:
    head, frames = split(step.delta.read_bytes())
    at = data.draw(st.integers(0, len(frames) - 1))
    change = data.draw(st.sampled_from(["length", "content", "kind", "drop", "twice", "swap"]))
    length, content = len(frames[at]), frames[at]
    if change == "length":
        length = data.draw(st.integers(0, 2**32 - 1))
    elif change == "content":
        content = zstandard.compress(data.draw(st.binary(max_size=100)) * data.draw(st.integers(1, 1000)))
        length = len(content)
    elif change == "kind":
        found = bytearray(zstandard.decompress(content))
        found[0] = data.draw(st.integers(0, 255))
        content = zstandard.compress(found)
        length = len(content)
    parts = [(len(frame), frame) for frame in frames]
    parts[at : at + 1] = {"drop": [], "twice": [parts[at]] * 2}.get(change, [(length, content)])
    if change == "swap":
        parts[0], parts[-1] = parts[-1], parts[0]

    is_target_or_error(step, tmp_path, head + b"".join(struct.pack("<I", n) + frame for n, frame in parts))


def test_a_frame_longer_than_the_index_allows_is_not_read(step: Step, tmp_path: Path) -> None:
    head, frames = split(step.delta.read_bytes())
    (tmp_path / "delta").write_bytes(head + joined(frames[:1]) + struct.pack("<I", 2**31) + bytes(2**20))

    with pytest.raises(PublishError, match=r"larger frame than the [0-9]+ bytes that its index allows"):
        apply(step, tmp_path / "into", tmp_path / "delta")


def test_bytes_after_the_last_frame_are_refused(step: Step, tmp_path: Path) -> None:
    (tmp_path / "delta").write_bytes(step.delta.read_bytes() + b"\0")

    with pytest.raises(PublishError, match="more bytes than its index needs"):
        apply(step, tmp_path / "into", tmp_path / "delta")


def test_another_index_than_the_announced_one_is_refused_before_it_is_parsed(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, frames = split(step.delta.read_bytes())
    other = zstandard.compress(step.before.path.joinpath(INDEX_FILE).read_bytes())
    (tmp_path / "delta").write_bytes(head + joined([other, *frames[1:]]))
    monkeypatch.setattr(delta_format, "index_in", None)

    with pytest.raises(PublishError, match="its index is not the announced one"):
        apply(step, tmp_path / "into", tmp_path / "delta")


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "x" * 300])
def test_an_index_that_names_a_file_outside_its_folder_is_refused(step: Step, tmp_path: Path, name: str) -> None:
    record = index_in((step.after.path / INDEX_FILE).read_bytes(), "w")
    data = replace(record, files={name: 1}, sizes={name: 4}).to_bytes()
    head, _ = split(step.delta.read_bytes())
    head = head[:24] + bytes.fromhex(digest(data))
    (tmp_path / "delta").write_bytes(head + joined([zstandard.compress(data), zstandard.compress(b"\1abcd")]))
    (tmp_path / "into").mkdir()

    with pytest.raises(PublishError, match=r"names a file .* which has an invalid name"):
        apply_delta(tmp_path / "delta", folder_of(step.before), tmp_path / "into", digest(data))
    assert list((tmp_path / "into").iterdir()) == []


@pytest.mark.parametrize("name", ["w", '\u00e9"\n\\', "\U0001f600" * 50])
def test_tensors_of_any_name_and_number_of_dimensions_are_reproduced(name: str, tmp_path: Path) -> None:
    before = {f"{name}{n}": torch.full((1,) * dims, 1.0) for n, dims in enumerate((0, 1, 4, 9))}
    step = a_step(tmp_path, before, {one: tensor + 1 for one, tensor in before.items()})

    apply(step, tmp_path / "into")

    assert contents(tmp_path / "into") == contents(step.after.path)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.uint8, torch.int16, torch.int32, torch.float8_e5m2])
def test_any_bits_of_any_dtype_are_reproduced(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)

    def bits(seed: int) -> torch.Tensor:
        most = 2 if dtype is torch.bool else 256
        found = torch.randint(0, most, (4096 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return found.view(dtype).reshape(64, 64)

    before, after = ({"w": bits(n), "same": torch.ones(3)} for n in range(2))
    after["w"][1:] = before["w"][1:]  # also few changes
    step = a_step(tmp_path, before, after)
    apply(step, tmp_path / "into")

    assert contents(tmp_path / "into") == contents(step.after.path)


@SLOW
@given(junk=st.binary(max_size=200))
def test_junk_is_no_delta(step: Step, tmp_path: Path, junk: bytes) -> None:
    head, _ = split(step.delta.read_bytes())
    for data in (junk, MAGIC + junk, head + junk):
        into = tmp_path / f"into-{len(list(tmp_path.iterdir()))}"
        (tmp_path / "junk").write_bytes(data)
        with pytest.raises(PublishError):
            apply(step, into, tmp_path / "junk")


def split(delta: bytes) -> tuple[bytes, list[bytes]]:
    """Return the head and the frames of a delta."""
    frames, at = list[bytes](), 40
    while at < len(delta):
        (length,) = struct.unpack_from("<I", delta, at)
        frames.append(delta[at + 4 : at + 4 + length])
        at += 4 + length
    return delta[:40], frames


def joined(frames: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
