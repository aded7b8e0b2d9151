"""Payload bytes: what goes in comes out, and what cannot be right is refused with the sample's name."""

import copy
import random
import struct
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import payloads
from penstock.errors import PayloadError
from penstock.records.job import Job
from penstock.records.sample import Sample

NAME = "digits/0/7/3"


def make_sample() -> Sample:
    """Prompt of 3, two drawn tokens of version 4, one of version 5, an observation, a drawn eos of version 5."""
    sample = Sample(Job("digits/0/7", 8, sampling={"temperature": 0.5}), 3)
    sample.append([11, 12, 13])
    sample.prompt_length = 3
    sample.append([21, 22], version=4, logprobs=[-0.5, -0.25])
    sample.append([23], version=5, logprobs=[-1.5])
    sample.append([31, 32])
    sample.append([1], version=5, logprobs=[-0.125])
    sample.reward, sample.status, sample.finish_reason = 1.0, "completed", "stop"
    return sample


def parts(**changes: Any) -> dict[str, Any]:
    sample = make_sample()
    given = {
        "tokens": sample.tokens,
        "logprobs": sample.logprobs,
        "generated": sample.generated,
        "loss_mask": sample.loss_mask,
        "versions": sample.versions,
        "prompt_length": 3,
        "sample_id": NAME,
    }
    return given | changes


def rewrite(data: bytes, **changes: Any) -> bytes:
    """The same payload with entries of its header replaced; arrays stay where they are."""
    size = struct.unpack_from("<I", data, 4)[0]
    header = msgpack.unpackb(data[8 : 8 + size]) | changes
    packed = msgpack.packb(header)
    body = data[8 + size + -size % 8 :]
    return b"PSP1" + struct.pack("<I", len(packed)) + packed + bytes(-len(packed) % 8) + body


def arrays_of(data: bytes) -> list[Any]:
    size = struct.unpack_from("<I", data, 4)[0]
    return list(msgpack.unpackb(data[8 : 8 + size])["arrays"])


def test_a_sample_comes_back_as_it_was() -> None:
    sample = make_sample()
    data = payloads.encode(sample)
    payload = payloads.decode(data, sample.id, payloads.checksum_of(data))
    assert payload.tokens.tolist() == sample.tokens
    assert payload.logprobs.tolist() == sample.logprobs
    assert payload.generated.tolist() == sample.generated
    assert payload.loss_mask.tolist() == sample.loss_mask
    assert payload.versions.tolist() == sample.versions
    assert payload.spans == ((3, 5, 4), (5, 6, 5), (8, 9, 5))
    assert payload.prompt_length == 3
    dtypes = [payload.tokens.dtype, payload.logprobs.dtype, payload.generated.dtype, payload.versions.dtype]
    assert dtypes == [np.int32, np.float32, np.uint8, np.int32]


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Any]:
    prompt = draw(st.integers(0, 20))
    generated = [0] * prompt + draw(st.lists(st.integers(0, 1), max_size=60))
    length = len(generated)
    loss = [bit and draw(st.integers(0, 1)) for bit in generated]
    return {
        "tokens": draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length)),
        "logprobs": [draw(st.floats(-100, 0, width=32)) if bit else 0.0 for bit in generated],
        "generated": generated,
        "loss_mask": loss,
        "versions": [draw(st.integers(0, 3)) if bit else -1 for bit in generated],
        "prompt_length": prompt,
        "sample_id": NAME,
    }


@settings(max_examples=80, deadline=None)
@given(samples())
def test_round_trip(given_parts: dict[str, Any]) -> None:
    data = payloads.encode_arrays(**given_parts)
    payload = payloads.decode(data, NAME, payloads.checksum_of(data))
    for name in ("tokens", "logprobs", "generated", "loss_mask", "versions"):
        assert getattr(payload, name).tolist() == given_parts[name]
    again = payloads.encode_arrays(
        payload.tokens,
        payload.logprobs,
        payload.generated,
        payload.loss_mask,
        spans=payload.spans,
        prompt_length=payload.prompt_length,
        sample_id=NAME,
    )
    assert again == data


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    whole = payloads.encode(make_sample())
    at = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
    damaged = whole[:at] + bytes([value]) + whole[at + 1 :]
    with pytest.raises(PayloadError, match=NAME):
        payloads.decode(damaged, NAME, payloads.checksum_of(whole))
    # Without a checksum only what breaks the frame can be seen; nothing but PayloadError may come out.
    try:
        payload = payloads.decode(damaged, NAME)
    except PayloadError:
        return
    assert len(payload.versions) == len(payload.tokens)


