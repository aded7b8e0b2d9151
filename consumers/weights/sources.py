"""Sources of published weights: a complete model, FSDP2 shards, tensor-parallel shards, shards of another layout.

    plain state ─────────────┐
    FSDP2 (DTensor) ─────────┤
    shards of a group ─gather─> convert(name, shards, config) ─> full tensors, one at a time ─> buckets

Every rank of a sharded source walks through it in step; full tensors arrive on rank 0 one at a time, so that their
memory is bounded by one bucket for any size of the model.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import PublishError
from penstock.system.user_code import find_function
from penstock.weights.index import bucketed

#: Converts the parts of one parameter, in order, to tensors by the names that the engine loads. ``config`` is the
#: model's config.json.
Converter: TypeAlias = Callable[[str, Sequence[Tensor], Mapping[str, Any]], Iterable[tuple[str, Tensor]]]

#: Name of a parameter -> position of this rank's part in it.
Place: TypeAlias = Callable[[str], Sequence[int]]


class Source(Protocol):
    """Provide weights to publish."""

    #: Whether every rank of the trainer has to take part.
    is_sharded: bool

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by the names that the engine loads, always in the same order; nothing on ranks but 0.

        Blocks for the other ranks of a sharded source, which must walk through it too.
        """
        ...


#: Tensors by the names that the engine loads; at most ``trainer.bucket_bytes``, or one tensor.
Bucket: TypeAlias = list[tuple[str, Tensor]]
Weights: TypeAlias = "torch.nn.Module | Mapping[str, Tensor] | Source"


class State:
    """Publish a model, or its state dict: plain tensors, FSDP2's DTensors, or both.

    A transformers model whose tensors differ from its files' (fused experts, since transformers 5) is published in the
    files' form, as ``save_pretrained`` does; a state dict is published unchanged.
    """

    def __init__(self, weights: "torch.nn.Module | Mapping[str, Tensor]") -> None:
        # Variables, as tied ones are one object.
        self._state = weights.state_dict(keep_vars=True) if isinstance(weights, torch.nn.Module) else weights
        self.is_sharded = any(isinstance(tensor, DTensor) for tensor in self._state.values())
        self._weights = weights

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        is_receiver = not self.is_sharded or dist.get_rank() == 0
        as_saved = _as_saved(self._weights, self._state) if is_receiver else _as_it_is
        embedding = next((tensor for name, tensor in self._state.items() if name.endswith("embed_tokens.weight")), None)
        for name, tensor in self._state.items():
            if name == "lm_head.weight" and embedding is not None and _tied(tensor, embedding, config):
                continue
            tensor = tensor.detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if is_receiver:
                yield from as_saved(name, whole)


class Cast:
    """Cast a source to the floating-point type of the engines, if the trainer has float32 weights.

    Args:
        dtype: of the published tensors; integer tensors are unchanged.
        kept: pattern of the names of tensors that stay float32; None: cast all.
    """

    def __init__(self, source: Source, dtype: torch.dtype, kept: "re.Pattern[str] | None" = None) -> None:
        self._source = source
        self._dtype = dtype
        self._kept = kept
        self.is_sharded = source.is_sharded

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source.tensors(config):
            stays = not tensor.is_floating_point() or (self._kept is not None and self._kept.search(name) is not None)
            yield name, tensor if stays else tensor.to(self._dtype)


def float32_names(model: torch.nn.Module, dtype: str) -> "re.Pattern[str] | None":
    """Return a pattern of the parameters that transformers keeps in float32 when it loads a model in ``dtype``."""
    attributes = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if dtype in ("float16", "half") else ()))
    parts = sorted({part for name in attributes for part in getattr(model, name, None) or ()})
    return re.compile("|".join(rf"(^|\.){part}($|\.)" for part in parts)) if parts else None


