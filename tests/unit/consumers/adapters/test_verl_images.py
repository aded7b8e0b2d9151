"""Positions and images of a batch as verl has them; that verl computes with them is in tests/wide/test_images.py."""

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from penstock.consumers.adapters.inside_verl.images import add_images, check_text_alone
from penstock.errors import ConfigError, ProtocolError

PLACE, PAD, MERGE = 9, 0, 2
GRID = torch.tensor([[1, 4, 6]])
#: Of an image of 2 x 3 tokens, and what is beside it.
SEEN = {"image_grid_thw": GRID, "pixel_values": torch.zeros(24, 4)}


def processor(merge: int = MERGE) -> Any:
    """As verl binds a model's function to its processor."""
    vision = SimpleNamespace(spatial_merge_size=merge)
    made = SimpleNamespace(
        image_token_id=PLACE,
        image_processor=SimpleNamespace(merge_size=merge),
        config=SimpleNamespace(vision_config=vision),
    )
    for name in ("get_rope_index", "get_vision_position_ids"):
        setattr(made, name, MethodType(getattr(Qwen2VLModel, name), made))
    return made


def output(prompts: list[list[int]], responses: list[list[int]]) -> Any:
    """A batch as ``data_proto`` makes it."""
    width_p, width_r = max(map(len, prompts)), max(map(len, responses))
    left = torch.tensor([[PAD] * (width_p - len(one)) + one for one in prompts])
    right = torch.tensor([one + [PAD] * (width_r - len(one)) for one in responses])
    mask = torch.tensor([[1] * len(one) + [0] * (width_r - len(one)) for one in responses])
    before = torch.tensor([[0] * (width_p - len(one)) + [1] * len(one) for one in prompts])
    tensors = {
        "prompts": left,
        "responses": right,
        "response_mask": mask.clone(),
        "input_ids": torch.cat([left, right], dim=1),
        "attention_mask": torch.cat([before, mask], dim=1),
    }
    return SimpleNamespace(batch=tensors, non_tensor_batch={"multi_modal_inputs": [{} for _ in prompts]})


def rows(count: int) -> Any:
    return [SimpleNamespace(row=SimpleNamespace(sample=f"d/0/0/{k}")) for k in range(count)]


def test_tokens_of_an_image_stand_in_rows_and_columns_and_those_behind_it_after_the_longer_side() -> None:
    made = output([[1, *[PLACE] * 6, 2], [3, 4]], [[5], [6, 7]])
    add_images(made, rows(2), {"d/0/0/0": SEEN}, processor(), PAD)
    found = made.batch["position_ids"]
    assert found.shape == (2, 4, 10)
    assert found[0, :, :9].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    # Padding on the left counts for nothing.
    assert found[1, :, 6:].tolist() == [[0, 1, 2, 3]] * 4
    assert made.non_tensor_batch["multi_modal_inputs"][0].keys() == SEEN.keys()
    assert made.non_tensor_batch["multi_modal_inputs"][1] == {}


def test_the_place_of_an_image_that_was_drawn_is_none_and_bears_no_loss() -> None:
    made = output([[1, *[PLACE] * 6], [3]], [[5, PLACE], [PLACE, 7, 8]])
    add_images(made, rows(2), {"d/0/0/0": SEEN}, processor(), PAD)
    assert made.batch["response_mask"].tolist() == [[1, 0, 0], [0, 0, 0]], "what stands behind it has seen it"
    assert made.batch["responses"].tolist() == [[5, PAD, PAD], [PAD, 7, 8]]
    assert (made.batch["input_ids"] == PLACE).sum() == 6, "as many as the image has tokens"
    assert made.batch["input_ids"][:, 7:].tolist() == made.batch["responses"].tolist()


def test_a_text_that_holds_the_token_of_a_place_is_refused() -> None:
    with pytest.raises(ProtocolError, match="d/0/0/0 has no images, and its prompt holds"):
        add_images(output([[1, PLACE]], [[5]]), rows(1), {}, processor(), PAD)


def test_the_processor_of_another_model_is_refused() -> None:
    made = output([[1, *[PLACE] * 6]], [[5]])
    with pytest.raises(ConfigError, match="has 6 tokens in the places of its images, and the processor makes 24"):
        add_images(made, rows(1), {"d/0/0/0": SEEN}, processor(merge=1), PAD)


def test_prompts_of_verls_own_with_images_are_refused_and_those_of_text_are_not() -> None:
    texts = [[{"role": "user", "content": "a"}], "b", [{"role": "user", "content": [{"type": "text", "text": "a"}]}]]
    check_text_alone({"raw_prompt": texts, "multi_modal_data": [{}, None, {"images": None}]})
    seen = [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "a"}]}]
    with pytest.raises(ConfigError, match=r"Prompt 1 has parts of type image, and prompts of verl"):
        check_text_alone({"raw_prompt": ["a", seen]})
    with pytest.raises(ConfigError, match=r"Prompt 0 holds images, and prompts of verl's own"):
        check_text_alone({"multi_modal_data": [{"images": ["x"]}]})