@pytest.mark.timeout(120)
def test_mutated_headers_are_refused_or_harmless() -> None:
    """Values of the header replaced by hostile ones, anywhere and several at once: PayloadError or a true payload."""
    whole = payloads.encode(make_sample(), {"experts": np.zeros((6, 2), np.uint8)})
    size = struct.unpack_from("<I", whole, 4)[0]
    header = msgpack.unpackb(whole[8 : 8 + size])
    rng = random.Random(7)
    hostile: list[Any] = [0, -1, 1, 2**31, 2**62, 2**63, 1.5, float("nan"), None, True, "", "mask", b"x", [], {}, [[]]]
    refused = kept = 0
    for _ in range(20_000):
        mutant = copy.deepcopy(header)
        for _ in range(rng.randint(1, 3)):
            at: Any = mutant
            while True:
                place = rng.choice(list(at) if isinstance(at, dict) else range(len(at))) if at else None
                if place is None:
                    break
                if isinstance(at[place], list | dict) and rng.random() < 0.8:
                    at = at[place]
                    continue
                at[place] = copy.copy(rng.choice(hostile))
                break
        try:
            payload = payloads.decode(rewrite(whole, **mutant), NAME)
        except PayloadError as exc:
            refused += NAME in str(exc)
        else:
            kept += 1
            assert (payload.versions >= 0).tolist() == payload.generated.astype(bool).tolist()
            assert payload.prompt_length <= 3
    assert (refused + kept, refused > kept) == (20_000, True)


@pytest.mark.parametrize("cut", range(0, len(payloads.encode(make_sample())), 5))
def test_truncated_bytes_are_refused(cut: int) -> None:
    with pytest.raises(PayloadError, match=NAME):
        payloads.decode(payloads.encode(make_sample())[:cut], NAME)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(PayloadError, match="where its header needs"):
        payloads.decode(payloads.encode(make_sample()) + bytes(8), NAME)


def change_array(index: int, field: int, value: Any) -> bytes:
    data = payloads.encode(make_sample())
    arrays = arrays_of(data)
    arrays[index][field] = value
    return rewrite(data, arrays=arrays)


def change_bytes(index: int, at: int, value: bytes) -> bytes:
    """The payload with some bytes of one of its arrays replaced."""
    data = payloads.encode(make_sample())
    size = struct.unpack_from("<I", data, 4)[0]
    begin = 8 + size + -size % 8 + arrays_of(data)[index][3] + at
    return data[:begin] + value + data[begin + len(value) :]


def add_array(shape: Any) -> bytes:
    data = payloads.encode(make_sample())
    arrays = arrays_of(data)
    return rewrite(data, arrays=[*arrays, ["side", "int8", shape, arrays[-1][3] + 16]])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (change_bytes(1, 4 * 4, struct.pack("<f", float("nan"))), "a logprob of it is not a finite number"),
        (change_bytes(1, 4 * 4, struct.pack("<f", float("-inf"))), "a logprob of it is not a finite number"),
        (change_bytes(2, 0, b"\x02"), "loss on a token that was not generated"),
        (change_bytes(2, 6, b"\x02"), "loss on a token that was not generated"),
        (change_bytes(2, 6, b"\x01"), "not every generated token has a version"),
        (rewrite(payloads.encode(make_sample()), spans=[2, 5, 4, 5, 6, 5, 8, 9, 5]), "version 4 is given to tokens 2"),
        (rewrite(payloads.encode(make_sample()), prompt=4), "version 4 is given to tokens 3 to 5"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 5, 4, 5, 9, 5]), "not all of them generated"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 5, 4]), "not every generated token has a version"),
        (add_array([0, 2**62, 2**62]), "array 'side' has shape"),
        (add_array([0] * 65), "array 'side' has shape"),
        (add_array({"0": 0, "1": 0}), "array 'side' has shape"),
        (add_array(7), "does not describe an array"),
        (change_array(0, 1, "complex128"), "unknown dtype 'complex128'"),
        (change_array(0, 1, ["int32"]), "does not describe an array"),
        (change_array(0, 1, "float32"), "tokens is float32, not int32"),
        (change_array(0, 2, [8]), "tokens has shape \\(8,\\) for 9 tokens"),
        (change_array(0, 2, [3, 3]), "tokens has shape \\(3, 3\\) for 9 tokens"),
        (change_array(0, 2, [2**62]), "is cut off"),
        (change_array(0, 2, [-1]), "has shape \\[-1\\]"),
        (change_array(1, 3, 0), "its arrays overlap"),
        (change_array(1, 3, 44), "its arrays overlap"),
        (change_array(2, 3, 2**40), "is cut off"),
        (change_array(2, 0, "tokens"), "names an array 'tokens' twice"),
        (change_array(2, 0, "masque"), "no array 'mask'"),
        (rewrite(payloads.encode(make_sample()), arrays=[[]]), "does not describe an array"),
        (rewrite(payloads.encode(make_sample()), arrays=None), "no list of at most 64 arrays"),
        (rewrite(payloads.encode(make_sample()), length=10), "for 10 tokens"),
        (rewrite(payloads.encode(make_sample()), length=-1), "a prompt of 3 of -1 tokens"),
        (rewrite(payloads.encode(make_sample()), prompt=10), "a prompt of 10 of 9 tokens"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 5, 4, 4, 6, 5]), "overlaps"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 10, 4]), "leaves its 9 tokens"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 3, 4]), "is empty"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 5, -2]), "version -2"),
        (rewrite(payloads.encode(make_sample()), spans=[3, 5]), "not triples"),
        (b"JUNK" + payloads.encode(make_sample())[4:], "begins with b'JUNK'"),
        (b"", "too few"),
    ],
)
def test_what_cannot_be_right_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(PayloadError, match=sentence) as caught:
        payloads.decode(data, NAME)
    assert NAME in str(caught.value)


