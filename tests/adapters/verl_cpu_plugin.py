"""verl's whole trainer on a machine without an accelerator: what every process of it imports
(``VERL_USE_EXTERNAL_MODULES=tests.adapters.verl_cpu_plugin``). Penstock is not named here.
"""

from typing import Any

import torch.distributed as dist
import verl.models.transformers.monkey_patch
from verl.plugin.platform import set_platform
from verl.workers.engine.base import EngineRegistry

from tests.adapters.verl_cpu import Cpu

set_platform(Cpu())
_init = dist.init_process_group


def _init_on_cpu(backend: str | None = None, **named: Any) -> None:
    """verl names a backend for the CPU and one for its device, which here are one."""
    _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **named)


dist.init_process_group = _init_on_cpu
# verl 0.9.1 looks for a value-head class that this TRL no longer has.
verl.models.transformers.monkey_patch.is_trl_available = lambda: False

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register("language_model", backend=["fsdp", "fsdp2"], device="cpu", vendor="cpu")(FSDPEngineWithLMHead)
