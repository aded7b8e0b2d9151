"""Assign the GPUs of this machine to the parts of a run: the trainer's first, then those of each engine.

| part | takes |
|---|---|
| trainer | GPUs 0 to dp_size - 1 with ``device: cuda``; GPU N with ``cuda:N``; none with ``cpu`` |
| engine of a worker | tp_size x pp_size (x dp_size without DP attention) of the rest |
| the same, colocated | as many of the trainer's |
| engines of ``fleet`` | by its groups; a placeholder reserves the trainer's, else the trainer's are excluded |

Pure: starts nothing, and does not access GPUs.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.names import AGENT

if TYPE_CHECKING:
    from penstock.workers.fleet.plan import Plan

_DEVICE = re.compile(r"cuda(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of each part, by name (``penstock.metrics.gpu_load``)."""

    #: All GPUs of this machine.
    gpus: tuple[str, ...]
    trainer: tuple[str, ...]
    #: GPUs of each worker's engine; empty if it has none or they are not assigned here.
    workers: tuple[tuple[str, ...], ...]
    #: The fleet's processes, if the run has one on this machine.
    fleet: "Plan | None" = None
    #: GPUs assigned to the fleet; None: it discovers its own.
    fleet_gpus: tuple[str, ...] | None = None

    @property
    def free(self) -> tuple[str, ...]:
        """Return the unassigned GPUs."""
        taken = {*self.trainer, *(gpu for gpus in self.workers for gpu in gpus)}
        if self.fleet is not None:
            names = self.fleet_gpus or self.gpus
            taken |= {names[gpu] for engine in self.fleet.engines for gpu in engine.gpus if gpu < len(names)}
        return tuple(gpu for gpu in self.gpus if gpu not in taken)


def place(config: Config, gpus: Sequence[str], without: Collection[str] = ()) -> Placement:
    """Assign the GPUs of this machine to the parts of a run.

    Args:
        gpus: names of all GPUs.
        without: parts that are not started. A trainer among them keeps its GPUs if the machine has enough, for one
            that is started separately.

    Raises:
        ConfigError: not enough GPUs; names what exists, what each part needs, and what to change.
    """
    gpus = tuple(gpus)
    trainer = _trainers(config, gpus, is_left_out="trainer" in without)
    if "worker" in without:
        return Placement(gpus, trainer, ())
    if config.fleet.models:
        return _with_fleet(config, gpus, trainer)
    _check_colocation(config)
    per_engine = gpus_of_engine(config, gpus)
    if not per_engine:
        return Placement(gpus, trainer, ((),) * config.worker.count)
    return Placement(gpus, trainer, _deal(config, gpus, trainer, per_engine))


def gpus_of_engine(config: Config, gpus: Collection[str]) -> int:
    """Return the number of GPUs of one worker's engine; 0: none, or not assigned here.

    Args:
        gpus: names of all GPUs of the machine; a preset that was not given follows them.

    Raises:
        ConfigError: the sizes are not numbers, or several for an engine on a CPU.
    """
    engine = config.engine
    if engine.url is not None or engine.router is not None:
        return 0
    given = engine.args if gpus and "preset" not in engine.model_fields_set else engine.server_args
    args = {name.replace("-", "_"): value for name, value in given.items()}
    sizes = _size(args, "tp", "tensor_parallel_size") * _size(args, "pp", "pipeline_parallel_size")
    # Other devices (npu, xpu, ...) are counted differently.
    if (device := args.get("device")) not in (None, "cuda"):
        if device == "cpu" and sizes > 1:
            raise ConfigError(
                f"engine.args: {sizes_of(config)} takes {count_gpus(sizes)}, and the engine runs on a CPU "
                "(engine.preset, or engine.args.device): remove it, or start on a machine with GPUs."
            )
        return 0
    if "CUDA_VISIBLE_DEVICES" in engine.env or "base_gpu_id" in args:
        if config.worker.count > 1:
            key = "env.CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in engine.env else "args.base-gpu-id"
            raise ConfigError(
                f"engine.{key} names the GPUs of one engine, and worker.count is {config.worker.count}: remove it, "
                "each engine is given GPUs of its own; or set worker.count 1."
            )
        return 0
    outside = 1 if args.get("enable_dp_attention") else _size(args, "dp", "data_parallel_size")
    return sizes * outside


def _check_colocation(config: Config) -> None:
    """Raise ConfigError if an engine is to share GPUs with a trainer that has none."""
    if config.trainer.colocate and not config.trainer.device.startswith("cuda"):
        raise ConfigError(
            f"trainer.colocate gives the trainer's GPUs to the engines, and trainer.device {config.trainer.device} has "
            "none: remove it, or set trainer.device cuda."
        )


def _size(args: dict[str, Any], short: str, long: str) -> int:
    value = next((args[name] for name in (f"{short}_size", long, short) if name in args), 1)
    if type(value) is not int or value < 1:
        raise ConfigError(f"engine.args: {short}-size {value!r} is not a number of GPUs; write 1 or more.")
    return value


def trainer_gpus(config: Config) -> range:
    """Return the indexes of the GPUs that the reference trainer's ranks use, as it counts them; none on a CPU.

    Raises:
        ConfigError: several ranks, but a single GPU is named.
    """
    trainer = config.trainer
    match = _DEVICE.fullmatch(trainer.device)
    if match is None:
        return range(0)
    if match[1] is None:
        return range(trainer.dp_size)
    if trainer.dp_size > 1:
        raise ConfigError(
            f"trainer.device {trainer.device} is one GPU, and trainer.dp_size is {trainer.dp_size}: write device cuda, "
            "which gives each rank one of its own, from GPU 0 on."
        )
    return range(int(match[1]), int(match[1]) + 1)


