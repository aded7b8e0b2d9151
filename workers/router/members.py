"""Read and write the list of engines behind a worker's router, which users and fleets change at run time."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from penstock.config import Config, EngineConfig
from penstock.config.fleet import MemberConfig
from penstock.config.reading.validation_errors import explain
from penstock.errors import ConfigError, ProtocolError
from penstock.names import ROUTED_EXPERTS
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.codec import pack, unpack
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.control import AsyncControl
from penstock.text import safe_repr
from penstock.workers.engine import Engine
from penstock.workers.router.engine import RoutedEngine
from penstock.workers.router.process import PASSED_SAMPLING, dropped_fields
from penstock.workers.sglang.args import with_switch
from penstock.workers.sglang.client import SglangClient
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.routed_experts import FLAG as ROUTING_FLAG
from penstock.workers.sglang.routed_experts import REQUEST_FIELDS, read_routing
from penstock.workers.sglang.server_info import INCREMENTAL_FLAG

log = logging.getLogger(__name__)

#: Seconds between reads of the list.
POLL_S = 0.5
#: Most engines behind one router.
MAX_MEMBERS = 4096


def members_field(worker: str) -> str:
    """Return the field of the hash ``fleet`` for a worker, by the name with which it was started."""
    return f"engines:{worker}"


def read_members(client: Client, keys: Keys, worker: str) -> list[MemberConfig] | None:
    """Read the list of a worker's engines; return None if it was never set. Raises ProtocolError if malformed."""
    return decode_members(client.hget(keys.fleet, members_field(worker)), worker)


def write_members(client: Client, keys: Keys, worker: str, members: Sequence[MemberConfig]) -> None:
    """Set the engines behind a worker's router; the worker applies them within a second."""
    value = pack([member.model_dump() for member in members])
    run(client, scripts.note(keys, keys.fleet, members_field(worker), value))


def decode_members(data: bytes | None, worker: str) -> list[MemberConfig] | None:
    """Decode a list of engines; see :func:`read_members`."""
    if not data:
        return None
    what = f"The list of engines of worker {worker}"
    values = unpack(data, what)
    if not isinstance(values, list) or len(values) > MAX_MEMBERS:
        raise ProtocolError(f"{what} is not a list of at most {MAX_MEMBERS} engines.")
    return [member_of(value, what) for value in values]


def member_of(value: object, what: str) -> MemberConfig:
    """Decode one engine of a list. Raises ProtocolError with the prefix ``what``."""
    try:
        return MemberConfig.model_validate(value)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        at = ".".join(map(str, error["loc"])) or safe_repr(value)
        raise ProtocolError(f"{what} cannot be read: {at}: {explain(error).rstrip('.')}.") from exc


async def follow_members(
    control: AsyncControl, keys: Keys, worker: str, follow: Callable[[list[MemberConfig]], None]
) -> None:
    """Call ``follow`` with a worker's list initially and after each change; log and ignore malformed lists."""
    seen: bytes | None = None
    while True:
        data = await control.do(lambda client: client.hget(keys.fleet, members_field(worker)))
        if data != seen:
            seen = data
            try:
                members = decode_members(data, worker)
            except ProtocolError as exc:
                log.error("ignoring a malformed list of engines: %s", exc)
                members = None
            if members is not None:
                follow(members)
        await asyncio.sleep(POLL_S)


def refuse_dropped(config: Config) -> None:
    """Raise ConfigError if the run needs a parameter that a router would drop silently."""
    if ROUTED_EXPERTS in config.rollout.sides and dropped_fields(REQUEST_FIELDS):
        raise ConfigError(
            f"rollout.sides has {ROUTED_EXPERTS}, which sglang-router does not forward: use engines without a router, "
            "with a worker for each."
        )
    sampled = [("rollout.sampling", config.rollout.sampling), ("rollout.eval_sampling", config.rollout.eval_sampling)]
    for kind, sets in (("train", config.data.train), ("eval", config.data.eval)):
        sampled += [(f"data.{kind}.{index}.sampling", dataset.sampling) for index, dataset in enumerate(sets)]
    for where, sampling in sampled:
        if dropped := dropped_fields({"sampling_params": sampling}):
            names = ", ".join(name.removeprefix("sampling_params.") for name in dropped)
            raise ConfigError(
                f"{where}: sglang-router silently drops {names}: remove it, or use engines without a router; it "
                f"forwards {', '.join(sorted(PASSED_SAMPLING))}."
            )


def engine_config(config: Config) -> EngineConfig:
    """Return the configuration of this worker's engine, with the switches that the run needs."""
    engine = with_switch(config.engine, ROUTING_FLAG) if ROUTED_EXPERTS in config.rollout.sides else config.engine
    if not config.worker.checkpoint_tokens:
        return engine
    return with_switch(engine, INCREMENTAL_FLAG)


def make_engine(config: Config, name: str, log_dir: Path) -> Engine:
    """Create the engine of this worker without starting it.

    Raises:
        ConfigError: the router would drop sampling parameters of the run.
    """
    engine: SglangClient
    if config.engine.router is None:
        engine = SglangEngine(engine_config(config), config.model, name=name, log_dir=log_dir)
    else:
        refuse_dropped(config)
        engine = RoutedEngine(config.engine, config.model, name=name, log_dir=log_dir)
    if ROUTED_EXPERTS in config.rollout.sides:
        engine.routing = read_routing(config.model.path)
    engine.seed = config.seed
    engine.changes_in_place = config.worker.apply == "in_place"
    return engine
