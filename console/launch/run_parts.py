"""The processes that ``penstock run`` starts besides Redis."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.config import Config
from penstock.console.launch.placement import Placement
from penstock.errors import ConfigError

#: Parts that may be left out, to be started separately.
PARTS = ("buffer", "trainer", "producer", "worker", "verifiers", "recorder")


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    #: Words of its command before and after the configuration.
    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    #: Visible GPUs; None: all.
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return additions to its environment."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def check_parts(without: Collection[str]) -> None:
    """Raise ConfigError for names that are not parts."""
    if unknown := sorted(set(without) - set(PARTS)):
        raise ConfigError(f"--without {unknown[0]}: a run has the parts {', '.join(PARTS)}.")


def parts_of(config: Config, placement: Placement, without: Collection[str] = ()) -> list[Part]:
    """Return the processes of a run, in start order."""
    parts = [Part(name, (name,)) for name in ("buffer", "trainer", "producer")]
    if config.history.enabled:
        # First, because groups that retire without a recorder are not recorded.
        parts.insert(1, Part("recorder", ("recorder",)))
    if config.reward.pool.kind == "rq":
        parts.append(Part("verifiers", ("verifiers",), ("--name", "verifiers")))
    parts = [part for part in parts if part.name not in without]
    if "worker" in without:
        return parts
    if config.fleet.models:
        return [*parts, Part("fleet", ("fleet", "up"), gpus=placement.fleet_gpus)]
    for index, gpus in enumerate(placement.workers):
        parts.append(Part(f"worker-{index}", ("worker",), ("--name", f"worker-{index}"), gpus or None))
    return parts
