"""Images of a batch on their way into the model: what the workers' image processor made of them, beside the tokens.

    batch.side(pixel_values, image_grid_thw) ─> micro-batch: those of its samples, laid end to end ─> the model's call

A sample's tokens hold the place of each image already, as many tokens as the engine made of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.batch.batch import Batch
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.weights.model_folder import read_config

Micro = dict[str, Any]
#: What a model is called with beside the tokens, where there are images.
KEYS = (PIXEL_VALUES, IMAGE_GRID)


def auto_class(path: str) -> Any:
    """The class that loads the model in a folder: with its tower for images, where it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "vision_config" in read_config(path) else AutoModelForCausalLM


def add_images(batch: Batch, parts: Sequence[Sequence[Micro]]) -> None:
    """Give micro-batches the images of their samples, where the batch has any. Blocks for their bytes.

    Raises:
        PayloadError: they are gone, or are not what was committed.
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


def inputs_of(model: Any, micro: Micro) -> dict[str, Tensor]:
    """What a Hugging Face model is called with for a micro-batch, by name: [B, L] tokens, mask and positions, images.

    A model that sees images makes positions by itself, of rows and columns. The place of an image that was drawn, which
    ends its sample, is given as another token: nothing stands behind it that would see the difference. Where there are
    no images at all, it is a token like any other, as it was to the engine.
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
