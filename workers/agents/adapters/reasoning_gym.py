"""Use datasets of reasoning-gym: rows for producers, and scoring as a reward.

data:
  train:
    - name: sums
      path: python:penstock.workers.agents.adapters.reasoning_gym:ReasoningGym
      source_args: {name: chain_sum, size: 10000, seed: 1}
      metadata_key: metadata
      reward: penstock.workers.agents.adapters.reasoning_gym:score
"""

import json
from functools import lru_cache
from typing import Any

from penstock.records.sample import Sample
from penstock.system.extras import check_installed

#: Metadata key with a row's origin: arguments of the dataset as JSON, and the row number.
ORIGIN = "reasoning_gym"


class ReasoningGym:
    """Provide the rows of one dataset, with columns ``prompt``, ``label`` and ``metadata``.

    Args:
        name: name of the dataset, such as ``chain_sum``.
        size: number of rows.
        seed: seed of the rows.
        config: settings of the dataset.
    """

    def __init__(self, name: str, size: int, seed: int, **config: Any) -> None:
        self._arguments = json.dumps({"name": name, "size": size, "seed": seed, **config}, sort_keys=True)
        self._dataset = _dataset(self._arguments)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row, which depends only on the arguments and its number."""
        entry = self._dataset[index]
        metadata = {ORIGIN: [self._arguments, index]}
        return {"prompt": entry["question"], "label": str(entry["answer"]), "metadata": metadata}


def score(sample: Sample) -> float:
    """Score the last ``<answer>`` element of an answer, or its complete text, with the dataset's scoring."""
    from reasoning_gym.utils import extract_answer

    arguments, index = sample.job.metadata[ORIGIN]
    dataset = _dataset(arguments)
    text = sample.turns[-1] if sample.turns else sample.text
    answer = extract_answer(text)
    return float(dataset.score_answer(text.strip() if answer is None else answer, dataset[index]))


@lru_cache(maxsize=64)
def _dataset(arguments: str) -> Any:
    check_installed("reasoning_gym", "A dataset of reasoning-gym")
    import reasoning_gym

    return reasoning_gym.create_dataset(**json.loads(arguments))
