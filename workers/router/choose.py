"""Create the engine of a worker: one server, or several behind a router."""

from pathlib import Path

from penstock.config import Config, EngineConfig
from penstock.errors import ConfigError
from penstock.names import ROUTED_EXPERTS
from penstock.workers.engine import Engine
from penstock.workers.router.engine import RoutedEngine
from penstock.workers.router.members import refuse_dropped
from penstock.workers.sglang.capabilities import TABLE
from penstock.workers.sglang.client import SglangClient
from penstock.workers.sglang.command import with_switch
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.routed_experts import FLAG as ROUTING_FLAG
from penstock.workers.sglang.routed_experts import read_routing


def engine_config(config: Config) -> EngineConfig:
    """Return the configuration of this worker's engine: if answers are streamed, each token is sent once."""
    engine = with_switch(config.engine, ROUTING_FLAG) if ROUTED_EXPERTS in config.rollout.sides else config.engine
    if not config.worker.stream_interval:
        return engine
    return with_switch(engine, TABLE[-1].incremental_streaming_flag)


def make_engine(config: Config, name: str, log_dir: Path) -> Engine:
    """Return the engine of this worker; nothing is started.

    Raises:
        ConfigError: a router would drop sampling parameters or faults of the run.
    """
    engine: SglangClient = (
        SglangEngine(engine_config(config), config.model, name=name, log_dir=log_dir, faults=config.faults)
        if config.engine.router is None
        else make_routed(config, name, log_dir)
    )
    if ROUTED_EXPERTS in config.rollout.sides:
        engine.routing = read_routing(config.model.path)
    engine.seed = config.seed
    engine.changes_in_place = config.worker.apply == "in_place"
    return engine


def make_routed(config: Config, name: str, log_dir: Path) -> RoutedEngine:
    """Return the client of engines behind a router; raises as :func:`make_engine`."""
    refuse_dropped(config)
    if config.faults.any:
        raise ConfigError("faults fail the requests of one engine, and engine.router has several: remove one of them.")
    return RoutedEngine(config.engine, config.model, name=name, log_dir=log_dir)
