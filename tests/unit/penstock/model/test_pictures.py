"""The place of images in stored prompts, and what a group shares of them."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.model.pictures import Pictures
from penstock.payloads import sides
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample

PLACE = 9


def pictures(*counts: int) -> Pictures:
    return Pictures("d/0/1", PLACE, frozenset({PLACE}), list(counts), ["data:"] * len(counts), {})


def test_the_stored_prompt_has_the_tokens_of_each_image_and_folds_back_behind_a_prefix() -> None:
    found = pictures(3, 2)
    found.unfold([1, PLACE, 2, PLACE, 3])
    assert found.prompt == [1, PLACE, PLACE, PLACE, 2, PLACE, PLACE, 3]
    assert found.images.places == [(1, 3), (5, 2)]
    assert found.images.folded([*found.prompt, 4, 5]) == [1, PLACE, 2, PLACE, 3, 4, 5]


def test_a_prompt_with_other_places_than_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 places for 1 images"):
        pictures(3).unfold([PLACE, PLACE])


def test_an_answer_ends_where_it_draws_the_place_of_an_image() -> None:
    assert pictures(1).stopping({"stop_token_ids": [4]})["stop_token_ids"] == [4, PLACE]


def test_a_prompt_without_images_may_hold_no_place_of_one() -> None:
    found = pictures()
    found.unfold([1, 2])
    assert (found.prompt, found.images.uris) == ([1, 2], [])
    with pytest.raises(ConfigError, match="1 places for 0 images"):
        found.unfold([1, PLACE])


def test_a_prefix_behind_other_places_is_not_continued() -> None:
    found = pictures(2)
    found.unfold([1, PLACE])
    sample = Sample(Job("d/0/1", 1), 0)
    sample.append([1, PLACE, PLACE])
    sample.prompt_length = 3
    assert found.are_of(sample)
    sample.prompt_length = 2
    assert not found.are_of(sample)


def test_what_a_group_shares_lies_under_one_key_of_its_lease() -> None:
    keys, shared = Keys("run"), sides.packed("grid", np.ones((1, 3), np.int64), "d/0/1/0")
    entry = shared.entry("grid")
    assert {sides.key_of(keys, "d/0/1", k, "lease", entry) for k in range(4)} == {keys.side("d/0/1/0", "lease", "grid")}
    assert sides.key_of(keys, "d/0/1", 3, "lease", entry[:3]) == keys.side("d/0/1/3", "lease", "grid")
    assert sides.unpack("grid", shared.data, "d/0/1/3", entry[2]).tolist() == [[1, 1, 1]]
