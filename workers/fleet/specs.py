"""Turn a plan into arguments, configurations and environments of every process."""

from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.config.fleet import FleetConfig
from penstock.config.load import save_resolved, secret_environment
from penstock.config.reward import FrozenModelConfig, JudgeConfig, ScoringModelConfig
from penstock.errors import ConfigError
from penstock.workers.fleet.launcher import Spec
from penstock.workers.fleet.plan import EngineProcess, Plan, RouterProcess, WorkerProcess


def specs_of(config: Config, plan: Plan) -> dict[str, Spec]:
    """Return the processes that the fleet starts, by name. Writes each worker's configuration into the run's folder.

    Args:
        config: with ``redis.url`` set.
    """
    found = [_engine(config, engine) for engine in plan.engines if engine.started_by == "fleet"]
    found += [_router(config, router) for router in plan.routers if router.started_by == "fleet"]
    found += [_worker(config, plan, worker) for worker in plan.workers]
    logs = config.logs
    return {spec.name: replace(spec, max_log_bytes=logs.max_bytes) for spec in found}


def _logs(config: Config) -> Path:
    return config.run_dir / "logs"


def _engine(config: Config, engine: EngineProcess) -> Spec:
    # Not resolved: the interpreter of a virtual environment is a link, and is recognised by its own path.
    python, *arguments = engine.command
    return Spec(
        name=engine_process(engine),
        kind="encoder" if engine.worker_type == "encoder" else "engine",
        host=engine.host,
        gpus=engine.gpus,
        arguments=(),
        environment=engine.environment,
        log_path=str(_logs(config) / f"engine-{engine.name}.log"),
        engine=engine.owner,
        rank=engine.rank,
        command=(str(Path(python).absolute()), *arguments),
        tie=engine.owner if engine.num_nodes > 1 else "",
    )


def engine_process(engine: EngineProcess) -> str:
    """Return the name of the process that keeps an engine; a worker may have the engine's own."""
    return f"{engine.name}.engine"


def _router(config: Config, router: RouterProcess) -> Spec:
    return Spec(
        name=router.name,
        kind="router",
        host=router.host,
        gpus=(),
        arguments=(),
        environment={},
        log_path=str(_logs(config) / f"router-{router.name}.log"),
        command=router.command,
    )


def _worker(config: Config, plan: Plan, worker: WorkerProcess) -> Spec:
    slots = config.worker.slots if worker.slots is None else worker.slots
    own = config.model_copy(
        update={
            "engine": worker.engine,
            "worker": config.worker.model_copy(update={"slots": slots, "count": 1}),
            "reward": config.reward.model_copy(update={"judges": _judges(config, plan)}),
            "rollout": config.rollout.model_copy(update=_scoring_models(config, plan)),
            "fleet": FleetConfig(),
        }
    )
    folder = config.run_dir / "fleet"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{worker.name}.yaml"
    save_resolved(own, path)
    return Spec(
        name=worker.name,
        kind="worker",
        host=worker.host,
        gpus=worker.gpus,
        arguments=("penstock.cli", "worker", "--config", str(path), "--name", worker.name),
        environment=secret_environment(own),
        engine=worker.name,
        log_path=str(_logs(config) / f"{worker.name}.log"),
    )


def _judges(config: Config, plan: Plan) -> list[JudgeConfig]:
    """Return the judges with the addresses of this plan. Raises ConfigError if a model has none."""
    return [
        judge.model_copy(update={"url": _address(plan, judge, f"Judge {judge.name} (reward.judges)", "the judge")})
        for judge in config.reward.judges
    ]


def _scoring_models(config: Config, plan: Plan) -> dict[str, ScoringModelConfig]:
    """Return the models that score samples, with the addresses of this plan. Raises ConfigError if one has none."""
    return {
        key: model.model_copy(
            update={
                "url": _address(plan, model, f"Model {model.name} (rollout.{key})", f"rollout.{key}"),
                "path": config.folder_of(model),
            }
        )
        for key, model in config.rollout.scoring_models().items()
    }


def _address(plan: Plan, model: FrozenModelConfig, what: str, where: str) -> str:
    url = model.url or plan.endpoint(model.name)
    if url is None:
        raise ConfigError(
            f"{what} is a model without one address: give fleet.models.{model.name} a router, or {where} a url."
        )
    return url