def _trainers(config: Config, gpus: tuple[str, ...], *, is_left_out: bool) -> tuple[str, ...]:
    wanted = trainer_gpus(config)
    if wanted and wanted[-1] >= len(gpus):
        if is_left_out:
            return ()
        raise ConfigError(
            f"trainer.device {config.trainer.device} with trainer.dp_size {config.trainer.dp_size} takes "
            f"{_named(wanted)}, and this machine has {count_gpus(len(gpus))}: lower trainer.dp_size, set "
            "trainer.device cpu, or start the trainer on another machine (--without trainer)."
        )
    return tuple(gpus[index] for index in wanted)


def is_colocated(config: Config) -> bool:
    """Return whether engines share the trainer's GPUs."""
    if config.trainer.colocate is not None:
        return config.trainer.colocate
    return config.trainer.sends_to_own_gpu


def _deal(
    config: Config, gpus: tuple[str, ...], trainer: tuple[str, ...], per_engine: int
) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of each worker."""
    count, total = config.worker.count, config.worker.count * per_engine
    if trainer and is_colocated(config):
        pool = trainer[:1] if config.trainer.sends_to_own_gpu else trainer
        if per_engine > len(pool):
            raise ConfigError(
                f"An engine takes {count_gpus(per_engine)} ({sizes_of(config)}), and those that it may share with the "
                f"trainer are {count_gpus(len(pool))}: lower tp-size, or set trainer.colocate false."
            )
        places = len(pool) // per_engine
        _check_shares(config, -(-count // places))
        return tuple(pool[index % places * per_engine :][:per_engine] for index in range(count))
    free = tuple(gpu for gpu in gpus if gpu not in trainer)
    if total > len(free):
        fits = len(free) // per_engine
        ours = f"the trainer takes {len(trainer)} of them" if trainer else "none is the trainer's"
        instead = [f"lower worker.count to {fits}"] if fits else []
        instead += ["a smaller tp-size"] if per_engine > 1 else []
        instead += ["fewer ranks (trainer.dp_size)"] if len(trainer) > 1 else []
        instead += ["engines on the trainer's own GPUs (trainer.colocate true)"] if trainer else []
        raise ConfigError(
            f"worker.count {count}, with {count_gpus(per_engine)} for each engine ({sizes_of(config)}), takes "
            f"{count_gpus(total)}; this machine has {count_gpus(len(gpus))}, and {ours}: "
            f"{' or '.join(instead) or 'set engine.preset cpu, or engine.url'}."
        )
    return tuple(free[index * per_engine :][:per_engine] for index in range(count))


def _check_shares(config: Config, engines: int) -> None:
    """Raise ConfigError if the engines on one GPU would together use more than all of it."""
    share = config.engine.server_args.get("mem-fraction-static")
    if isinstance(share, int | float) and engines * share >= 1:
        raise ConfigError(
            f"{engines} engines share a GPU with the trainer, and engine.args.mem-fraction-static {share:g} of each "
            f"is more than there is: set it below {1 / (engines + 1):.2f}, or lower worker.count."
        )


def _with_fleet(config: Config, gpus: tuple[str, ...], trainer: tuple[str, ...]) -> Placement:
    if config.fleet.launcher == "ray":
        # Ray places the fleet; a placeholder reserves the trainer's GPUs.
        return Placement(gpus, trainer, ())
    from penstock.workers.fleet.nodes import LOOPBACK, Node, local_nodes
    from penstock.workers.fleet.plan import plan

    held = any(group.worker_type == "placeholder" for model in config.fleet.models for group in model.server_groups)
    colocated = is_colocated(config)
    given = gpus
    if not config.fleet.nodes:
        given = gpus if held or colocated else tuple(gpu for gpu in gpus if gpu not in trainer)
        nodes = [Node(LOOPBACK, given)]
    else:
        nodes = local_nodes(config)
    laid_out = plan(config, nodes)
    if trainer and not colocated and (held or config.fleet.nodes):
        kept = {gpu for engine in laid_out.engines if engine.worker_type == "placeholder" for gpu in engine.gpus}
        if missing := [index for index in trainer_gpus(config) if index not in kept]:
            raise ConfigError(
                f"fleet.models: the trainer takes {_named(trainer_gpus(config))}, and no placeholder holds GPU "
                f"{missing[0]}: let the first group be {{worker_type: placeholder, num_gpus: {len(trainer)}}}, or set "
                "trainer.colocate true."
            )
    return Placement(gpus, trainer, (), laid_out, None if config.fleet.nodes else given)


def sizes_of(config: Config) -> str:
    """Describe the sizes of an engine."""
    names = ("tp-size", "pp-size", "dp-size")
    args = config.engine.server_args
    return ", ".join(f"{name} {args[name]}" for name in names if name in args) or "tp-size 1"


def serves_agents(config: Config) -> bool:
    """Return whether agents run the samples of a dataset."""
    return any(dataset.environment == AGENT for dataset in (*config.data.train, *config.data.eval))


def count_gpus(number: int) -> str:
    """Format a number of GPUs: ``no GPU``, ``1 GPU``, ``2 GPUs``."""
    return "no GPU" if number == 0 else f"{number} GPU{'s' if number > 1 else ''}"


def _named(indexes: range) -> str:
    return f"GPU {indexes[0]}" if len(indexes) == 1 else f"GPUs {indexes[0]} to {indexes[-1]}"
