"""Payload bytes from their servers: a rank reads its own rows, one MGET per server and chunk."""

from collections.abc import Sequence
from functools import partial

from penstock.config import RedisConfig
from penstock.control import Client, Control
from penstock.errors import ConfigError, ProtocolError
from penstock.keys import CONTROL, Keys
from penstock.messages import Row

#: Most payload bytes asked for at once, so that one answer stays small beside what the server can buffer.
CHUNK_BYTES = 32 * 1024 * 1024


class PayloadReader:
    """Connections to the payload servers; survives their restarts. One per process, not thread-safe."""

    def __init__(self, config: RedisConfig) -> None:
        if config.url is None:
            raise ConfigError("redis.url is not set.")
        self._controls = {CONTROL: Control(config.url)}
        for name, url in config.payload_servers.items():
            self._controls[name] = Control(url)

    def read(self, keys: Keys, rows: Sequence[Row]) -> dict[str, bytes | None]:
        """Bytes by sample id; None where a payload is gone. Blocks."""
        found: dict[str, bytes | None] = {}
        by_server: dict[str, list[Row]] = {}
        for row in rows:
            by_server.setdefault(row.server, []).append(row)
        for server, wanted in by_server.items():
            for chunk in _chunks(wanted):
                names = [keys.payload(row.sample, row.token) for row in chunk]
                values = self.control(server).do(partial(_mget, names))
                found.update(zip((row.sample for row in chunk), values, strict=True))
        return found

    def control(self, server: str) -> Control:
        """Connection to a payload server by name; ProtocolError for one that the configuration does not name."""
        try:
            return self._controls[server]
        except KeyError:
            raise ProtocolError(
                f"A sample lies on payload server {server!r}, which redis.payload_servers does not name: add its URL."
            ) from None

    def close(self) -> None:
        for control in self._controls.values():
            control.close()


def _mget(names: list[str], client: Client) -> list[bytes | None]:
    return list(client.mget(names))


def _chunks(rows: Sequence[Row]) -> list[list[Row]]:
    chunks: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        if size + row.num_bytes > CHUNK_BYTES and chunks[-1]:
            chunks.append([])
            size = 0
        chunks[-1].append(row)
        size += row.num_bytes
    return chunks if chunks[0] else []
