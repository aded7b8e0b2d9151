"""State of weights: completed folders, offers over HTTP, and which worker loads which version."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import ProtocolError
from penstock.records.codec import count_of, name_in, number_in, unpack_map
from penstock.records.keys import Keys
from penstock.records.offer import Offer
from penstock.records.publication import Publication, Whole
from penstock.records.record import readable
from penstock.redis.call import Call, Value, script, text, version_field
from penstock.redis.commands import AsyncClient, Client

# Verbs of the relay: workers fetch the ranges of an object from each other, and ranges that none has from its
# trainer.
#
# An object is named ``MODEL:OBJECT`` here, ``OBJECT`` by the digest of its index (penstock/weights/http/blobs.py).

#: Time to live of an offer, and interval of its renewal; in ms, and in seconds.
OFFER_MS, OFFER_EVERY_S = 30_000, 5.0
#: Likewise for the ranges of a worker.
HAVE_MS, HAVE_EVERY_S = 12_000, 3.0
#: Time to live of a claim that its worker does not renew.
CLAIM_MS = 10_000
#: Most names of objects that are read: a trainer offers a few dozen.
MAX_NAMES = 4096
#: Most peers of an object that are read.
MAX_PEERS = 256
#: Most bytes of a claim that are read.
_CLAIM_BYTES = 1024


def relay_offer(
    keys: Keys, sub: str, thing: str, offer: Offer, *, owner: str, gen: int, ttl_ms: int = OFFER_MS
) -> Call[str]:
    """Offer an object for ``ttl_ms``: offered | owner (the subscription is not the caller's)."""
    args: list[Value] = [keys.prefix, owner, gen, offer.to_bytes(), ttl_ms, thing]
    return Call(script("relay_offer"), [keys.relay(thing), keys.relay_names, keys.sub(sub)], args, text)


def relay_have(
    keys: Keys,
    thing: str,
    worker: str,
    url: str,
    bitmap: bytes,
    *,
    claim: int = -1,
    ttl_ms: int = HAVE_MS,
    claim_ms: int = CLAIM_MS,
) -> Call[int]:
    """Report the ranges of a worker; all its claims but ``claim`` end.

    Args:
        bitmap: the first range is the highest bit of the first byte.
    """
    names = [keys.relay_peers(thing), keys.relay_have(thing, worker), *keys.relay_slots(thing)]
    args: list[Value] = [keys.prefix, worker, url, bitmap, ttl_ms, claim, claim_ms]
    return Call(script("relay_have"), names, args, int)


def relay_claim(
    keys: Keys, thing: str, worker: str, num_ranges: int, *, wanted: int = -1, claim_ms: int = CLAIM_MS
) -> Call[int]:
    """Claim a range that this worker may fetch from the trainer; -1: none is free. Repeating it returns the same range.

    Args:
        wanted: a range that its peers have and failed to send.
    """
    names = [keys.relay(thing), keys.relay_peers(thing), *keys.relay_slots(thing), keys.relay_taken(thing)]
    args: list[Value] = [keys.prefix, thing, worker, claim_ms, num_ranges, wanted]
    return Call(script("relay_claim"), names, args, int)


def bitmap_bytes(num_ranges: int) -> int:
    """Return the size of the bitmap of an object's ranges."""
    return -(-num_ranges // 8)


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that has ranges of an object."""

    url: str
    bitmap: bytes


async def read_peers(client: AsyncClient, keys: Keys, thing: str, num_ranges: int) -> dict[str, Peer]:
    """Read the peers of an object by worker, at most ``MAX_PEERS``, chosen at random. Two round trips.

    Raises:
        ProtocolError: a worker's name cannot be read. redis' errors.
    """
    found = await client.hrandfield(keys.relay_peers(thing), MAX_PEERS)
    workers = [name_in(name, "A peer") for name in found]
    if not workers:
        return {}
    pipe = client.pipeline(transaction=False)
    pipe.hmget(keys.relay_peers(thing), workers)
    for worker in workers:
        pipe.getrange(keys.relay_have(thing, worker), 0, bitmap_bytes(num_ranges) - 1)
    urls, *bitmaps = await pipe.execute()
    peers = zip(workers, urls, bitmaps, strict=True)
    return {worker: Peer(url.decode(errors="replace"), bitmap) for worker, url, bitmap in peers if url and bitmap}


async def read_claims(client: AsyncClient, keys: Keys, thing: str) -> list[tuple[str, int]]:
    """Read (worker, range) of each slot of the trainer that is taken; -1 if it is invalid. Raises redis' errors."""
    pipe = client.pipeline(transaction=False)
    for slot in keys.relay_slots(thing):
        pipe.getrange(slot, 0, _CLAIM_BYTES - 1)
    found = [data.decode(errors="replace") for data in await pipe.execute() if data]
    claims = [re.fullmatch(r"(.*) (\d{1,9})", one, re.DOTALL) for one in found]
    return [(one[1], int(one[2])) if one else (data, -1) for one, data in zip(claims, found, strict=True)]


async def read_offer(client: AsyncClient, keys: Keys, thing: str) -> Offer | None:
    """Read the offer of an object; None if it ended. Raises ProtocolError if it is invalid."""
    data = await client.get(keys.relay(thing))
    if data is None:
        return None
    offer = Offer.from_bytes(data, f"the offer of {thing}")
    if thing.rpartition("-")[2] != offer.index:
        raise ProtocolError(f"The offer of {thing} is of another index: no trainer writes it so.")
    return offer


async def read_names(client: AsyncClient, keys: Keys, model: str) -> list[str]:
    """Read the objects of a model that are offered, or were until half a minute ago. Raises redis' errors."""
    found = await client.zrange(keys.relay_names, -MAX_NAMES, -1)
    before = f"{model}:".encode()
    return [name.removeprefix(before).decode(errors="replace") for name in found if name.startswith(before)]


def whole(keys: Keys, sub: str, *, owner: str, gen: int, model: str, told: Whole) -> Call[str]:
    """Report that the folder of an announced version is complete: whole | already | owner | version (not announced)."""
    names = [keys.clock, keys.sub(sub), keys.whole(model)]
    args: list[Value] = [keys.prefix, owner, gen, version_field(model), told.version, told.to_bytes()]
    return Call(script("whole"), names, args, text)


def whole_of(data: bytes, version: int, model: str) -> Whole:
    """Parse a field of ``whole:MODEL``. Raises ProtocolError if it is invalid, or of another version."""
    what = f"The folder of version {version} of model {model!r}"
    found = Whole.from_bytes(data, what)
    if found.version != version or not found.path or not found.index:
        raise ProtocolError(f"{what} has a record of another version: publish again.")
    return found


def read_whole(client: Client, keys: Keys, publication: Publication) -> Publication | None:
    """Return the publication with its folder; None if that is not complete. Blocks for a round trip at most."""
    if publication.is_whole:
        return publication
    data = client.hget(keys.whole(publication.model), str(publication.version))
    return None if data is None else whole_of(data, publication.version, publication.model).of_publication(publication)


async def read_whole_async(client: AsyncClient, keys: Keys, publication: Publication) -> Publication | None:
    """Return the publication with its folder, as ``read_whole``."""
    if publication.is_whole:
        return publication
    data = await client.hget(keys.whole(publication.model), str(publication.version))
    return None if data is None else whole_of(data, publication.version, publication.model).of_publication(publication)


def read_all_whole(client: Client, keys: Keys, model: str) -> dict[int, Whole]:
    """Return every folder that was completed after its announcement, by version. Raises ProtocolError."""
    found = {}
    for name, data in client.hgetall(keys.whole(model)).items():
        version = count_of(name, f"A version in {keys.whole(model)}")
        found[version] = whole_of(data, version, model)
    return found


def loading_of(name: bytes, data: bytes) -> tuple[str, float, list[int]]:
    """Parse a field of ``loading:MODEL``: worker, time (Unix time), and versions; raise ProtocolError."""
    worker = name_in(name, "A worker that loads weights")
    what = f"What worker {worker} loads"
    record = unpack_map(data, what)
    versions = record.get("versions")
    if not isinstance(versions, list) or not set(map(type, versions)) <= {int}:
        raise ProtocolError(f"{what} is not a list of versions.")
    return worker, number_in(record, "at", what), versions


def loading_in(records: Mapping[bytes, bytes]) -> list[tuple[str, float, list[int]]]:
    """Parse the hash ``loading:MODEL`` as ``loading_of``; unreadable fields are skipped."""
    return readable(records, loading_of)


def cohorts_in(names: Iterable[bytes]) -> list[int]:
    """Return the versions that are fields of ``cohorts``; invalid fields are skipped."""
    return readable({name: name for name in names}, lambda name, _: count_of(name, "A version in cohorts"))
