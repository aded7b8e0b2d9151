"""Convert images of a batch to verl 0.9's format: a model's image inputs, and token positions.

``multi_modal_inputs``: a dict for each row: ``pixel_values``, ``image_grid_thw``, ``images_seqlens``; {} without images
``position_ids``: [B, 4, P + R] int64: index in the text, then time, row and column, by the model's ``get_rope_index``

verl binds that function to the processor that its ``hf_processor`` returns.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.batch.batch import Batch
from penstock.errors import ConfigError, ProtocolError
from penstock.names import IMAGE_GRID, PIXEL_VALUES

if TYPE_CHECKING:
    from verl import DataProto

_READS = "prompts of verl's own are text alone: have penstock's producer read them, and take verl.from_batch."
#: Image inputs of the model for one row; empty without images.
Inputs = Mapping[str, Tensor]


def check_text_alone(columns: Mapping[str, Any]) -> None:
    """Raise ConfigError if verl's own prompts have other data than text, as only tokens would reach the engine."""
    for place, data in enumerate(columns.get("multi_modal_data", ())):
        if data and any(value is not None and len(value) for value in data.values()):
            raise ConfigError(f"Prompt {place} holds {', '.join(sorted(data))}, and {_READS}")
    for place, messages in enumerate(columns.get("raw_prompt", ())):
        for content in () if isinstance(messages, str) else (message.get("content") for message in messages):
            kinds = (
                {part.get("type") for part in content if isinstance(part, Mapping)} if isinstance(content, list) else ()
            )
            if others := sorted(map(str, {*kinds} - {"text"})):
                raise ConfigError(f"Prompt {place} has parts of type {', '.join(others)}, and {_READS}")


def images_of(batch: Batch, processor: Any) -> dict[str, Inputs]:
    """Return the image inputs of this rank's samples with images. Blocks for their bytes.

    Raises:
        ConfigError: the batch has images, but the processor cannot compute the positions of their tokens.
        PayloadError: images are gone, or differ from the committed ones.
    """
    if not batch.has_side(PIXEL_VALUES):
        return {}
    if not hasattr(processor, "get_rope_index"):
        raise ConfigError(
            f"batch {batch.n} has prompts with images, whose tokens have positions in rows and columns: give "
            "from_batch(processor=...) what verl.utils.hf_processor returns for the model."
        )
    found: dict[str, Inputs] = {}
    columns = batch.side(PIXEL_VALUES), batch.side(IMAGE_GRID)
    for row, pixels, grid in zip(batch.rows, *columns, strict=True):
        if pixels is not None and grid is not None:
            grids = torch.tensor(grid)
            seqlens = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
            found[row.sample] = {PIXEL_VALUES: torch.tensor(pixels), IMAGE_GRID: grids, "images_seqlens": seqlens}
    return found


def add_images(
    output: "DataProto", rows: Sequence[RowArrays], images: Mapping[str, Inputs], processor: Any, pad_id: int
) -> None:
    """Add images and four-dimensional positions to a ``DataProto`` of ``rows``.

    A generated image placeholder, which has no image, is treated as padding and bears no loss.

    Raises:
        ConfigError: the number of placeholders does not match the images, as with the processor of another model.
        ProtocolError: a prompt without images has an image placeholder.
    """
    tensors, width = output.batch, output.batch["prompts"].shape[1]
    _mask_generated_placeholder(output, processor.image_token_id, pad_id)
    inputs = [images.get(row.row.sample, {}) for row in rows]
    seen = tensors["attention_mask"]
    kinds = torch.zeros_like(tensors["input_ids"])
    kinds[:, :width] = (tensors["prompts"] == processor.image_token_id) & seen[:, :width].bool()
    for row, kind, given in zip(rows, kinds, inputs, strict=True):
        _check_places(row, int(kind.sum()), given, processor)
    # verl counts text positions from 0 and uses 1 for padding.
    text = torch.where(seen.bool(), seen.cumsum(dim=1) - 1, 1)
    spatial = torch.cat([_spatial(processor, output, kinds, i, given) for i, given in enumerate(inputs)], dim=1)
    tensors["position_ids"] = torch.cat([text[:, None], spatial.transpose(0, 1)], dim=1)
    for column, given in zip(output.non_tensor_batch["multi_modal_inputs"], inputs, strict=True):
        column.update(given)


def _mask_generated_placeholder(output: "DataProto", place: int, pad_id: int) -> None:
    """Remove the loss from a generated image placeholder and all later tokens, which attended to it."""
    tensors, width = output.batch, output.batch["prompts"].shape[1]
    drawn = tensors["responses"] == place
    tensors["response_mask"] *= drawn.cumsum(dim=1) == 0
    tensors["responses"] = tensors["responses"].masked_fill(drawn, pad_id)
    tensors["input_ids"][:, width:] = tensors["responses"]


def _check_places(row: RowArrays, num_places: int, given: Inputs, processor: Any) -> None:
    if num_places and not given:
        raise ProtocolError(
            f"sample {row.row.sample} has no images, and its prompt holds the token of an image's place: take it out "
            "of the text."
        )
    needed = int(given[IMAGE_GRID].prod(dim=-1).sum()) // processor.image_processor.merge_size**2 if given else 0
    if needed != num_places:
        raise ConfigError(
            f"sample {row.row.sample} has {num_places} tokens in the places of its images, and the processor makes "
            f"{needed} of them: give from_batch the one of the model that drew them."
        )


def _spatial(processor: Any, output: "DataProto", kinds: Tensor, i: int, given: Inputs) -> Tensor:
    """Return the positions of one row, [3, 1, P + R]."""
    one = slice(i, i + 1)
    found, _ = processor.get_rope_index(
        input_ids=output.batch["input_ids"][one],
        mm_token_type_ids=kinds[one],
        image_grid_thw=given.get(IMAGE_GRID),
        attention_mask=output.batch["attention_mask"][one],
    )
    return torch.as_tensor(found)
