"""On PYTHONPATH of an SGLang server, lets it do on a CPU what it keeps for GPUs, where that is asked for.

Deterministic inference is refused there because nothing makes its sums the same to the bit in batches of other sizes.
With a float32 model that is a difference in the last digits, which moves a draw in one of a million. The hash of seed
and position is a kernel that servers on CPUs lack; here it is MurmurHash3 (x86, 32 bit) of the same words in torch.

Experts are chosen by a kernel that a CPU without AMX lacks: SGLang's own version in torch takes its place. Which they
were is kept in memory that is locked for a GPU: here it is ordinary memory.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _allow_attention(choices: ModuleType) -> None:
    # The function that SGLang's plugins use.
    choices.add_deterministic_attention_backend_choices(["torch_native"])


def _keep_sums(ops: ModuleType) -> None:
    ops.enable_batch_invariant_mode = lambda *_, **__: None  # type: ignore[attr-defined]


def _hash_in_torch(kernels: ModuleType) -> None:
    kernels.murmur_hash32 = _murmur_hash32  # type: ignore[attr-defined]


def _murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    """Hash of seed [n] (64 bits), position [n] and column [m], as integers [n, m] below 2**32."""
    import torch

    wide = torch.int64
    low, high = seed.view(wide) & _WORD, (seed.view(wide) >> 32) & _WORD
    hashed = torch.zeros(len(seed), 1, dtype=wide)
    words = (low[:, None], high[:, None], positions.to(wide)[:, None], columns.to(wide)[None, :])
    for word in words:
        mixed = _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
        hashed = (_times(_rotated(hashed ^ mixed, 13), 5) + 0xE6546B64) & _WORD
    hashed ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = _times(hashed ^ (hashed >> shift), factor)
    return hashed ^ (hashed >> 16)


def _choose_in_torch(topk: ModuleType) -> None:
    topk.TopK.forward_cpu = topk.TopK.forward_native


def _keep_in_memory(capturer: ModuleType) -> None:
    import torch

    def allocate(shape: Any, *, dtype: Any, **_: Any) -> Any:
        return torch.empty(shape, dtype=dtype)

    capturer.ALLOC_MEMORY_FUNCS = {"cpu": allocate}  # type: ignore[attr-defined]


_WORD = 0xFFFFFFFF


def _times(word: Any, factor: int) -> Any:
    # In halves: the product of two words is wider than a signed integer.
    return ((word & 0xFFFF) * factor + (((word >> 16) * factor & 0xFFFF) << 16)) & _WORD


def _rotated(word: Any, bits: int) -> Any:
    return (word << bits | word >> (32 - bits)) & _WORD


#: Module -> what is done to it once it is loaded.
OPENED: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.arg_groups.choices": _allow_attention,
    "sglang.srt.batch_invariant_ops": _keep_sums,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_in_torch,
    "sglang.srt.layers.moe.topk": _choose_in_torch,
    "sglang.srt.state_capturer.base": _keep_in_memory,
}


class Opener(importlib.abc.MetaPathFinder):
    """Loads modules as they are, then opens them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = OPENED.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_open(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_open  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Opener())