def test_a_wrong_checksum_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"checksum .* where its record says 0x0000000000000001"):
        payloads.decode(payloads.encode(make_sample()), NAME, checksum=1)


def test_reads_are_views_aligned_and_read_only() -> None:
    data = payloads.encode(make_sample(), {"experts": np.arange(36, dtype=np.uint16).reshape(9, 2, 2)})
    payload = payloads.decode(data, NAME)
    base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    for array in (payload.tokens, payload.logprobs, payload.mask, payload.sides["experts"]):
        address, read_only = array.__array_interface__["data"]
        assert 0 < address - base < len(data)
        assert (address - base) % 8 == 0
        assert read_only
    over_writable = payloads.decode(memoryview(bytearray(data)), NAME)
    with pytest.raises(ValueError, match="read-only"):
        over_writable.tokens[0] = 1


def test_side_arrays_travel_with_their_shape() -> None:
    experts = np.arange(9 * 58 * 8, dtype=np.uint16).reshape(9, 58, 8)
    empty = np.empty((0, 3), np.float32)
    payload = payloads.decode(payloads.encode(make_sample(), {"experts": experts, "values": empty}), NAME)
    np.testing.assert_array_equal(payload.sides["experts"], experts)
    assert payload.sides["values"].shape == (0, 3)
    with pytest.raises(PayloadError, match="17 dimensions, more than the 16"):
        payloads.encode(make_sample(), {"deep": np.zeros([1] * 17, np.uint8)})
    with pytest.raises(PayloadError, match="complex64"):
        payloads.encode(make_sample(), {"experts": np.zeros(3, np.complex64)})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": [2**31] + [0] * 8}, "tokens does not fit int32"),
        ({"tokens": np.full(9, 2**31, np.int64)}, "tokens does not fit int32"),
        ({"generated": [0, 0, 0, 1, 1, 1, 0, 0, 256]}, "generated does not fit uint8"),
        ({"generated": [0, 0, 0, 1, 1, 1, 0, 0, 2]}, "0 and 1 only"),
        ({"logprobs": [0.0] * 8}, "8 entries of logprobs for 9 tokens"),
        ({"versions": [-1] * 10}, "10 entries of versions for 9 tokens"),
        ({"logprobs": [0.0, 0.0, 0.0, -0.5, float("nan"), -1.5, 0.0, 0.0, -1.0]}, "logprob of token 4 is nan"),
        ({"logprobs": [0.0, 0.0, 0.0, -0.5, -1.0, float("-inf"), 0.0, 0.0, -1.0]}, "logprob of token 5 is -inf"),
        ({"logprobs": [[0.0] * 9]}, "2 dimensions"),
        ({"loss_mask": [0, 0, 1, 1, 1, 1, 0, 0, 1]}, "token 2 bears loss but was not generated"),
        ({"versions": [-1, -1, -1, 4, -1, 5, -1, -1, 5]}, "not every generated token has a version"),
        ({"versions": [-1, -1, 4, 4, 4, 5, -1, -1, 5]}, "version 4 is given to tokens 2 to 5"),
        ({"prompt_length": 4}, "token 3 has version 4, but it is one of the prompt's 4"),
        ({"versions": None, "spans": [(3, 6, 4), (5, 9, 5)]}, "overlaps"),
        ({"spans": [(3, 6, 4)]}, "one of the two"),
        ({"prompt_length": 10}, "a prompt of 10 of 9"),
    ],
)
def test_a_sample_that_cannot_be_true_is_not_encoded(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PayloadError, match=sentence) as caught:
        payloads.encode_arrays(**parts(**changes))
    assert NAME in str(caught.value)


