"""sglang-router as a process of our own, and its list of engines. Knows nothing of Redis.

Tried on sglang-router 0.3.2. Its retries are off: a request that is made again elsewhere would be another sample,
under another version. It serves /generate; controls go to each engine.
"""

import os
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.fleet_config import RouterConfig

#: Health of engines: two failed checks, two seconds apart, take one out. The defaults need three minutes.
_DEFAULTS: dict[str, Any] = {
    "health_check_interval_secs": 2,
    "health_failure_threshold": 2,
    "health_check_timeout_secs": 5,
    "log_level": "warn",
}

#: Arguments that penstock gives itself, and what to set instead.
_OURS = {
    "host": "nothing; it listens where its worker finds it",
    "port": "fleet.ports",
    "prometheus_host": "nothing",
    "prometheus_port": "fleet.ports",
    "policy": "router.policy",
    "worker_urls": "server_groups, or router.engines",
    "pd_disaggregation": "worker_type prefill and decode",
    "prefill": "worker_type prefill",
    "decode": "worker_type decode",
    "disable_retries": "nothing; a request made again elsewhere would be another sample",
    "retry_max_retries": "nothing; a request made again elsewhere would be another sample",
}


def build_router_command(config: RouterConfig, python: str, *, port: int = 0, metrics_port: int = 0) -> list[str]:
    """Command line of a router that has no engines yet: they are added when they have the weights.

    Args:
        python: interpreter of the engines' environment; ``config.python`` wins.
        port, metrics_port: where ``config`` leaves them to be chosen.

    Raises:
        ConfigError: ``args`` holds an argument that penstock gives itself.
    """
    given = {name.replace("-", "_"): value for name, value in config.args.items()}
    for name, instead in _OURS.items():
        if name in given:
            raise ConfigError(f"router.args.{name} cannot be set: penstock gives it; use {instead}.")
    pd = any(engine.worker_type == "prefill" for engine in config.engines)
    arguments: dict[str, Any] = {
        "host": config.host,
        "port": config.port or port,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": config.metrics_port or metrics_port,
        "policy": config.policy,
        "disable_retries": True,
        "pd_disaggregation": pd,
    }
    # Not resolved: the interpreter of a virtual environment is a link, and is told apart by its own path.
    interpreter = config.python or python
    command = [str(Path(interpreter).absolute()) if os.sep in interpreter else interpreter]
    command += ["-m", "sglang_router.launch_router"]
    for name, value in (arguments | _DEFAULTS | given).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif isinstance(value, list | tuple):
            command += [flag, *map(str, value)]
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command
