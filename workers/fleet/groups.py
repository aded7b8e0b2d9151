"""The models of a fleet and their groups, validated against the run, and the SGLang arguments of their engines."""

from typing import Any

from penstock.config import Config
from penstock.config.fleet import GroupConfig, ModelGroups
from penstock.errors import ConfigError
from penstock.workers.sglang.args import refuse_set, with_underscores

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


def groups_of(config: Config) -> list[ModelGroups]:
    """Return ``fleet.models``, or worker.count engines of ``model`` without GPUs.

    Raises:
        ConfigError: models that are inconsistent with each other or with ``model``.
    """
    if not config.fleet.models:
        group = GroupConfig(name="worker", num_engines=config.worker.count)
        return [ModelGroups(name=config.model.name, server_groups=[group])]
    if config.engine.url is not None or config.engine.router is not None:
        key = "engine.url" if config.engine.url is not None else "engine.router"
        raise ConfigError(
            f"{key} names engines, and fleet.models plans them: keep one; servers that run already go to urls."
        )
    for model in config.fleet.models:
        _check_model(config, model)
    if not any(model.name == config.model.name for model in config.fleet.models):
        raise ConfigError(
            f"fleet.models has no model {config.model.name}, which is trained (model.name), so nothing would take "
            "jobs: add it."
        )
    return config.fleet.models


def _check_model(config: Config, model: ModelGroups) -> None:
    where, trained = f"fleet.models.{model.name}", model.name == config.model.name
    if trained and model.update_weights is False:
        raise ConfigError(
            f"{where} is the trained model (model.name), and update_weights false would freeze it: "
            "remove it, or give the frozen model another name."
        )
    if not trained and model.update_weights:
        raise ConfigError(
            f"{where}: only {config.model.name} (model.name) is trained, so update_weights cannot be "
            "true: remove it, because a frozen model gets no publications."
        )
    if not trained and model.model_path is None and not all(group.urls for group in model.server_groups):
        raise ConfigError(f"{where} is a model of its own: set its model_path.")
    if trained and model.model_path not in (None, config.model.path):
        raise ConfigError(
            f"{where}.model_path is {model.model_path}, and model.path {config.model.path}: both are "
            "the trained model; remove model_path."
        )
    for name, group in model.groups():
        if "CUDA_VISIBLE_DEVICES" in config.engine.env | group.env:
            raise ConfigError(f"{where}.{name}: CUDA_VISIBLE_DEVICES cannot be set, the fleet plans it: use gpus.")
        _merged(config, f"{where}.{name}", group)


def is_routed(config: Config, model: ModelGroups) -> bool:
    """Return whether one address stands for all its engines."""
    kinds = {group.worker_type for group in model.server_groups}
    several = sum(group.count + len(group.urls) for group in model.server_groups if group.worker_type == "regular") > 1
    return "prefill" in kinds or model.router is not None or (model.name != config.model.name and several)


def group_arguments(config: Config, where: str, group: GroupConfig) -> dict[str, Any]:
    """Return ``engine.args`` overridden by a group's ``overrides``, with the tensor-parallel size that fills its GPUs.

    Raises:
        ConfigError: one of them sets what the plan sets, or the sizes do not fit ``num_gpus_per_engine``.
    """
    return _with_parallelism(where, _merged(config, where, group), group.per_engine)


def _merged(config: Config, where: str, group: GroupConfig) -> dict[str, Any]:
    merged = with_underscores(config.engine.server_args) | with_underscores(group.overrides)
    refuse_set(f"{where}: ", merged, PLANNED, "the fleet")
    return merged


def _with_parallelism(where: str, args: dict[str, Any], num_gpus: int) -> dict[str, Any]:
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


def role_arguments(worker_type: str, ports: dict[str, int], encoder_urls: list[str]) -> dict[str, Any]:
    """Return the arguments that make an engine a prefill, a decode, an encoder, or a regular one."""
    match worker_type:
        case "decode":
            return {"disaggregation_mode": "decode"}
        case "encoder":
            return {"encoder_only": True}
        case "prefill":
            role = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": ports["bootstrap"]}
        case _:
            role = {}
    return role | ({"language_only": True, "encoder_urls": encoder_urls} if encoder_urls else {})
