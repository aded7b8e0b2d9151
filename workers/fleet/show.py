"""Print a plan for people and for scripts. Values of variables set in the configuration are masked."""

import shlex
from typing import Any

from penstock.config import EngineConfig
from penstock.text import MASK, is_secret
from penstock.workers.fleet.plan import EngineProcess, Plan

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
        "workers": [{**_fields(one, _WORKER), "feeds": _feeds(one.engine)} for one in plan.workers],
        "endpoints": {model: plan.endpoint(model) for model in plan.paths},
    }


def _fields(of: object, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(of, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _feeds(config: EngineConfig) -> str:
    if config.router is not None:
        return f"http://{config.router.host}:{config.router.port}"
    return config.url or f"http://{config.host}:{config.port}"


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
    records = as_records(plan)
    for engine in records["engines"]:
        gpus = f", GPUs {','.join(map(str, engine['gpus']))}" if engine["gpus"] else ""
        what = {"nobody": "runs already" if engine["url"] else "starts nothing"}.get(
            engine["started_by"], f"started by the {engine['started_by']}"
        )
        lines.append(f"{engine['name']}: {engine['worker_type']} on {engine['host'] or engine['url']}{gpus}, {what}")
        if engine["command"]:
            environment = [f"{name}={shlex.quote(value)}" for name, value in engine["environment"].items()]
            lines.append("    " + " ".join([*environment, shlex.join(engine["command"])]))
    for router in records["routers"]:
        count = len(router["engines"])
        lines.append(f"{router['name']}: {router['url']} for {count} engines, started by the {router['started_by']}")
        lines.append("    " + shlex.join(router["command"]))
    for worker in records["workers"]:
        lines.append(f"{worker['name']}: a worker on {worker['host']}, feeds {worker['feeds']}")
    for model, url in records["endpoints"].items():
        if url is not None:
            lines.append(f"model {model} answers at {url}")
    return "\n".join(lines)
