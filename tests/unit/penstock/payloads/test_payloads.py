"""Payload bytes: what goes in comes out, and what cannot be right is refused with the sample's name."""

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import payloads
from penstock.errors import PayloadError
from penstock.payloads.format import MAX_SPANS, offsets
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


LISTS = ("tokens", "logprobs", "generated", "loss_mask", "versions", "prompt_length")


def changed(changes: dict[str, Any], k: int = 3) -> Sample:
    sample = make_sample()
    sample.k = k
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def rewrite(
    spans: Sequence[tuple[int, int, int]] = ((3, 5, 4), (5, 6, 5), (8, 9, 5)),
    *,
    length: int = 9,
    prompt: int = 3,
    num_spans: int | None = None,
) -> bytes:
    """The payload of the sample with another header; its arrays stay as they are."""
    data = payloads.encode(make_sample())
    count = len(spans) if num_spans is None else num_spans
    flat = [value for span in spans for value in span]
    head = struct.pack(f"<4sIII{len(flat)}i", b"PSP2", length, prompt, count, *flat)
    return head + bytes(-len(head) % 8) + data[offsets(9, 3)[0] :]


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
    }


@settings(max_examples=80, deadline=None)
@given(samples())
def test_round_trip(lists: dict[str, Any]) -> None:
    data = payloads.encode(changed(lists))
    payload = payloads.decode(data, NAME, payloads.checksum_of(data))
    for name in ("tokens", "logprobs", "generated", "loss_mask", "versions"):
        assert getattr(payload, name).tolist() == lists[name]
    assert payloads.encode(changed({name: getattr(payload, name) for name in LISTS})) == data, "from arrays too"


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


def test_mutated_headers_are_refused_or_harmless() -> None:
    """Numbers of the header replaced by hostile ones, several at once: PayloadError or a true payload."""
    whole = payloads.encode(make_sample())
    rng = random.Random(7)
    refused = kept = 0
    for _ in range(20_000):
        mutant = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            struct.pack_into("<I", mutant, 4 * rng.randrange(1, 13), rng.choice([*range(11), 2**31 - 1, 2**32 - 1]))
        try:
            payload = payloads.decode(bytes(mutant), NAME)
        except PayloadError as exc:
            refused += NAME in str(exc)
        else:
            kept += 1
            assert (payload.versions >= 0).tolist() == payload.generated.astype(bool).tolist()
            assert payload.prompt_length <= 3
    assert (refused + kept, refused > kept > 0) == (20_000, True)


@pytest.mark.parametrize("cut", range(0, len(payloads.encode(make_sample())), 5))
def test_truncated_bytes_are_refused(cut: int) -> None:
    with pytest.raises(PayloadError, match=NAME):
        payloads.decode(payloads.encode(make_sample())[:cut], NAME)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(PayloadError, match="where its header needs"):
        payloads.decode(payloads.encode(make_sample()) + bytes(8), NAME)


def change_bytes(index: int, at: int, value: bytes) -> bytes:
    """The payload with some bytes of one of its arrays replaced."""
    data = payloads.encode(make_sample())
    begin = offsets(9, 3)[index] + at
    return data[:begin] + value + data[begin + len(value) :]


