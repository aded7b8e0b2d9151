"""What the engine must have seen: logprobs of a sample recomputed with torch in float32 (T6)."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from penstock.records.sample import Sample

torch.set_num_threads(1)


def load_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def recompute(models: Mapping[int, Any], sample: Sample, versions: list[int], temperature: float) -> list[float]:
    """[L] logprob of each drawn token under the weights that ``versions`` names, prefix computed under them too.

    This is what ``drain`` and ``abort`` promise: no KV of other weights.
    """
    logprobs = [0.0] * len(sample.tokens)
    for version in {version for version in versions if version >= 0}:
        table = _logits(models[version], sample.tokens, None)[0]
        for index, drawn in enumerate(versions):
            if drawn == version:
                logprobs[index] = _logprob(table[index - 1], sample.tokens[index], temperature)
    return logprobs


def continued(
    models: Mapping[int, Any],
    sample: Sample,
    versions: list[int],
    temperature: float,
    found: Sequence[tuple[int, int]] = (),
) -> list[float]:
    """[L] logprob of each drawn token where KV is never computed again within a turn, whatever weights follow.

    This is what ``in_place`` promises. A turn begins a new request, with KV of the weights it begins with, except for
    ``found``: per turn the version whose prefix KV was there to find, and for how many tokens it was found.
    """
    logprobs = [0.0] * len(sample.tokens)
    turns = iter(found)
    index = 0
    for drawn, run in groupby(sample.generated):
        end = index + len(list(run))
        if drawn:
            old, cached = next(turns, (-1, 0))
            past = _logits(models[old], sample.tokens[:cached], None)[1] if cached else None
            _continue_turn(models, sample.tokens, versions, index, end, temperature, logprobs, past, cached)
        index = end
    return logprobs


def _continue_turn(
    models: Mapping[int, Any],
    tokens: list[int],
    versions: list[int],
    start: int,
    end: int,
    temperature: float,
    logprobs: list[float],
    past: Any,
    cached: int,
) -> None:
    first = start
    for version, run in groupby(versions[start:end]):
        last = first + len(list(run))
        # Token t is drawn by the pass that reads token t - 1 and leaves its KV behind.
        table, past = _logits(models[version], tokens[cached : last - 1], past)
        for index in range(first, last):
            logprobs[index] = _logprob(table[index - 1 - cached], tokens[index], temperature)
        cached, first = last - 1, last


def _logits(model: Any, tokens: list[int], past: Any) -> tuple[torch.Tensor, Any]:
    with torch.inference_mode():
        answer = model(input_ids=torch.tensor([tokens]), past_key_values=past, use_cache=True)
    return answer.logits[0], answer.past_key_values


def _logprob(logits: torch.Tensor, token: int, temperature: float) -> float:
    return float(torch.log_softmax(logits / temperature, dim=-1)[token])


def gap(sample: Sample, expected: list[float]) -> float:
    """Largest difference between a sample's logprobs and the recomputed ones, over drawn tokens."""
    return max(
        (abs(a - b) for a, b, drawn in zip(sample.logprobs, expected, sample.generated, strict=True) if drawn),
        default=0.0,
    )


def shifted(versions: list[int], by: int) -> list[int]:
    """The same versions with every boundary between two of them moved by one token."""
    moved = list(versions)
    for index in range(1, len(versions)):
        before, after = versions[index - 1], versions[index]
        if before >= 0 and after >= 0 and before != after:
            if by > 0:
                moved[index] = before
            else:
                moved[index - 1] = after
    return moved
