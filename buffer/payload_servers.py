"""Connections to the payload servers, by the names that sample metadata records."""

from collections.abc import Iterable, Sequence

from penstock import connect
from penstock.config import RedisConfig
from penstock.control import Client
from penstock.keys import CONTROL, Keys
from penstock.messages import SampleMeta, stored
from penstock.payload_folder import PayloadFolder, is_folder
from penstock.payload_servers import Directory, read
from penstock.scripts import persist, run

#: Keys per round trip; bounds the time one call takes on the server.
CHUNK = 2048


class PayloadServers:
    """Clients by server name. The buffer sends keys, never payload bytes."""

    def __init__(self, config: RedisConfig, control: Client, keys: Keys | None = None) -> None:
        self._clients = {CONTROL: control}
        self._config = config
        self._control = control
        self._keys = keys
        for name, url in config.payload_servers.items():
            self._clients[name] = PayloadFolder(url) if is_folder(url) else connect.connect(url)

    def client(self, server: str) -> Client:
        """Raises ProtocolError for a server that neither the configuration nor the run names."""
        if server not in self._clients:
            directory = read(self._control, self._keys) if self._keys else Directory()
            url = directory.url(server, self._config)
            self._clients[server] = PayloadFolder(url) if is_folder(url) else connect.connect(url, check=False)
        return self._clients[server]

    def persist(self, keys: Sequence[tuple[str, str]]) -> list[bool]:
        """Make (server, key) payloads permanent. Returns False where a payload is gone. Blocks."""
        kept: dict[tuple[str, str], bool] = {}
        for server, names in _by_server(keys).items():
            client = self.client(server)
            for start in range(0, len(names), CHUNK):
                chunk = names[start : start + CHUNK]
                done_all: list[bool] = (
                    client.keep(chunk) if isinstance(client, PayloadFolder) else run(client, persist(chunk))
                )
                kept.update(((server, name), done) for name, done in zip(chunk, done_all, strict=True))
        return [kept[key] for key in keys]

    def unlink(self, keys: Sequence[tuple[str, str]]) -> None:
        """Free (server, key) payloads; keys that are gone do not matter. Blocks."""
        for server, names in _by_server(keys).items():
            for start in range(0, len(names), CHUNK):
                self.client(server).unlink(*names[start : start + CHUNK])

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Remove from folders what nobody committed in time, which servers do by themselves; how many. Blocks."""
        folders = [client for client in self._clients.values() if isinstance(client, PayloadFolder)]
        return sum(folder.expire(prefix, ttl_s) for folder in folders)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def keys_of(keys: Keys, job: str, record: SampleMeta) -> list[tuple[str, str]]:
    """(server, key) of a committed sample's payload, and of each side array beside it."""
    sides = [(record.server, keys.side(f"{job}/{record.k}", record.token, name)) for name, *_ in record.sides]
    return [(record.server, stored(keys, job, record)), *sides]


def _by_server(keys: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Server -> its keys, each once: samples that were committed together share one."""
    grouped: dict[str, list[str]] = {}
    for server, name in dict.fromkeys(keys):
        grouped.setdefault(server, []).append(name)
    return grouped