def test_more_spans_than_a_sample_may_have_are_refused() -> None:
    """Each takes the trainer's time: 2.6 s for 40 MB of them."""
    length = MAX_SPANS + 1
    spans = np.stack((np.arange(length), np.arange(1, length + 1), np.arange(length)), 1).astype("<i4")
    begins = offsets(length, length)
    data = bytearray(begins[-1])
    data[:16] = struct.pack("<4sIII", b"PSP2", length, 0, length)
    data[16 : 16 + spans.nbytes] = spans.tobytes()
    data[begins[2] : begins[2] + length] = bytes([payloads.GENERATED]) * length
    with pytest.raises(PayloadError, match="65537 tokens, and 65537 spans"):
        payloads.decode(bytes(data), NAME)
    many = {name: [1] * length for name in ("tokens", "generated", "loss_mask")}
    many |= {"logprobs": [0.0] * length, "versions": list(range(length)), "prompt_length": 0}
    with pytest.raises(PayloadError, match="65537 version spans are more than the 65536"):
        payloads.encode(changed(many))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (change_bytes(1, 4 * 4, struct.pack("<f", float("nan"))), "logprob of token 4 is nan"),
        (change_bytes(1, 4 * 4, struct.pack("<f", float("-inf"))), "logprob of token 4 is -inf"),
        (change_bytes(1, 4 * 6, struct.pack("<f", -0.5)), "token 6 was not generated, and its logprob is -0.5"),
        (change_bytes(2, 0, b"\x02"), "loss on a token that was not generated"),
        (change_bytes(2, 6, b"\x02"), "loss on a token that was not generated"),
        (change_bytes(2, 6, b"\x04"), "its mask has undefined bits"),
        (change_bytes(2, 6, b"\x01"), "not every generated token has a version"),
        (rewrite([(2, 5, 4), (5, 6, 5), (8, 9, 5)]), "version 4 is given to tokens 2"),
        (rewrite(prompt=4), "version 4 is given to tokens 3 to 5"),
        (rewrite([(3, 5, 4), (5, 9, 5)]), "not all of them generated"),
        (rewrite([(3, 5, 4)]), "not every generated token has a version"),
        (rewrite(length=11), "where its header needs 168"),
        (rewrite(length=2**32 - 1), "a prompt of 3 of 4294967295 tokens"),
        (rewrite(prompt=10), "a prompt of 10 of 9 tokens"),
        (rewrite(num_spans=10), "9 tokens, and 10 spans"),
        (rewrite([(3, 5, 4), (4, 6, 5)]), "overlaps"),
        (rewrite([(3, 10, 4)]), "leaves its 9 tokens"),
        (rewrite([(-1, 5, 4)]), "leaves its 9 tokens"),
        (rewrite([(3, 3, 4)]), "is empty"),
        (rewrite([(3, 5, -2)]), "version -2"),
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
    data = payloads.encode(make_sample())
    payload = payloads.decode(data, NAME)
    base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    for array in (payload.tokens, payload.logprobs, payload.mask):
        address, read_only = array.__array_interface__["data"]
        assert 0 < address - base < len(data)
        assert (address - base) % 8 == 0
        assert read_only
    over_writable = payloads.decode(memoryview(bytearray(data)), NAME)
    with pytest.raises(ValueError, match="read-only"):
        over_writable.tokens[0] = 1


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
        ({"logprobs": [0.0, 0.0, -0.5, -0.5, -1.0, -1.5, 0.0, 0.0, -1.0]}, "token 2 was not generated"),
        ({"logprobs": [[0.0] * 9]}, "logprobs does not fit float32"),
        ({"generated": 9}, "generated does not fit uint8"),
        ({"tokens": np.zeros((3, 3), np.int32)}, "tokens does not fit int32"),
        ({"tokens": [1.5] * 9}, "tokens does not fit int32"),
        ({"loss_mask": [0, 0, 1, 1, 1, 1, 0, 0, 1]}, "loss on a token that was not generated"),
        ({"versions": [-1, -1, -1, 4, -1, 5, -1, -1, 5]}, "not every generated token has a version"),
        ({"versions": [-1, -1, 4, 4, 4, 5, -1, -1, 5]}, "version 4 is given to tokens 2 to 5"),
        ({"prompt_length": 4}, "version 4 is given to tokens 3 to 5, .* after the prompt of 4"),
        ({"prompt_length": 10}, "a prompt of 10 of 9"),
    ],
)
def test_a_sample_that_cannot_be_true_is_not_encoded(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PayloadError, match=sentence) as caught:
        payloads.encode(changed(changes))
    assert NAME in str(caught.value)


def test_a_sample_without_loss_may_lack_versions_and_logprobs() -> None:
    blank = changed({"loss_mask": [0] * 9, "versions": [-1] * 9, "logprobs": [float("nan")] * 9})
    payload = payloads.decode(payloads.encode(blank), NAME)
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


@settings(max_examples=60, deadline=None)
@given(st.lists(samples(), min_size=2, max_size=5))
def test_samples_packed_together_are_what_each_is_alone(many: list[dict[str, Any]]) -> None:
    together = [changed(lists, k) for k, lists in enumerate(many)]
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
        ({"loss_mask": [0, 0, 1, 1, 1, 1, 0, 0, 1]}, "loss on a token that was not generated"),
        ({"logprobs": [0.0, 0.0, 0.0, -0.5, float("nan"), -1.5, 0.0, 0.0, -1.0]}, "logprob of token 4 is nan"),
        ({"versions": [-1, -1, -1, 4, -1, 5, -1, -1, 5]}, "not every generated token has a version"),
        ({"versions": [-1, -1, 4, 4, 4, 5, -1, -1, 5]}, "version 4 is given to tokens 2 to 5"),
    ],
)
def test_one_that_cannot_be_true_is_named_among_others(changes: dict[str, Any], sentence: str) -> None:
    many = [changed(changes if k == 1 else {}, k) for k in range(3)]
    with pytest.raises(PayloadError, match=f"sample digits/0/7/1: .*{sentence}"):
        payloads.pack(many, token="t", server="s")
