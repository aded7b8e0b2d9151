"""Connections to the payload servers, by the names that sample metadata records."""

from collections.abc import Iterable, Sequence

from penstock import connect
from penstock.config import RedisConfig
from penstock.control import Client
from penstock.errors import ProtocolError
from penstock.keys import CONTROL
from penstock.scripts import persist, run

#: Keys per round trip; bounds the time one call takes on the server.
CHUNK = 2048


class PayloadServers:
    """Clients by server name. The buffer sends keys, never payload bytes."""

    def __init__(self, config: RedisConfig, control: Client) -> None:
        self._clients = {CONTROL: control}
        for name, url in config.payload_servers.items():
            self._clients[name] = connect.connect(url)

    def client(self, server: str) -> Client:
        """Raises ProtocolError for a server that the configuration does not name."""
        try:
            return self._clients[server]
        except KeyError:
            known = ", ".join(sorted(self._clients))
            raise ProtocolError(
                f"A sample lies on payload server {server!r}, which redis.payload_servers does not name "
                f"(it names {known}): add its URL."
            ) from None

    def persist(self, keys: Sequence[tuple[str, str]]) -> list[bool]:
        """Make (server, key) payloads permanent. Returns False where a payload is gone. Blocks."""
        kept = [True] * len(keys)
        for server, indices in _by_server(keys).items():
            client = self.client(server)
            for start in range(0, len(indices), CHUNK):
                chunk = indices[start : start + CHUNK]
                done_all: list[bool] = run(client, persist([keys[i][1] for i in chunk]))
                for index, done in zip(chunk, done_all, strict=True):
                    kept[index] = done
        return kept

    def unlink(self, keys: Sequence[tuple[str, str]]) -> None:
        """Free (server, key) payloads; keys that are gone do not matter. Blocks."""
        for server, indices in _by_server(keys).items():
            for start in range(0, len(indices), CHUNK):
                self.client(server).unlink(*[keys[i][1] for i in indices[start : start + CHUNK]])

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _by_server(keys: Iterable[tuple[str, str]]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for index, (server, _) in enumerate(keys):
        grouped.setdefault(server, []).append(index)
    return grouped
