"""Delete what an earlier start of a run left in its Redis and payload stores."""

import contextlib

from penstock.config import Config
from penstock.console.launch.live import Live
from penstock.errors import ConfigError
from penstock.payloads.servers import read
from penstock.payloads.store import open_store
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.scan import delete_keys, holds_keys


def clear_keys(config: Config, client: Client, live: Live) -> None:
    """Delete all keys of the run, on the servers that the configuration names. Blocks."""
    keys, stores = Keys(config.run), config.redis.payload_servers
    # Redis only names further servers; do not delete on the strength of that.
    for name in sorted(read(client, keys).servers.keys() - stores):
        live.event(
            f"payload server {name} is not in redis.payload_servers, so the old run's payloads there remain: delete "
            f"them manually, or name it there for `--fresh`"
        )
    for url in stores.values():
        with contextlib.closing(open_store(url)) as store:
            store.check()
            store.delete(keys.prefix)
            store.claim(keys.prefix)
    delete_keys(client, keys.prefix)


def refuse_another_run(config: Config, client: Client) -> None:
    """Raise ConfigError if Redis holds a run of this name that the run's folder does not know."""
    if holds_keys(client, Keys(config.run).prefix):
        raise ConfigError(
            f"Redis already holds a run {config.run}, and {config.run_dir} does not: "
            "choose another --run=NAME, or delete it with --fresh."
        )
