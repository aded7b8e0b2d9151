"""Print a plan for people and for scripts. Values of variables set in the configuration are masked."""

import shlex
from typing import Any

from penstock.text import MASK, is_secret
from penstock.workers.fleet.plan import EngineProcess, Plan, WorkerProcess

_ENGINE = ("name", "model", "worker_type", "host", "gpus", "url", "ports", "started_by", "command")
_ROUTER = ("name", "model", "host", "url", "started_by", "command")
_WORKER = ("name", "host", "gpus", "slots")


def as_records(plan: Plan) -> dict[str, Any]:
    """Return plain values: every process with host, GPUs, ports, exact command and additional environment."""
    return {
        "engines": [
            {**_fields(one, _ENGINE), "node_rank": one.rank, "nnodes": one.num_nodes, "environment": _masked(one)}
            for one in plan.engines
        ],
        "routers": [
            {**_fields(one, _ROUTER), "engines": [each.model_dump(exclude_none=True) for each in one.router.engines]}
            for one in plan.routers
        ],
        "workers": [{**_fields(one, _WORKER), "feeds": _feeds(one)} for one in plan.workers],
        "endpoints": plan.endpoints(),
    }


def _fields(of: object, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(of, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _feeds(worker: WorkerProcess) -> str:
    address = worker.engine.router or worker.engine
    return worker.engine.url or f"http://{address.host}:{address.port}"


def _masked(engine: EngineProcess) -> dict[str, str]:
    """Return an engine's additional environment: the values that penstock chose, and masks for all others."""
    given = set(engine.engine.env if engine.engine is not None else ())
    if engine.gpus:
        given.discard("CUDA_VISIBLE_DEVICES")  # set by the plan
    return {
        name: MASK if name in given or is_secret(name, value) else value for name, value in engine.environment.items()
    }


def as_text(plan: Plan) -> str:
    """Return the same as lines that a shell could run."""
    lines: list[str] = []
    for engine in plan.engines:
        gpus = f", GPUs {','.join(map(str, engine.gpus))}" if engine.gpus else ""
        by = f"started by the {engine.started_by}"
        if engine.started_by == "nobody":
            by = "runs already" if engine.url else "starts nothing"
        lines.append(f"{engine.name}: {engine.worker_type} on {engine.host or engine.url}{gpus}, {by}")
        if engine.command:
            environment = [f"{name}={shlex.quote(value)}" for name, value in _masked(engine).items()]
            lines.append("    " + " ".join([*environment, shlex.join(engine.command)]))
    for router in plan.routers:
        count = len(router.router.engines)
        lines.append(f"{router.name}: {router.url} for {count} engines, started by the {router.started_by}")
        lines.append("    " + shlex.join(router.command))
    lines += [f"{worker.name}: a worker on {worker.host}, feeds {_feeds(worker)}" for worker in plan.workers]
    lines += [f"model {model} answers at {url}" for model, url in plan.endpoints().items()]
    return "\n".join(lines)
