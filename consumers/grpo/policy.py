"""Log-probabilities of a policy: rows laid end to end without padding, and never [tokens, vocabulary] at once.

    [B, L] rows ─> [1, T] tokens ─> decoder, its attention within each row ─> [T, H] ─> head, CHUNK tokens at a time,
    each but a single chunk computed again in the backward pass ─> [B, L]

Models outside of ``PACKED`` (with images, sliding windows or scaled logits, say) get padded rows and all logits; so do
those with gradient checkpointing, whose layers run again in the backward pass, when their own attention is back.
"""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from penstock.consumers.grpo import losses, process
from penstock.consumers.grpo.pictures import IMAGES_ELSEWHERE, inputs_of

#: Types of models whose attention goes through transformers' interface and whose head is one matrix.
PACKED = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
#: Name of ``attend`` in transformers' registry.
ATTENTION = "penstock_packed"
#: Tokens whose logits exist at once.
CHUNK = 4096


class Policy(torch.nn.Module):
    """Computes log-probabilities of a causal language model.

    Args:
        model: a Hugging Face causal language model, or a module that is called like one.
        dtype: type of the forward and backward pass.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        self.is_packed = _is_packable(model)
        if self.is_packed:
            from transformers import AttentionInterface

            AttentionInterface.register(ATTENTION, attend)

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers of its decoder; [] if the model does not name them."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else None  # type: ignore[operator]
        return list(getattr(decoder, "layers", ()))

    def forward(self, micro: dict[str, Any]) -> Tensor:
        """Return [B, L] log π_θ of the tokens at their sampling temperature; 0 at position 0, undefined on padding.

        Args:
            micro: ``tokens`` [B, L], ``lengths`` [B], ``temperatures`` [B] or [B, L]; with images their arrays too.
        """
        with process.autocast(self.dtype, micro["tokens"].device):
            if self.is_packed and not any(
                getattr(one, "gradient_checkpointing", False) for one in self.model.modules()
            ):
                return self._packed(micro)
            logits = self.model(**inputs_of(self.model, micro), use_cache=False).logits
        found = losses.token_logprobs(logits, micro["tokens"], micro["temperatures"])
        if not micro.get(IMAGES_ELSEWHERE):
            return found
        # Without images the vision tower has no gradient here, and FSDP2 reduces only existing gradients: ranks would
        # not reduce the same parameters.
        return found + 0.0 * sum(parameter.float().sum() for parameter in self._outside_decoder())

    def _outside_decoder(self) -> list[Tensor]:
        """Return parameters outside the decoder and the head, such as those of a vision tower."""
        if not hasattr(self.model, "get_decoder"):
            return []
        parts = self.model.get_decoder(), self.model.get_output_embeddings()  # type: ignore[operator]
        used = {parameter for part in parts if part is not None for parameter in part.parameters()}
        return [one for one in self.model.parameters() if one.requires_grad and one not in used]

    def _packed(self, micro: dict[str, Any]) -> Tensor:
        tokens, lengths, temperatures = micro["tokens"], micro["lengths"], micro["temperatures"]
        if temperatures.dim() == 1:
            temperatures = temperatures[:, None].expand(tokens.shape)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        places = (positions < lengths[:, None]).flatten().nonzero()[:, 0]  # the only wait for a GPU
        hidden = self._hidden(tokens.flatten()[places], positions.flatten()[places], lengths, tokens.shape[1])
        has_next = (positions < lengths[:, None] - 1).flatten()[places]
        after = torch.where(has_next, places + 1, places)
        found = self._of_head(hidden, tokens.flatten()[after], temperatures.flatten()[after])
        # One place more, for the last token of the last row.
        out = found.new_zeros(tokens.numel() + 1).index_put((places + 1,), torch.where(has_next, found, 0.0))
        return out[:-1].view(tokens.shape).clone()  # FSDP2 warns of views

    def _hidden(self, tokens: Tensor, positions: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return [T, H] last hidden states of the tokens [T] of rows that lie end to end."""
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        with _packed_attention(self.model):
            return self.model.get_decoder()(  # type: ignore[operator, no-any-return]
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                cu_seq_lens_q=ends,
                max_length_q=longest,
            ).last_hidden_state[0]

    def _of_head(self, hidden: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        """Return [T] float32 log-probabilities of tokens after the hidden states [T, H]."""
        if len(hidden) <= CHUNK:
            return self._of_chunk(hidden, tokens, temperatures)
        chunks = zip(*(one.split(CHUNK) for one in (hidden, tokens, temperatures)), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([checkpoint(self._of_chunk, *chunk, use_reentrant=False) for chunk in chunks])

    def _of_chunk(self, hidden: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        return losses.chosen_logprobs(self.model.get_output_embeddings()(hidden), tokens, temperatures)  # type: ignore[operator]


def _is_packable(model: Any) -> bool:
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in PACKED:
        return False
    return set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"} and (
        getattr(config, "sliding_window", None) is None
    )


@contextmanager
def _packed_attention(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before


@cache
def _varlen() -> Any:
    """Return torch's attention of packed rows; None before 2.11, which has none, or one without scale and window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters) else None


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each row of packed rows, as transformers' attention interface has it.

    Args:
        query, key, value: [1, heads, T, head]; those of keys may be fewer.
        cu_seq_lens_q: [B + 1] int32, begin of each row, and the end.
        max_length_q: at least the longest row.

    Returns:
        [1, T, heads, head]
    """
    # Under autocast rotary embeddings make queries and keys float32; values keep the type that is computed in.
    query, key = query.to(value.dtype), key.to(value.dtype)
    varlen_attn = _varlen() if value.device.type == "cuda" and value.dtype is not torch.float32 else None
    if varlen_attn is not None:
        repeat = query.shape[1] // key.shape[1]
        queries, keys, values = (one[0].transpose(0, 1) for one in (query, key, value))
        keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
        ends, longest, window = cu_seq_lens_q, max_length_q, (-1, 0)
        packed: Any = varlen_attn(
            queries.contiguous(), keys, values, ends, ends, longest, longest, scale=scaling, window_size=window
        )
        return packed[None], None
    rows = []
    for begin, end in itertools.pairwise(cu_seq_lens_q.tolist()):
        queries, keys, values = (one[:, :, begin:end] for one in (query, key, value))
        rows.append(scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(rows, dim=2).transpose(1, 2), None
