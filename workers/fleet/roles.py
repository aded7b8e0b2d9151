"""SGLang arguments for the role of an engine in its group, by worker type."""

from typing import Any

from penstock.errors import ConfigError
from penstock.workers.sglang.args import refuse_set, with_underscores

#: Ports above --dist-init-addr that SGLang derives from it (0.5.20: six).
DERIVED_PORTS = 6

#: Arguments that the plan sets, and what to set instead.
PLANNED = {
    "disaggregation_mode": "worker_type",
    "disaggregation_bootstrap_port": "nothing; it is taken from fleet.ports",
    "encoder_only": "worker_type: encoder",
    "encoder_urls": "nothing; they are those of the model's encoders",
    "language_only": "nothing; it follows from a group of encoders",
    "nnodes": "num_gpus_per_engine; it follows from the GPUs of a node",
    "node_rank": "nothing; it follows from the place of the node",
    "dist_init_addr": "nothing; it is taken from fleet.ports",
    "nccl_init_addr": "nothing; it is taken from fleet.ports",
    "nccl_port": "nothing; it is taken from fleet.ports",
    "base_gpu_id": "gpus",
    "gpu_id_step": "gpus",
}


def merge(where: str, base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return ``engine.args`` overridden by a group's ``overrides``.

    Raises:
        ConfigError: one of them sets what the plan sets.
    """
    merged = with_underscores(base) | with_underscores(overrides)
    refuse_set(f"{where}: ", merged, PLANNED, "the fleet")
    return merged


def parallelism(where: str, args: dict[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return ``args`` with the tensor-parallel size that fills ``num_gpus``, unless they set it.

    Raises:
        ConfigError: their product is not the number of GPUs of an engine.
    """
    if num_gpus == 0:
        return args
    names = {
        "tp": ("tp_size", "tensor_parallel_size", "tp"),
        "pp": ("pp_size", "pipeline_parallel_size", "pp"),
        "dp": ("dp_size", "data_parallel_size", "dp"),
    }
    given = {kind: next((args[n] for n in aliases if n in args), None) for kind, aliases in names.items()}
    if bad := next((k for k, v in given.items() if v is not None and (type(v) is not int or v < 1)), None):
        raise ConfigError(f"{where}: {bad}_size = {given[bad]!r} is not a number of GPUs.")
    # With DP attention the data-parallel ranks are inside the tensor-parallel group.
    outside = (given["dp"] or 1) if not args.get("enable_dp_attention") else 1
    others = (given["pp"] or 1) * outside
    if given["tp"] is None:
        if num_gpus % others:
            raise ConfigError(
                f"{where}: {num_gpus} GPUs per engine are not a multiple of pp_size x dp_size = {others}."
            )
        return args | {"tp_size": num_gpus // others}
    if given["tp"] * others != num_gpus:
        raise ConfigError(
            f"{where}: tp_size x pp_size x dp_size is {given['tp'] * others}, and an engine has {num_gpus} GPUs: "
            "remove tp_size, or correct num_gpus_per_engine."
        )
    return args


def role_of(worker_type: str, *, bootstrap_port: int | None, encoder_urls: list[str]) -> dict[str, Any]:
    """Return the arguments that make an engine a prefill, a decode, an encoder, or a regular one."""
    match worker_type:
        case "prefill":
            role: dict[str, Any] = {
                "disaggregation_mode": "prefill",
                "disaggregation_bootstrap_port": bootstrap_port,
            }
        case "decode":
            return {"disaggregation_mode": "decode"}
        case "encoder":
            return {"encoder_only": True}
        case _:
            role = {}
    if encoder_urls:
        role |= {"language_only": True, "encoder_urls": encoder_urls}
    return role
