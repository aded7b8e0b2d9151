"""Pass images of a batch, processed by the workers, to the model with the tokens.

    batch.side(pixel_values, image_grid_thw) ─> micro-batch: concatenated arrays of its samples ─> model call

A sample's tokens already contain the image placeholders that the engine inserted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.batch.batch import Batch
from penstock.model.folder import read_config
from penstock.names import IMAGE_GRID, PIXEL_VALUES

Micro = dict[str, Any]
#: Model inputs for images.
KEYS = (PIXEL_VALUES, IMAGE_GRID)
#: Set in a micro-batch without images if its batch has some.
IMAGES_ELSEWHERE = "images_elsewhere"


def auto_class(path: str) -> Any:
    """Return the class that loads the model in a folder, including its vision tower if present."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "vision_config" in read_config(path) else AutoModelForCausalLM


def add_images(batch: Batch, parts: Sequence[Sequence[Micro]]) -> None:
    """Add the images of a batch, if any, to the micro-batches of their samples. Blocks for their bytes.

    Raises:
        PayloadError: an image is gone or damaged.
    """
    if not batch.has_side(PIXEL_VALUES):
        return
    held = {key: dict(zip(batch.indices, batch.side(key), strict=True)) for key in KEYS}
    for micro in (micro for part in parts for micro in part):
        rows = micro["rows"].tolist()
        for key in KEYS:
            arrays = [array for row in rows if (array := held[key].get(row)) is not None]
            if arrays:
                micro[key] = torch.from_numpy(np.concatenate(arrays)).to(micro["tokens"].device)
        micro[IMAGES_ELSEWHERE] = PIXEL_VALUES not in micro


def inputs_of(model: Any, micro: Micro) -> dict[str, Tensor]:
    """Return the inputs of a Hugging Face model for a micro-batch, by name: [B, L] tokens, mask, positions, images.

    A vision model computes positions itself, of rows and columns. A generated image placeholder, which ends its sample,
    is replaced by another token: no later token could see the difference. In a batch without images it is an ordinary
    token, as it was to the engine.
    """
    tokens = micro["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    attention = (positions < micro["lengths"][:, None]).long()
    place = getattr(getattr(model, "config", None), "image_token_id", None)
    if place is None or PIXEL_VALUES not in micro:
        return {"input_ids": tokens, "attention_mask": attention, "position_ids": positions.expand_as(attention)}
    drawn = micro["generated"].bool() & (tokens == place)
    inputs = {"input_ids": tokens.masked_fill(drawn, 0), "attention_mask": attention}
    images = {key: micro[key] for key in KEYS}
    return inputs | images | {"mm_token_type_ids": (inputs["input_ids"] == place).int()}
