"""What slime's own functions take of a share: keys, dtypes, lengths, and what may not be None.

Found by running them (``tests/integration/test_slime.py`` with ``SLIME_SOURCE``), and held here where no slime is.
"""

from typing import Any

import torch

#: Lists of tensors: dtype, and which length one has, of a sample's L tokens, R of them behind the prompt.
TENSORS = {
    "tokens": (torch.int64, "L"),
    "loss_masks": (torch.int32, "R"),
    "rollout_log_probs": (torch.float32, "R"),
    "teacher_log_probs": (torch.float32, "R"),
    "rollout_routed_experts": (torch.int32, "L - 1"),
}
#: Must be there.
KEYS = {
    "tokens", "loss_masks", "rollout_log_probs", "response_lengths", "rewards", "truncated", "sample_indices",
    "rollout_ids", "rollout_mask_sums", "partition", "source_names", "raw_reward", "total_lengths",
    "global_batch_sizes", "num_microbatches", "micro_batch_indices",
}  # fmt: skip
#: Of the whole batch, or of the step.
WHOLE = {"raw_reward", "total_lengths", "global_batch_sizes", "num_microbatches", "micro_batch_indices"}
#: Not taken a mean of: anything else is numbers, or tensors of floats.
NO_MEAN = {
    "tokens", "loss_masks", "source_names", "multimodal_train_inputs", "rollout_routed_experts", "metadata", *WHOLE
}  # fmt: skip


def check_share(data: dict[str, Any], num_rows: int, num_rollouts: int | None = None) -> None:
    """Raise AssertionError where one rank's share of a batch of ``num_rows`` samples is not what slime takes."""
    assert data.keys() >= KEYS, KEYS - data.keys()
    count = len(data["tokens"])
    assert count > 0, "a mean over nothing has no first value"
    for key, values in data.items():
        if key not in WHOLE:
            assert len(values) == count, key
        if key not in NO_MEAN and isinstance(values, list):
            numbers = (int, float) if not isinstance(values[0], torch.Tensor) else torch.Tensor
            assert all(isinstance(value, numbers) for value in values), f"{key}: slime takes its mean"
        if key not in ("multimodal_train_inputs", "metadata"):
            assert all(value is not None for value in values), key
    _check_tensors(data, count)
    assert len(data["raw_reward"]) == len(data["total_lengths"]) == num_rows, "they are reshaped into groups"
    assert all(0 <= place < num_rows for place in data["partition"]), "rewards and lengths are looked up by it"
    for place, tokens in zip(data["partition"], data["tokens"], strict=True):
        assert data["total_lengths"][place] == len(tokens)
    assert data["global_batch_sizes"] == [num_rows if num_rollouts is None else num_rollouts]
    assert data["num_microbatches"] == [len(data["micro_batch_indices"])]
    assert all(data["micro_batch_indices"]), "an empty micro-batch has nothing to join"
    assert sorted(i for one in data["micro_batch_indices"] for i in one) == list(range(count))


def _check_tensors(data: dict[str, Any], count: int) -> None:
    sums = data["rollout_mask_sums"]
    assert isinstance(sums, torch.Tensor)
    assert (sums.dtype, tuple(sums.shape)) == (torch.float32, (count,))
    for key, (dtype, length) in TENSORS.items():
        for at, tensor in enumerate(data.get(key, ())):
            total, response = len(data["tokens"][at]), data["response_lengths"][at]
            wanted = {"L": total, "R": response, "L - 1": total - 1}[length]
            assert isinstance(tensor, torch.Tensor), key
            assert (tensor.dtype, len(tensor)) == (dtype, wanted), key
            assert tensor.is_contiguous()
            assert tensor.device.type == "cpu"
            assert 0 < response < total
