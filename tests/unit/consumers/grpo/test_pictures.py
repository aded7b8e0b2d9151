"""What a model that sees images is called with."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.consumers.grpo.pictures import KEYS, inputs_of

PLACE = 9
MODEL: Any = SimpleNamespace(config=SimpleNamespace(image_token_id=PLACE))


def micro(tokens: list[int], generated: list[int]) -> dict[str, Any]:
    return {
        "tokens": torch.tensor([tokens]),
        "generated": torch.tensor([generated]),
        "lengths": torch.tensor([len(tokens)]),
    }


def test_T6_the_place_of_an_image_is_a_token_like_any_other_where_there_are_no_images() -> None:
    """The engine drew what stands behind it so."""
    given = inputs_of(MODEL, micro([1, 2, PLACE, 3], [0, 1, 1, 1]))
    assert given["input_ids"].tolist() == [[1, 2, PLACE, 3]]
    assert "mm_token_type_ids" not in given


def test_the_place_that_ends_an_answer_is_none_of_an_image() -> None:
    images = {key: torch.from_numpy(np.zeros((1, 3), np.float32)) for key in KEYS}
    given = inputs_of(MODEL, micro([1, PLACE, 2, PLACE], [0, 0, 1, 1]) | images)
    assert given["input_ids"].tolist() == [[1, PLACE, 2, 0]]
    assert given["mm_token_type_ids"].tolist() == [[0, 1, 0, 0]]
