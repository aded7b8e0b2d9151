"""Turn a plan into arguments, configurations and environments of every process."""

from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.config.fleet import FleetConfig
from penstock.config.load import save_resolved, secret_environment
from penstock.config.reward import FrozenModelConfig
from penstock.errors import ConfigError
from penstock.workers.fleet.launcher import Spec
from penstock.workers.fleet.plan import EngineProcess, Plan, WorkerProcess


def specs_of(config: Config, plan: Plan) -> dict[str, Spec]:
    """Return the processes that the fleet starts, by name. Writes each worker's configuration into the run's folder.

    Args:
        config: with ``redis.url`` set.
    """
    logs = config.run_dir / "logs"
    found = [_engine(logs, engine) for engine in plan.engines if engine.started_by == "fleet"]
    found += [
        Spec(one.name, "router", one.host, str(logs / f"router-{one.name}.log"), one.command)
        for one in plan.routers
        if one.started_by == "fleet"
    ]
    found += [_worker(config, logs, plan, worker) for worker in plan.workers]
    return {spec.name: replace(spec, max_log_bytes=config.logs.max_bytes) for spec in found}


def _engine(logs: Path, engine: EngineProcess) -> Spec:
    # Not resolved: the interpreter of a virtual environment is a link, and is recognised by its own path.
    python, *arguments = engine.command
    return Spec(
        name=engine_process(engine),
        kind="encoder" if engine.worker_type == "encoder" else "engine",
        host=engine.host,
        log_path=str(logs / f"engine-{engine.name}.log"),
        command=(str(Path(python).absolute()), *arguments),
        environment=engine.environment,
        gpus=engine.gpus,
        engine=engine.owner,
        rank=engine.rank,
    )


def engine_process(engine: EngineProcess) -> str:
    """Return the name of the process that keeps an engine; a worker may have the engine's own."""
    return f"{engine.name}.engine"


def _worker(config: Config, logs: Path, plan: Plan, worker: WorkerProcess) -> Spec:
    judges = [
        one.model_copy(update={"url": _address(plan, one, f"Judge {one.name} (reward.judges)", "the judge")})
        for one in config.reward.judges
    ]
    scoring = {
        key: one.model_copy(
            update={
                "url": _address(plan, one, f"Model {one.name} (rollout.{key})", f"rollout.{key}"),
                "path": config.folder_of(one),
            }
        )
        for key, one in config.rollout.scoring_models().items()
    }
    slots = config.worker.slots if worker.slots is None else worker.slots
    own = config.model_copy(
        update={
            "engine": worker.engine,
            "worker": config.worker.model_copy(update={"slots": slots, "count": 1}),
            "reward": config.reward.model_copy(update={"judges": judges}),
            "rollout": config.rollout.model_copy(update=scoring),
            "fleet": FleetConfig(),
        }
    )
    path = config.run_dir / "fleet" / f"{worker.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_resolved(own, path)
    return Spec(
        name=worker.name,
        kind="worker",
        host=worker.host,
        log_path=str(logs / f"{worker.name}.log"),
        arguments=("penstock.cli", "worker", "--config", str(path), "--name", worker.name),
        environment=secret_environment(own),
        gpus=worker.gpus,
        engine=worker.name,
    )


def _address(plan: Plan, model: FrozenModelConfig, what: str, where: str) -> str:
    """Return the address of a frozen model: its own, or that of the plan. Raises ConfigError if it has none."""
    url = model.url or plan.endpoints().get(model.name)
    if url is None:
        raise ConfigError(
            f"{what} is a model without one address: give fleet.models.{model.name} a router, or {where} a url."
        )
    return url
