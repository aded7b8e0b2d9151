"""verl 0.9.1 on a machine without an accelerator, by its own registries: a platform, and its FSDP engine for it.

verl ships platforms for CUDA, ROCm and NPU, and lets others be added; everything below the platform is verl's own.
"""

import contextlib
import os
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.models.transformers.monkey_patch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_base import PlatformBase
from verl.trainer.config import CheckpointConfig
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss


class Device(types.ModuleType):
    """``torch.cpu``, and what verl asks an accelerator beside it, to report memory."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("max_memory_", "memory_")):
            return lambda *_: 0
        return {
            "mem_get_info": lambda *_: (0, 1),
            "get_device_name": lambda *_: "CPU",
            "empty_cache": lambda: None,
        }.get(name) or getattr(torch.cpu, name)


class Cpu(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "cpu", Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "ACCEL"  # Ray takes CPUs by an argument of their own, and refuses them among its resources

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def make_actor(model: Path, rendezvous: Path, *, lr: float, batch: int) -> TrainingWorker:
    """verl's actor worker: FSDP2, AdamW, PPO loss with its defaults, float32; one rank over gloo."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    set_platform(Cpu())
    # verl 0.9.1 looks for a value-head class that this TRL no longer has.
    verl.models.transformers.monkey_patch.is_trl_available = lambda: False
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    register = EngineRegistry.register("language_model", backend=["fsdp", "fsdp2"], device="cpu", vendor="cpu")
    register(FSDPEngineWithLMHead)
    optimizer = FSDPOptimizerConfig(lr=lr, lr_warmup_steps=0, total_training_steps=10)
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=3,
            infer_micro_batch_size_per_gpu=3,
            mixed_precision=precision,
        ),
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    worker.reset()
    actor = ActorConfig(
        strategy="fsdp2", ppo_mini_batch_size=batch, ppo_micro_batch_size_per_gpu=3, use_torch_compile=False,
        rollout_n=1, optim=optimizer,
    )  # fmt: skip
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker
