"""A teacher's logprobs as an array of a batch: where they stand, on which rank, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.consumers.adapters.rows import rows_of
from penstock.consumers.batch import recording
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.replay import Replay
from penstock.errors import PayloadError, ProtocolError
from penstock.names import TEACHER_LOGPROBS
from penstock.payloads import sides
from penstock.records.sample import Sample
from tests.batch_factory import make_batch, make_samples, tiny_model, with_beside


def drawn() -> list[Sample]:
    return make_samples({5: tiny_model(2)}, groups=2, n=3)


def told(samples: list[Sample], *, whole: bool = False) -> dict[str, Any]:
    """A number for each token, another one each; of the response, or of the whole sequence."""
    return {
        one.id: -np.arange(1, 1 + len(one.tokens), dtype=np.float32)[0 if whole else one.prompt_length :] / (2 + i)
        for i, one in enumerate(samples)
    }


def test_they_stand_at_the_index_of_their_token() -> None:
    samples = drawn()
    for whole in (False, True):
        data = with_beside(samples, TEACHER_LOGPROBS, told(samples, whole=whole)).arrays()
        for i, one in enumerate(samples):
            wanted = [0.0] * one.prompt_length + [-(t + 1) / (2 + i) for t in range(one.prompt_length, len(one.tokens))]
            found = data[TEACHER_LOGPROBS][i]
            assert found[: len(one.tokens)] == pytest.approx(wanted)
            assert not found[len(one.tokens) :].any(), "padding holds nothing"


def test_layouts_and_ranks_have_the_same_key() -> None:
    samples = drawn()
    whole = with_beside(samples, TEACHER_LOGPROBS, told(samples))
    packed = whole.packed(40)
    assert sum(len(one[TEACHER_LOGPROBS]) for one in packed) == sum(len(one.tokens) for one in samples)
    for rank in range(8):
        data = whole.share(rank, 8).arrays()
        assert data[TEACHER_LOGPROBS].shape == data["tokens"].shape, "a rank without a sample has it as well"
    rows = rows_of(whole)
    assert all(
        (row.teacher_logprobs[row.row.prompt_length :] < 0).all() for row in rows if row.teacher_logprobs is not None
    )
    assert sum(row.teacher_logprobs is not None for row in rows) == len(samples)


def test_a_batch_without_them_has_no_such_key() -> None:
    batch = make_batch(drawn())
    assert TEACHER_LOGPROBS not in batch.arrays()
    with pytest.raises(ProtocolError, match="unknown array teacher_logprobs"):
        batch.arrays([TEACHER_LOGPROBS])


def test_a_sample_without_them_among_others_is_refused() -> None:
    samples = drawn()
    said = told(samples)
    del said[samples[2].id]
    with pytest.raises(PayloadError, match=f"sample {samples[2].id} lacks side array 'teacher_logprobs', which other"):
        with_beside(samples, TEACHER_LOGPROBS, said).arrays()


def test_T14_every_rank_refuses_it_and_none_waits_for_another() -> None:
    """Which rows have the array stands in the manifest: a rank sees it of the samples of other ranks too."""
    samples = drawn()
    said = told(samples)
    del said[samples[2].id]
    whole = with_beside(samples, TEACHER_LOGPROBS, said)
    for rank in range(3):
        share = whole.share(rank, 3)
        for read in (share.arrays, lambda of=share: list(of.minibatches(1, 64)), lambda of=share: of.packed(64)):
            with pytest.raises(PayloadError, match=f"sample {samples[2].id} lacks side array 'teacher_logprobs'"):
                read()
        share.arrays(["tokens", "loss_mask"])


def test_one_that_bears_no_loss_may_lack_them() -> None:
    samples = drawn()
    said = told(samples)
    del said[samples[2].id]
    batch = with_beside(samples, TEACHER_LOGPROBS, said)
    batch.remove([2])
    assert not batch.arrays()[TEACHER_LOGPROBS][2].any()


@pytest.mark.parametrize("wrong", [np.zeros(1, np.float32), np.full(99, -1.0), np.zeros((4, 4))])
def test_what_is_no_number_for_each_token_is_refused(wrong: Any) -> None:
    samples = drawn()
    with pytest.raises(PayloadError, match="needs one finite number for each of its"):
        with_beside(samples, TEACHER_LOGPROBS, told(samples) | {samples[0].id: wrong}).arrays()


def test_one_that_is_not_finite_is_refused() -> None:
    samples = drawn()
    said = told(samples)
    said[samples[1].id][0] = np.nan
    with pytest.raises(PayloadError, match="needs one finite number"):
        with_beside(samples, TEACHER_LOGPROBS, said).arrays()


def test_a_recording_holds_them(tmp_path: Path) -> None:
    samples = drawn()
    said = told(samples)
    batch = with_beside(samples, TEACHER_LOGPROBS, said)
    data: dict[str, Any] = dict(batch.payloads)  # type: ignore[call-overload]
    beside = {
        recording.side_key(name, TEACHER_LOGPROBS): sides.pack(TEACHER_LOGPROBS, said[name], name) for name in said
    }
    template = str(tmp_path / "{rollout_id}.bin")
    recording.save(template, batch.manifest, batch.digest, data | beside)

    again: Batch = Replay(template).next()

    np.testing.assert_array_equal(again.arrays()[TEACHER_LOGPROBS], batch.arrays()[TEACHER_LOGPROBS])
