"""The models of a fleet and their groups, validated against the run."""

from penstock.config import Config
from penstock.config.fleet import GroupConfig, ModelGroups
from penstock.errors import ConfigError
from penstock.workers.fleet.roles import merge


def groups_of(config: Config) -> list[ModelGroups]:
    """Return ``fleet.models``, or worker.count engines of ``model`` without GPUs.

    Raises:
        ConfigError: models that are inconsistent with each other or with ``model``.
    """
    if not config.fleet.models:
        return [
            ModelGroups(
                name=config.model.name, server_groups=[GroupConfig(name="worker", num_engines=config.worker.count)]
            )
        ]
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
    trained = model.name == config.model.name
    if trained and model.update_weights is False:
        raise ConfigError(
            f"fleet.models.{model.name} is the trained model (model.name), and update_weights false would freeze it: "
            "remove it, or give the frozen model another name."
        )
    if not trained and model.update_weights:
        raise ConfigError(
            f"fleet.models.{model.name}: only {config.model.name} (model.name) is trained, so update_weights cannot be "
            "true: remove it, because a frozen model gets no publications."
        )
    if not trained and model.model_path is None and not all(group.urls for group in model.server_groups):
        raise ConfigError(f"fleet.models.{model.name} is a model of its own: set its model_path.")
    if trained and model.model_path not in (None, config.model.path):
        raise ConfigError(
            f"fleet.models.{model.name}.model_path is {model.model_path}, and model.path {config.model.path}: both are "
            "the trained model; remove model_path."
        )
    for name, group in zip(model.names(), model.server_groups, strict=True):
        where = f"fleet.models.{model.name}.{name}"
        if "CUDA_VISIBLE_DEVICES" in group.env or "CUDA_VISIBLE_DEVICES" in config.engine.env:
            raise ConfigError(f"{where}: CUDA_VISIBLE_DEVICES cannot be set, the fleet plans it: use gpus.")
        merge(where, config.engine.server_args, group.overrides)


def find_group(config: Config, model_name: str, group_name: str) -> tuple[ModelGroups, GroupConfig]:
    """Return a model and its group. Raises ConfigError that lists the existing ones."""
    for model in groups_of(config):
        for name, group in zip(model.names(), model.server_groups, strict=True):
            if (model.name, name) == (model_name, group_name):
                return model, group
    known = [f"{model.name}.{name}" for model in groups_of(config) for name in model.names()]
    raise ConfigError(f"The fleet has no group {model_name}.{group_name}; it has {', '.join(known)}.")


def is_routed(config: Config, model: ModelGroups) -> bool:
    """Return whether one address stands for all its engines."""
    kinds = {group.worker_type for group in model.server_groups}
    several = sum(group.count + len(group.urls) for group in model.server_groups if group.worker_type == "regular") > 1
    return "prefill" in kinds or model.router is not None or (model.name != config.model.name and several)