class Shards:
    """Publish parameters that the ranks of a group hold in parts, in the trainer's own layout and names.

    Args:
        shards: this rank's parts.
        convert: joins the parts of one name, given in the order of their places. An import path ``module:function`` or
            the function itself.
        group: the ranks that hold parts; None: every rank. Rank 0 of the trainer must be its rank 0.
        place: position of this rank's part in a parameter, for instance its rank of tensor parallelism: numbers,
            compared from left to right. If several ranks have the same place, and thus the same part, the lowest sends
            it. None: every rank has its own part, in the order of ranks.
    """

    is_sharded = True

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        convert: "Converter | str",
        *,
        group: dist.ProcessGroup | None = None,
        place: Place | None = None,
    ) -> None:
        self._shards = shards
        self._convert = find_function(convert, "The converter") if isinstance(convert, str) else convert
        self._group = group
        self._place = place

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        rank = dist.get_rank(self._group)
        place = self._place or (lambda name: (rank,))
        held = {
            name: (dtype_name(tensor), tuple(tensor.shape), tuple(place(name))) for name, tensor in self._shards.items()
        }
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, held, group=self._group)
        # All names once, in the order of the first rank that has them.
        for name in dict.fromkeys(name for layout in every for name in layout):
            parts = self._gather(name, every, rank)
            if rank == 0:
                yield from self._convert(name, parts, config)

    def _gather(self, name: str, every: Sequence[Mapping[str, Any]], rank: int) -> list[Tensor]:
        """Gather the parts of one name on rank 0; other ranks send theirs."""
        mine = self._shards.get(name)
        owners = _owners(name, every)
        if rank != 0:
            if mine is not None and rank in owners:
                dist.send(mine.detach().contiguous(), group=self._group, group_dst=0)
            return []
        parts = []
        for owner in owners:
            dtype, shape, _ = every[owner][name]
            device = next(iter(self._shards.values())).device if self._shards else torch.device("cpu")
            part = torch.empty(shape, dtype=getattr(torch, dtype), device=device) if owner else self._shards[name]
            if owner:
                dist.recv(part, group=self._group, group_src=owner)
            parts.append(part.detach())
        return parts


def _owners(name: str, every: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that send their part of a name, one for each place, in the order of places."""
    at: dict[tuple[int, ...], int] = {}
    for owner, layout in enumerate(every):
        if name in layout:
            at.setdefault(layout[name][2], owner)
    return [at[place] for place in sorted(at)]


def concatenated(dims: Mapping[str, int]) -> Converter:
    """Return a converter for plain tensor parallelism: join parts along ``dims[name]``; others are replicated."""

    def convert(name: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
        if name in dims:
            return [(name, torch.cat(list(shards), dim=dims[name]))]
        return [(name, shards[0])]

    return convert


def as_source(weights: Weights) -> Source:
    """Return a source for the argument of ``publish``."""
    return State(weights) if isinstance(weights, torch.nn.Module | Mapping) else weights


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of the tensor's dtype, without ``torch.``, as used in indexes."""
    return str(tensor.dtype).removeprefix("torch.")


def buckets(source: Source, config: Mapping[str, Any], max_bytes: int) -> Iterator[Bucket]:
    """Yield full tensors in the buckets of ``penstock.weights.index``; raise PublishError on a duplicate name."""

    def once() -> Iterator[tuple[str, Tensor]]:
        seen: set[str] = set()
        for name, tensor in source.tensors(config):
            if name in seen:
                raise PublishError(f"{name} is published twice: the converter names two tensors alike.")
            seen.add(name)
            yield name, tensor

    return bucketed(once(), max_bytes, lambda one: (one[1].nbytes, one[1].element_size()))


#: Converts a tensor of a model to the tensors of the model's files.
AsSaved: TypeAlias = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]


def _as_saved(weights: object, state: Mapping[str, Tensor]) -> AsSaved:
    # A transformers model exists only if transformers is imported.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(weights, transformers.PreTrainedModel):
        return _as_it_is
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _as_it_is  # transformers 4 has no conversion
    layout = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    if revert_weight_conversion(weights, layout).keys() == state.keys():
        return _as_it_is
    # One by one, because the converted tensors are copies.
    return lambda name, tensor: revert_weight_conversion(weights, {name: tensor}).items()


def _as_it_is(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    return ((name, tensor),)


def _tied(head: Tensor, embedding: Tensor, config: Mapping[str, Any]) -> bool:
    if config.get("tie_word_embeddings"):
        return True
    if isinstance(head, DTensor) or isinstance(embedding, DTensor):
        return head is embedding
    return head.data_ptr() == embedding.data_ptr() != 0
