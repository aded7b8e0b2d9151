"""Errors for out of memory with the key to lower: of a trainer by its exception, of an engine by its log."""

import re

from penstock.errors import PenstockError

#: Messages of allocators: CUDA's and the CPU's of torch, Python's, C++'s.
_SAID = re.compile(
    r"[^\n]*(?:CUDA out of memory|OutOfMemoryError|HIP out of memory|can't allocate memory|out of memory\. Try to lower"
    r"|CUDA error: out of memory|cudaErrorMemoryAllocation|std::bad_alloc|MemoryError)[^\n]*"
)
#: SGLang's message if weights leave no room for keys and values.
_NO_ROOM_FOR_CACHE = "Not enough memory. Please try to increase --mem-fraction-static"
_LINE_CHARS = 300


def engine_advice(log: str) -> str:
    """Return the advice for an engine whose log ends with out of memory; '' if it ended for another reason."""
    if _NO_ROOM_FOR_CACHE in log:
        return (
            "ran out of memory: its weights leave no room for keys and values under engine.args.mem-fraction-static; "
            "raise that, raise engine.args.tp-size, or take a smaller model"
        )
    found = _SAID.findall(log)
    if not found:
        return ""
    return (
        f"ran out of memory ({_line(found[-1])}): lower engine.args.mem-fraction-static, "
        "engine.args.chunked-prefill-size or engine.args.max-running-requests, raise engine.args.tp-size, or give it a "
        "device that no trainer uses"
    )


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether Python, or an allocator of torch, raised an exception for lack of memory."""
    named = f"{type(exc).__name__}: {exc}"
    return isinstance(exc, MemoryError) or (isinstance(exc, RuntimeError) and _SAID.search(named) is not None)


def trainer_error(exc: BaseException, *, device: str, max_tokens: int | None) -> PenstockError | None:
    """Return the error for an exception of a training process that ran out of memory; None for any other exception."""
    if not is_out_of_memory(exc):
        return None
    now = f"is {max_tokens}" if max_tokens else "is not set, so a rank's whole share is one micro-batch"
    reason = _line(str(exc)) or type(exc).__name__
    return PenstockError(
        f"The trainer ran out of memory on {device} ({reason}): lower trainer.max_tokens, the tokens of a "
        f"micro-batch, which {now}; or raise trainer.dp_size, lower rollout.max_context_tokens, or give the trainer a "
        "device that no engine uses."
    )


def _line(text: str) -> str:
    """Return the first line, shortened."""
    lines = text.strip().splitlines()
    return lines[0].strip().rstrip(".")[:_LINE_CHARS] if lines else ""
