"""What a worker writes: payloads on their servers first, then the commit that makes them count."""

import asyncio
import hashlib
import logging
from collections.abc import Sequence

from penstock import payloads, scripts
from penstock.config import Config
from penstock.control import AsyncControl, Client
from penstock.errors import ConfigError, QueueFull
from penstock.keys import Keys
from penstock.messages import Sample, SampleMeta
from penstock.scripts import Committed
from penstock.waits import Waiting

log = logging.getLogger(__name__)

#: Name of the control Redis where it holds payloads too.
CONTROL = "control"
#: Wait before a full Redis is tried again.
FULL_WAIT_S = 1.0


class Commits:
    """Writes payloads and commits them. A full Redis is waited for, with the sample in hand.

    Args:
        control: the control Redis of this worker.
        worker: name recorded with each sample.
    """

    def __init__(self, config: Config, keys: Keys, control: AsyncControl, waiting: Waiting, worker: str) -> None:
        if config.redis.url is None:
            raise ConfigError("The worker needs redis.url: the address of the run's Redis.")
        self._keys = keys
        self._control = control
        self._waiting = waiting
        self._worker = worker
        self._ttl_s = config.buffer.payload_ttl_s
        self._servers = {name: AsyncControl(url) for name, url in config.redis.payload_servers.items()}
        self._servers = self._servers or {CONTROL: control}

    async def commit(self, job: str, token: str, samples: Sequence[Sample], temperature: float, kind: str) -> Committed:
        """Write and commit finished samples of one job. Waits while Redis is full or gone.

        Raises:
            PayloadError: a sample's arrays contradict each other.
        """
        records: list[tuple[int, int, bytes]] = []
        writes: dict[str, list[tuple[str, bytes]]] = {}
        for sample in samples:
            meta, data = self._pack(sample, token, temperature, kind)
            writes.setdefault(meta.server, []).append((self._keys.payload(sample.id, token), data))
            records.append((sample.k, meta.oldest, meta.to_bytes()))
        for server, pairs in writes.items():
            await self._when_there_is_room(server, pairs)
        call = scripts.commit(self._keys, job, token, records)
        while True:
            try:
                return await self._control.call(call)
            except QueueFull as exc:
                await self._full(exc)

    def _pack(self, sample: Sample, token: str, temperature: float, kind: str) -> tuple[SampleMeta, bytes]:
        data = payloads.encode(sample)
        server = choose_server(sample.id, list(self._servers))
        meta = payloads.meta_of(
            sample,
            token=token,
            server=server,
            data=data,
            worker=self._worker,
            temperature=temperature,
            logprob_kind=kind,
        )
        return meta, data

    async def _when_there_is_room(self, server: str, pairs: list[tuple[str, bytes]]) -> None:
        async def write(client: Client) -> None:
            pipe = client.pipeline(transaction=False)
            for key, data in pairs:
                pipe.set(key, data, nx=True, ex=self._ttl_s)
            try:
                await pipe.execute()
            except Exception as exc:
                raise scripts.translate(exc, "payload") from exc

        while True:
            try:
                await self._servers[server].do(write)
                return
            except QueueFull as exc:
                await self._full(exc)

    async def _full(self, exc: QueueFull) -> None:
        log.warning("a finished sample is kept here: %s", exc)
        self._waiting.for_("room in Redis for finished samples")
        await asyncio.sleep(FULL_WAIT_S)
        self._waiting.for_("room in Redis for finished samples")

    async def close(self) -> None:
        for name, control in self._servers.items():
            if name != CONTROL:
                await control.close()


def choose_server(sample_id: str, servers: Sequence[str]) -> str:
    """Rendezvous hash (Thaler and Ravishankar 1998): a server that joins or leaves moves only its own share."""
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda name: hashlib.blake2b(f"{name}\0{sample_id}".encode(), digest_size=8).digest())
