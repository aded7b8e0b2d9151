"""Answers of an engine as JSON, in SGLang's form: what each leg of ``trajectory_path`` starts from.

Imported by TransferQueue's side too, whose environment lacks penstock.
"""

import json
import random
from typing import Any

import numpy as np
import orjson

#: Tokens of the prompt of each sample.
PROMPT_TOKENS = 64
_TAG = 99_999
#: First id of tags; all tags have the same number of digits.
_FIRST_TAG = 10_000


class Answers:
    """Answers that differ in their first token, which tags the sample; ``tokens``: of prompt and answer together."""

    def __init__(self, tokens: int) -> None:
        rng = random.Random(0)
        self.prompt = [1] * PROMPT_TOKENS
        self.length = tokens - PROMPT_TOKENS
        ids = [_TAG, *(rng.randrange(_FIRST_TAG) for _ in range(self.length - 1))]
        meta = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "length", "length": self.length},
            "prompt_tokens": PROMPT_TOKENS,
            "weight_version": "1",
            "weight_versions": [{"version": "1", "start": 0, "end": self.length}],
            "total_retractions": 0,
            "completion_tokens": self.length,
            "cached_tokens": 0,
            "e2e_latency": 0.123456789,
            "output_token_logprobs": [[-3 * rng.random(), token, None] for token in ids],
        }
        answer = json.dumps({"text": "", "output_ids": ids, "meta_info": meta}, separators=(",", ":"))
        self._pieces = answer.encode().split(str(_TAG).encode())

    def body(self, tag: int) -> bytes:
        """Return the answer to sample ``tag``."""
        return str(_FIRST_TAG + tag).encode().join(self._pieces)

    def parse(self, body: bytes) -> dict[str, np.ndarray[Any, Any]]:
        """Parse an answer as the author of a plain loop would; [L] ids, logprobs and mask, [1, 3] versions.

        An answer without one finite logprob for each id is refused.
        """
        answer = orjson.loads(body)
        meta = answer["meta_info"]
        ids = np.array(self.prompt + answer["output_ids"], np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[PROMPT_TOKENS:] = [entry[0] for entry in meta["output_token_logprobs"]]
        if not np.isfinite(logprobs).all():
            raise ValueError("A logprob is not a finite number.")
        mask = np.zeros(len(ids), np.uint8)
        mask[PROMPT_TOKENS:] = 1
        spans = [(int(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
        return {"ids": ids, "logprobs": logprobs, "mask": mask, "versions": np.array(spans, np.int32)}


def tag_of(ids: Any) -> Any:
    """Return the tag of a sample, or of each: ``ids`` are [..., L]."""
    return ids[..., PROMPT_TOKENS] - _FIRST_TAG
