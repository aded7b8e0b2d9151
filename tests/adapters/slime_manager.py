"""slime's own RolloutManager with penstock's rollout function: ``python -m ... SOURCE FOLDER FLAGS...``.

slime's parser ─> its RolloutManager ─load_function─> penstock ─> convert, split over ranks ─> FOLDER/shares.pt

Stand-ins, beside those of ``slime_source``: ``ray.put``, the actor that is a lock of engines, and for Megatron's
parser one that has slime's options alone.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.adapters import slime_source

#: Of Megatron's own options, what slime's validation looks at, at Megatron's defaults.
MEGATRON: dict[str, Any] = {
    "global_batch_size": None, "micro_batch_size": 1, "seed": 1234, "save": None, "load": None, "save_interval": None,
    "num_layers": 2, "finetune": False, "no_load_optim": False, "no_load_rng": False, "ckpt_step": None,
    "use_dist_ckpt": False, "dist_ckpt_format": "torch_dist", "num_experts": None, "moe_router_topk": 2,
    "mtp_num_layers": None, "lr": 1e-6, "variable_seq_lengths": True, "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
}  # fmt: skip


def parse(module: Any, flags: list[str]) -> argparse.Namespace:
    """slime's own options, parsed and validated by slime."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    module.get_slime_extra_args_provider()(parser)
    args = parser.parse_args(flags)
    for name, value in {**MEGATRON, "train_backend": "megatron", "debug_train_only": False}.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    args.debug_rollout_only, args.load_debug_rollout_data = False, None
    module.slime_validate_args(args)
    return args


def main() -> None:
    source, folder, *flags = sys.argv[1:]
    out = Path(folder)
    # Penstock's own imports first: what slime has beside it is there by name only from here on.
    importlib.import_module("penstock.consumers.adapters.slime_rollout")
    slime_source.stand_in(source)
    importlib.import_module("ray").put = lambda value: value  # type: ignore[attr-defined]
    args = parse(importlib.import_module("slime.utils.arguments"), flags)
    rollout = importlib.import_module("slime.ray.rollout")
    rollout.Lock = slime_source.Anything
    # Its engines are none: penstock's workers have their own.
    args.debug_train_only = True
    manager = rollout.RolloutManager(args, None)
    args.debug_train_only = False
    manager.set_train_parallel_config({
        "dp_size": 2, "vpp_size": 1, "cp_size": 1, "microbatch_group_size_per_vp_stage": 1,
    })  # fmt: skip

    # As slime's trainer does before each rollout, with the transport that the flags name.
    load = importlib.import_module("slime.utils.misc").load_function
    written = Path(args.update_weight_disk_dir) / "weight_v000001"
    written.mkdir(parents=True)
    save_file({"weight": torch.zeros(1)}, written / "model-00001.safetensors")
    load(args.custom_update_weight_post_write_path)(args, str(written), [])
    for file in written.iterdir():
        file.unlink()

    boxes = manager.generate(0)
    torch.save([box.inner for box in boxes], out / "shares.pt")
    seen: list[Any] = []
    rollout.log_eval_rollout_data = lambda *given: seen.append(given[2])
    manager.eval(0)
    [found] = seen
    result = {name: {"rewards": one["rewards"], "n": len(one["samples"])} for name, one in found.items()}
    result["paths"] = [args.rollout_function_path, args.eval_function_path]
    result["module"] = manager.generate_rollout.__module__
    (out / "eval.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
