"""Rows for tests of the history."""

from typing import Any

import numpy as np

from penstock.history.row import SampleRow

PROMPT = "Add two and three."


def row(job: str = "math/0/7", k: int = 0, **fields: Any) -> SampleRow:
    """A sample of four prompt tokens and three drawn ones, the last of which bears no loss."""
    known: dict[str, Any] = {
        "lane": "train",
        "prompt": PROMPT,
        "answer": f"It is five, says {k}.",
        "label": "5",
        "tokens": np.array([5, 70_000, 9, 2, 151_000, 11, 3], np.int32),
        "logprobs": np.array([0, 0, 0, 0, -0.1, -1.7182818, np.float32(-1e-7)], np.float32),
        "versions": np.array([-1, -1, -1, -1, 3, 3, 4], np.int32),
        "generated": np.array([0, 0, 0, 0, 1, 1, 1], np.uint8),
        "loss_mask": np.array([0, 0, 0, 0, 1, 1, 0], np.uint8),
        "prompt_length": 4,
        "num_generated": 3,
        "reward": 0.5,
        "reward_info": {"format": 1, "why": "near"},
        "status": "completed",
        "finish_reason": "stop",
        "oldest": 3,
        "newest": 4,
        "worker": "w-1",
        "attempts": 1,
        "crashes": 0,
        "tries": "train:w-1:1500:2500:crashed;resume:w-2:3000",
        "num_turns": 2,
        "num_aborts": 1,
        "cached_tokens": 4,
        "admitted_s": 1_790_000_000.25,
        "leased_s": 1_790_000_001.5,
        "trained_s": 1_790_000_100.123456,
        "pauses": [[1_790_000_002.5, 1_790_000_002.75]],
        "generate_s": 0.75,
        "reward_s": 0.125,
        "fate": "trained",
    }
    return SampleRow(job, k, **(known | fields))
