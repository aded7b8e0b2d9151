"""slime's own functions on shares of a rollout, a process per rank: ``python -m ... SOURCE SHARES.pt OUT.json``.

process_rollout_data ─> tensors and their device ─> routing replay ─> log_rollout_data, gathered over real gloo
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.adapters import slime_source

#: Experts per layer: as many as a uint8 has values, which it cannot be divided by.
NUM_EXPERTS = 256


def rank_main(rank: int, source: str, shares_file: str, out: str) -> None:
    torch.set_num_threads(1)
    shares = torch.load(shares_file, weights_only=True)
    dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=rank, world_size=len(shares))
    slime = slime_source.load(source, rank, len(shares))
    groups, n = shares[0].pop("groups"), shares[0].pop("n")
    for share in shares[1:]:
        share.pop("groups"), share.pop("n")
    args = slime_source.arguments(rollout_batch_size=groups, n_samples_per_prompt=n)
    boxes = [SimpleNamespace(inner=share) for share in shares]

    # What slime's own side does before it hands a share out changes nothing of ours.
    again = copy.deepcopy(shares[rank])
    slime.tensorize.tensorize_rollout_data_for_training(again)
    assert again.keys() == shares[rank].keys()
    different = [key for key in again if not slime_source.equal(again[key], shares[rank][key])]
    assert not different, different

    actor = SimpleNamespace(args=args)
    data = slime.actor._get_rollout_data(actor, boxes)
    assert data["local_raw_reward"] == [data["raw_reward"][place] for place in data["partition"]]
    assert data["total_lengths"] == [len(tokens) for tokens in data["tokens"]]
    check_micro_batches(slime, args, data)
    if "multimodal_train_inputs" in data:
        check_images(slime, data)

    # As its own forward pass would have left them.
    data["log_probs"] = [logprobs.clone() for logprobs in data["rollout_log_probs"]]
    found: dict[str, Any] = {}
    gather = slime.log.gather_log_data

    def gathered(name: str, *given: Any) -> Any:
        found[name] = gather(name, *given)
        return found[name]

    slime.log.gather_log_data = gathered
    slime.log.log_rollout_data(3, args, data)
    if rank == 0:
        Path(out).write_text(json.dumps({name: plain(metrics) for name, metrics in found.items()}))
    dist.destroy_process_group()


def check_micro_batches(slime: SimpleNamespace, args: Any, data: dict[str, Any]) -> None:
    """Every micro-batch as a step takes it: keys, lengths, the routing that is replayed."""
    [iterator] = slime.data.get_data_iterator(data)
    if "rollout_routed_experts" in data:
        slime.tensorize.validate_rollout_routed_experts_for_replay(data["rollout_routed_experts"], args)
    keys = ["tokens", "loss_masks", "response_lengths", "total_lengths", "rollout_mask_sums", "rollout_log_probs"]
    for _ in range(sum(data["num_microbatches"])):
        micro = iterator.get_next([*keys, "rollout_routed_experts"])
        assert all(len(micro[key]) == len(micro["tokens"]) > 0 for key in keys)
        reduce = slime.cp.get_sum_of_sample_mean(
            micro["total_lengths"], micro["response_lengths"], micro["loss_masks"], micro["rollout_mask_sums"]
        )
        assert torch.isfinite(torch.as_tensor(reduce(torch.cat(micro["rollout_log_probs"]))))
        if micro["rollout_routed_experts"] is not None:
            routed = slime.cp.prepare_routed_experts_for_routing_replay(
                micro["rollout_routed_experts"], micro["tokens"], num_experts=NUM_EXPERTS, data_pad_size_multiplier=8,
                sequence_parallel=False, allgather_cp=False,
            )  # fmt: skip
            assert int(routed.min()) >= 0
            assert int(routed.max()) < NUM_EXPERTS


def check_images(slime: SimpleNamespace, data: dict[str, Any]) -> None:
    """What slime's model is called with for the images of a micro-batch, beside the tokens that it is called with.

    Patches hold the first token of the prompt that they are of.
    """
    slime.data.PackedSeqParams = SimpleNamespace  # of Megatron
    [iterator] = slime.data.get_data_iterator(data)
    keys = ["tokens", "loss_masks", "response_lengths", "total_lengths", "multimodal_train_inputs"]
    for members in data["micro_batch_indices"]:
        micro = slime.data.get_batch(iterator, keys)
        firsts = [float(tokens[0]) for tokens in micro["unconcat_tokens"]]
        seen = [len((data["multimodal_train_inputs"][i] or {}).get("pixel_values", ())) for i in members]
        wanted = [first for first, count in zip(firsts, seen, strict=True) for _ in range(count)]
        micro = micro["multimodal_train_inputs"]
        assert micro.keys() == ({"pixel_values", "image_grid_thw"} if wanted else set())
        if wanted:
            assert micro["pixel_values"][:, 0].tolist() == wanted
            assert int(micro["image_grid_thw"].prod(dim=1).sum()) == len(wanted)


def plain(metrics: Any) -> Any:
    return None if metrics is None else {key: float(value) for key, value in metrics.items()}


def main() -> None:
    source, shares, out = sys.argv[1:]
    size = len(torch.load(shares, weights_only=True))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, source, shares, out)) for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in ranks))


if __name__ == "__main__":
    main()