def test_a_sample_without_loss_may_lack_versions_and_logprobs() -> None:
    blank = parts(loss_mask=[0] * 9, versions=[-1] * 9, logprobs=[float("nan")] * 9)
    payload = payloads.decode(payloads.encode_arrays(**blank), NAME)
    assert payload.spans == ()


def test_an_empty_sample_has_a_payload() -> None:
    payload = payloads.decode(payloads.encode(Sample(Job("digits/0/7", 8), 3)), NAME)
    assert len(payload) == 0
    assert payload.versions.tolist() == []


def test_the_record_counts_what_is_in_the_bytes() -> None:
    sample = make_sample()
    sample.loss_mask[5] = 0
    data, (meta,) = payloads.pack([sample], token="t", server="control", worker="w1")
    assert data == payloads.encode(sample)
    assert (meta.k, meta.token, meta.server, meta.worker, meta.shared) == (3, "t", "control", "w1", [])
    assert (meta.checksum, meta.num_bytes) == (payloads.checksum_of(data), len(data))
    assert (meta.length, meta.prompt_length, meta.num_generated, meta.num_loss) == (9, 3, 4, 3)
    assert meta.loss_by_version == [[4, 2], [5, 1]]
    assert (meta.oldest, meta.newest) == (4, 5)
    assert (meta.reward, meta.status, meta.finish_reason, meta.temperature) == (1.0, "completed", "stop", 0.5)


def test_the_record_says_how_the_sample_was_made() -> None:
    sample = make_sample()
    told = {
        "reward_info": {"a": 1}, "num_turns": 7, "num_aborts": 8, "cached_tokens": 9, "num_unproven": 3,
        "pauses": [[5, 6]], "started_s": 10.0, "first_token_s": 10.5, "generate_s": 11.0, "reward_s": 12.0,
        "drawn_s": 30.0,
    }  # fmt: skip
    for name, value in told.items():
        setattr(sample, name, value)
    _, (meta,) = payloads.pack([sample], token="t", server="s", logprob_kind="original")
    assert {name: getattr(meta, name) for name in told} == told
    assert (meta.logprob_kind, meta.sides) == ("original", [])


def test_greedy_logprobs_are_recorded_as_of_temperature_1() -> None:
    sample = make_sample()
    for greedy in (0.0, 1e-7):
        sample.job.sampling["temperature"] = greedy
        assert payloads.pack([sample], token="t", server="s")[1][0].temperature == 1.0
        assert payloads.pack([sample], token="t", server="s", temperature=greedy)[1][0].temperature == 1.0


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_sample_without_a_reward_has_no_record(reward: float | None) -> None:
    sample = make_sample()
    sample.reward = reward
    with pytest.raises(PayloadError, match="not a number"):
        payloads.pack([sample], token="t", server="s")


def sample_of(k: int, given_parts: dict[str, Any]) -> Sample:
    sample = Sample(Job("digits/0/7", 8), k, reward=1.0)
    for name in ("tokens", "logprobs", "generated", "loss_mask", "versions", "prompt_length"):
        setattr(sample, name, given_parts[name])
    return sample


@settings(max_examples=60, deadline=None)
@given(st.lists(samples(), min_size=2, max_size=5))
def test_samples_packed_together_are_what_each_is_alone(many: list[dict[str, Any]]) -> None:
    together = [sample_of(k, given_parts) for k, given_parts in enumerate(many)]
    data, metas = payloads.pack(together, token="t", server="s")
    for sample, meta in zip(together, metas, strict=True):
        home, begin, size = meta.shared
        assert (home, begin % 8, size) == (0, 0, len(data))
        alone, (expected,) = payloads.pack([sample], token="t", server="s")
        assert data[begin : begin + meta.num_bytes] == alone
        assert replace(meta, shared=[], packed_s=expected.packed_s) == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"generated": [0, 0, 0, 1, 1, 1, 0, 0, 2]}, "0 and 1 only"),
        ({"loss_mask": [0, 0, 1, 1, 1, 1, 0, 0, 1]}, "token 2 bears loss but was not generated"),
        ({"logprobs": [0.0, 0.0, 0.0, -0.5, float("nan"), -1.5, 0.0, 0.0, -1.0]}, "logprob of token 4 is nan"),
        ({"versions": [-1, -1, -1, 4, -1, 5, -1, -1, 5]}, "not every generated token has a version"),
        ({"versions": [-1, -1, 4, 4, 4, 5, -1, -1, 5]}, "version 4 is given to tokens 2 to 5"),
    ],
)
def test_one_that_cannot_be_true_is_named_among_others(changes: dict[str, Any], sentence: str) -> None:
    many = [sample_of(k, parts(**changes) if k == 1 else parts()) for k in range(3)]
    with pytest.raises(PayloadError, match=f"sample digits/0/7/1: .*{sentence}"):
        payloads.pack(many, token="t", server="s")
