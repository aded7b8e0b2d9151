"""State of weights: completed folders, offers over HTTP, and which worker loads which version."""

from collections.abc import Iterable, Mapping

from penstock.errors import ProtocolError
from penstock.records.codec import count_of, name_in, number_in, unpack_map
from penstock.records.keys import Keys
from penstock.records.publication import Offer, Publication, Whole
from penstock.records.record import readable
from penstock.redis.call import Call, Value, script, text, version_field
from penstock.redis.commands import AsyncClient, Client

#: Time to live of an offer, and interval of its renewal; in ms, and in seconds.
OFFER_MS, OFFER_EVERY_S = 30_000, 5.0


def offer_weights(
    keys: Keys, sub: str, model: str, offer: Offer, *, owner: str, gen: int, ttl_ms: int = OFFER_MS
) -> Call[str]:
    """Offer a version over HTTP for ``ttl_ms``: offered | owner (the subscription is not the caller's)."""
    args: list[Value] = [keys.prefix, owner, gen, offer.to_bytes(), ttl_ms]
    return Call(script("offer_weights"), [keys.offer(model, offer.version, offer.index), keys.sub(sub)], args, text)


async def read_offer(client: AsyncClient, keys: Keys, model: str, version: int, index: str) -> Offer | None:
    """Read the offer of a version; None if it ended. Raises ProtocolError if it is invalid."""
    data = await client.get(keys.offer(model, version, index))
    if data is None:
        return None
    what = f"The offer of version {version}"
    offer = Offer.from_bytes(data, what)
    if (offer.version, offer.index) != (version, index):
        raise ProtocolError(f"{what} is of another version or index: no trainer writes it so.")
    return offer


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
