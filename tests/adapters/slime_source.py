"""A checkout of slime as far as a trainer rank reads train data, without what it needs beside: Ray, Megatron, a GPU.

Stand-ins that answer are ``ray.get``, Megatron's ``mpu`` and the device. Any other package that is not installed is
there by name only, so that slime's modules can be imported; nothing of it is called.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

#: Packages that slime's modules import at their head.
ABSENT = (
    "ray", "megatron", "wandb", "torch_memory_saver", "sglang", "sglang_router", "deep_ep", "httpx", "pybase64",
    "mbridge", "transformer_engine", "omegaconf", "flash_attn", "apex", "pylatexenc", "accelerate",
)  # fmt: skip
#: What slime changes inside Megatron, which is not here.
MENDS = "slime.backends.megatron_utils.megatron_patch"


class _Name(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Name):
    """Stands for a class, a function or a decorator that is never called in earnest."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if given else self


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT or name == MENDS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def mpu(rank: int, size: int) -> ModuleType:
    """Megatron's parallel state of one data-parallel rank: no tensor, pipeline or context parallelism."""
    state = _Module("megatron.core.mpu")
    answers: dict[str, Any] = {
        "get_data_parallel_rank": rank,
        "get_data_parallel_world_size": size,
        "get_data_parallel_src_rank": 0,
        "get_tensor_model_parallel_rank": 0,
        "get_tensor_model_parallel_world_size": 1,
        "get_context_parallel_rank": 0,
        "get_context_parallel_world_size": 1,
        "get_virtual_pipeline_model_parallel_world_size": None,
        "is_pipeline_last_stage": True,
    }
    for name, answer in answers.items():
        setattr(state, name, lambda *_, _answer=answer, **__: _answer)
    state.get_data_parallel_group_gloo = lambda *_, **__: dist.group.WORLD  # type: ignore[attr-defined]
    return state


def stand_in(source: str) -> None:
    """This process is slime's from here on."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ABSENT]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, source)


def load(source: str, rank: int, size: int) -> SimpleNamespace:
    """slime's modules for one rank of a process."""
    stand_in(source)
    importlib.import_module("ray").get = lambda reference: reference  # type: ignore[attr-defined]
    core = importlib.import_module("megatron.core")
    core.mpu = sys.modules["megatron.core.mpu"] = mpu(rank, size)  # type: ignore[attr-defined]
    accelerator = importlib.import_module("slime.utils.accelerator")
    for name in ("current_device", "device"):
        setattr(accelerator, name, lambda *_: torch.device("cpu"))
    return SimpleNamespace(
        actor=importlib.import_module("slime.backends.megatron_utils.actor").MegatronTrainRayActor,
        process=importlib.import_module("slime.utils.data").process_rollout_data,
        tensorize=importlib.import_module("slime.observability.rollout_data_utils"),
        log=importlib.import_module("slime.observability.train_metric_utils"),
        data=importlib.import_module("slime.backends.megatron_utils.data"),
        cp=importlib.import_module("slime.backends.megatron_utils.cp_utils"),
    )


def arguments(**changes: Any) -> argparse.Namespace:
    """slime's arguments, as far as they are looked at."""
    values: dict[str, Any] = {
        "use_wandb": False, "use_tensorboard": False, "ci_test": False, "log_multi_turn": True, "log_passrate": True,
        "log_correct_samples": True, "rollout_max_response_len": 16, "wandb_always_use_train_step": False,
        "num_layers": 2, "moe_router_topk": 2, "moe_layer_freq": None, "allgather_cp": False,
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


def equal(one: Any, other: Any) -> bool:
    """Whether two values of train data are the same, dtypes included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
