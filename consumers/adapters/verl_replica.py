"""The two sides of a verl rollout: the replica called by its trainer, and the adapter that its workers send weights to.

    AgentLoop ─generate─> PenstockServer (one Ray actor, verl_server.py) ─> Redis ─> penstock's workers
    actor's rank 0 ─update_weights─> a file in the run's folder of weights ─> PenstockServer publishes it

verl counts replicas by its own GPUs; penstock's engines belong to its workers, so all replicas share one server.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from penstock.consumers.adapters.inside_verl.sampling import new_file
from penstock.consumers.adapters.verl_server import PenstockServer, settings_of
from penstock.errors import ConfigError


class PenstockReplica(RolloutReplica):  # type: ignore[misc]
    """The trainer's side. All replicas of a run share one server."""

    async def launch_servers(self) -> None:
        """Start or find the server. Returns once it holds its subscription."""
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                "rollout.name=penstock serves the policy: give reward models and teachers an own rollout."
            )
        settings = settings_of(self.config.engine_kwargs)
        limits = {"prompt_length": self.config.prompt_length, "response_length": self.config.response_length}
        actor: Any = ray.remote(num_cpus=0)(PenstockServer)
        named = {"name": actor_name(settings["name"]), "get_if_exists": True, "max_concurrency": self.max_concurrency}
        server = actor.options(**named).remote(settings, temperature=self.config.temperature, **limits)
        self._server_address = await server.where.remote(self.replica_rank)
        self._server_handle = server
        # verl calls every replica; call the shared server once.
        self.servers = [self._server_handle] if self.replica_rank == 0 else []


class PenstockAdapter(BaseRollout):  # type: ignore[misc]
    """The workers' side: rank 0 of the actor hands over weights. verl does not manage the memory of the engines."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *_: object, replica_rank: int = 0, **__: object
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = max(0, replica_rank)
        self.is_leader_rank = self.replica_rank == 0 and int(os.environ.get("RANK", "0")) == 0
        self._name = settings_of(self.config.engine_kwargs)["name"]

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: engines manage their own memory."""

    async def release(self) -> None:
        """Do nothing: engines manage their own memory."""

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: object,
    ) -> None:
        """Publish ``weights``, pairs of name and complete tensor. Every rank iterates over them; rank 0 blocks until
        the version is announced.

        Raises:
            ConfigError: a LoRA adapter separate from its model, or a delta to the last weights.
        """
        if wire_format != "named_tensors":
            raise ConfigError(
                f"penstock takes whole weights, not {wire_format}: set checkpoint_engine.backend otherwise."
            )
        if peft_config is not None:
            raise ConfigError("penstock takes whole weights: set actor_rollout_ref.model.lora.merge=True.")
        whole: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_leader_rank:
                # A copy: verl may reuse the bucket.
                whole[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if not self.is_leader_rank:
            return
        server = ray.get_actor(actor_name(self._name))
        file = new_file(Path(await server.weights_dir.remote()), self._name)
        try:
            await asyncio.to_thread(save_file, whole, file)
            del whole
            await server.update_weights.remote(str(file), global_steps or 0)
        finally:
            file.unlink(missing_ok=True)


def actor_name(name: str) -> str:
    """Return the name of a subscription's server in Ray."""
    return f"penstock_rollout_{name}"
