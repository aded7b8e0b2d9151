"""Sources of published weights: a complete model, FSDP2 shards, tensor-parallel shards, shards of another layout.

    plain state ─────────────┐
    FSDP2 (DTensor) ─────────┤
    shards of a group ─gather─> convert(name, shards, config) ─> whole tensors, one at a time ─> buckets

Every rank of a sharded source walks through it in step; whole tensors arrive on rank 0 one at a time, so that the
memory for them is bounded by one bucket, whatever the size of the model.
"""

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import ConfigError, PublishError
from penstock.weights.index import fits

#: Turns the parts of one parameter, in order, into tensors by the names that the engine loads. ``config`` is the
#: model's config.json.
Converter: TypeAlias = Callable[[str, Sequence[Tensor], Mapping[str, Any]], Iterable[tuple[str, Tensor]]]

#: The name of a parameter -> where in it this rank's part lies.
Place: TypeAlias = Callable[[str], Sequence[int]]


class Source(Protocol):
    """Weights to publish."""

    #: True where every rank of the trainer has to take part.
    is_sharded: bool

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by the names that the engine loads, in the same order each time; nothing on ranks but 0.

        Blocks for the other ranks of a sharded source, which must walk through it too.
        """
        ...


Weights: TypeAlias = "torch.nn.Module | Mapping[str, Tensor] | Source"


class State:
    """A model, or its state dict: plain tensors, FSDP2's DTensors, or both.

    A model of transformers that holds tensors in another form than its files have them (the experts of a mixture in
    one, since transformers 5) is published as its files are, as ``save_pretrained`` does; a state dict as it is.
    """

    def __init__(self, weights: "torch.nn.Module | Mapping[str, Tensor]") -> None:
        self._state = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
        self.is_sharded = any(isinstance(tensor, DTensor) for tensor in self._state.values())
        self._weights = weights

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        is_told = not self.is_sharded or dist.get_rank() == 0
        as_saved = _as_saved(self._weights, self._state) if is_told else _as_it_is
        embedding = next((tensor for name, tensor in self._state.items() if name.endswith("embed_tokens.weight")), None)
        for name, tensor in self._state.items():
            if name == "lm_head.weight" and embedding is not None and _tied(tensor, embedding, config):
                continue
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if is_told:
                yield from as_saved(name, whole.detach())


class Cast:
    """A source in another floating-point type: that of the engines, where a trainer holds float32 weights.

    Args:
        dtype: of the published tensors; tensors of integers stay as they are.
        kept: pattern of the names whose tensors stay float32; None: none does.
    """

    def __init__(self, source: Source, dtype: torch.dtype, kept: "re.Pattern[str] | None" = None) -> None:
        self._source = source
        self._dtype = dtype
        self._kept = kept
        self.is_sharded = source.is_sharded

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the source, one cast at a time."""
        for name, tensor in self._source.tensors(config):
            stays = not tensor.is_floating_point() or (self._kept is not None and self._kept.search(name) is not None)
            yield name, tensor if stays else tensor.to(self._dtype)


def float32_names(model: torch.nn.Module, dtype: str) -> "re.Pattern[str] | None":
    """Return a pattern of the parameters that transformers keeps in float32 when it loads a model in ``dtype``."""
    attributes = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if dtype in ("float16", "half") else ()))
    parts = sorted({part for name in attributes for part in getattr(model, name, None) or ()})
    return re.compile("|".join(rf"(^|\.){part}($|\.)" for part in parts)) if parts else None


class Shards:
    """Parameters that the ranks of a group hold in parts, in the trainer's own layout and under its own names.

    Args:
        shards: what this rank holds.
        convert: puts the parts together; given the parts of one name in the order of their places. An import path
            ``module:function`` or the function itself.
        group: the ranks that hold parts; None is every rank. Rank 0 of the trainer must be its rank 0.
        place: where in a parameter the part of it lies that this rank holds, for instance its rank of tensor
            parallelism: numbers, compared from left to right. Of ranks that name one place, and so hold the same part,
            the lowest sends it. None: every rank has a part of its own, in the order of ranks.
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
        self._convert = load_converter(convert) if isinstance(convert, str) else convert
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
        # Insertion order of the first rank that has it; a dict keeps one entry of each.
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
            if owner == 0:
                assert mine is not None
                parts.append(mine.detach())
                continue
            dtype, shape, _ = every[owner][name]
            device = next(iter(self._shards.values())).device if self._shards else torch.device("cpu")
            part = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            dist.recv(part, group=self._group, group_src=owner)
            parts.append(part)
        return parts


def _owners(name: str, every: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that send their part of a name, one for each place, in the order of places."""
    at: dict[tuple[int, ...], int] = {}
    for owner, layout in enumerate(every):
        if name in layout:
            at.setdefault(layout[name][2], owner)
    return [at[place] for place in sorted(at)]


def concatenated(dims: Mapping[str, int]) -> Converter:
    """Make a converter for plain tensor parallelism: parts are joined along ``dims[name]``; others are replicated."""

    def convert(name: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
        if name in dims:
            return [(name, torch.cat(list(shards), dim=dims[name]))]
        return [(name, shards[0])]

    return convert


def load_converter(path: str) -> Converter:
    """Import the function at ``module:function``; raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"The converter {path!r} cannot be imported ({exc}): write it as module:function.") from exc
    if not callable(found):
        raise ConfigError(f"The converter {path!r} is not a function.")
    return found  # type: ignore[no-any-return]


def as_source(weights: Weights) -> Source:
    """Make a source of the argument of ``publish``."""
    if isinstance(weights, torch.nn.Module | Mapping):
        return State(weights)
    return weights


def dtype_name(tensor: Tensor) -> str:
    """torch's name of its dtype, without ``torch.``, as indices have it."""
    return str(tensor.dtype).removeprefix("torch.")


def buckets(source: Source, config: Mapping[str, Any], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Whole tensors in buckets of at most ``max_bytes``, the same ones as ``penstock.weights.index.in_buckets`` makes.

    Raises:
        PublishError: a name comes twice.
    """
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    seen: set[str] = set()
    for name, tensor in source.tensors(config):
        if name in seen:
            raise PublishError(f"{name} is published twice: the converter names two tensors alike.")
        seen.add(name)
        num_bytes = math.prod(tensor.shape) * tensor.element_size()
        if bucket and not fits(filled, num_bytes, tensor.element_size(), max_bytes):
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += num_bytes
    if bucket:
        yield bucket


#: One tensor of a model -> what the model's files hold of it, by their names.
AsSaved: TypeAlias = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]


def _as_saved(weights: object, state: Mapping[str, Tensor]) -> AsSaved:
    # Who has made a model of transformers has imported it.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(weights, transformers.PreTrainedModel):
        return _as_it_is
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _as_it_is  # transformers 4 holds them as they are saved
    layout = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    if revert_weight_conversion(weights, layout).keys() == state.keys():
        return _as_it_is
    # One by one, because pieces are copies.
    return lambda name, tensor: revert_weight_conversion(weights, {name: tensor}).items()


def _as_it_is(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    return ((name, tensor),)


def _tied(head: Tensor, embedding: Tensor, config: Mapping[str, Any]) -> bool:
    if config.get("tie_word_embeddings"):
        return True
    if isinstance(head, DTensor) or isinstance(embedding, DTensor):
        return head is embedding
    return head.data_ptr() == embedding.data_ptr() != 0
