"""Override the configured number of groups per batch by the trainer's argument."""

from penstock.config import Config
from penstock.config.subscription import Definition, Unit
from penstock.errors import ConfigError


def with_groups(config: Config, batch_groups: int | None) -> Config:
    """Return ``config`` with another number of groups per batch; None: unchanged."""
    if batch_groups is None:
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"batch_groups": batch_groups})})


def check_groups(batch_groups: int | None, definition: Definition) -> None:
    """Raise ConfigError if a subscription has another size than the argument."""
    if batch_groups is not None and (definition.size, definition.unit) != (batch_groups, Unit.GROUPS):
        raise ConfigError(
            f"Trainer(batch_groups={batch_groups}) contradicts its subscription, whose batches have {definition.size} "
            f"{definition.unit}: leave batch_groups out, or the size of the subscription."
        )
