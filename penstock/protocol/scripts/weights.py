"""Weights: whose folders are there, and who is about to load which."""

from penstock.errors import ProtocolError
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from penstock.protocol.records.small_maps import count_of, name_in, number_in, unpack_map
from penstock.protocol.records.whole import Whole
from penstock.redis.call import Call, Value, script, text, version_field
from penstock.redis.commands import AsyncClient, Client


def whole(keys: Keys, sub: str, *, owner: str, gen: int, model: str, told: Whole) -> Call[str]:
    """Say that the folder of an announced version is there: whole | already | owner | version (not announced)."""
    names = [keys.clock, keys.sub(sub), keys.whole(model)]
    args: list[Value] = [keys.prefix, owner, gen, version_field(model), told.version, told.to_bytes()]
    return Call(script("whole"), names, args, text)


def whole_of(data: bytes, version: int, model: str) -> Whole:
    """A field of ``whole:MODEL``. Raises ProtocolError where it cannot be read, or is of another version."""
    what = f"The folder of version {version} of model {model!r}"
    found = Whole.from_bytes(data, what)
    if found.version != version or not found.path or not found.index:
        raise ProtocolError(f"{what} is told by a record that is not of it: publish again.")
    return found


def read_whole(client: Client, keys: Keys, publication: Publication) -> Publication | None:
    """The publication with its folder; None: that is still to come. Blocks for a round trip at most."""
    if publication.is_whole:
        return publication
    data = client.hget(keys.whole(publication.model), str(publication.version))
    return None if data is None else whole_of(data, publication.version, publication.model).of_publication(publication)


async def read_whole_async(client: AsyncClient, keys: Keys, publication: Publication) -> Publication | None:
    """As ``read_whole``."""
    if publication.is_whole:
        return publication
    data = await client.hget(keys.whole(publication.model), str(publication.version))
    return None if data is None else whole_of(data, publication.version, publication.model).of_publication(publication)


def read_all_whole(client: Client, keys: Keys, model: str) -> dict[int, Whole]:
    """Every folder that was told of after its announcement, by version. Raises ProtocolError."""
    found = {}
    for name, data in client.hgetall(keys.whole(model)).items():
        version = count_of(name, f"A version in {keys.whole(model)}")
        found[version] = whole_of(data, version, model)
    return found


def loading_of(name: bytes, data: bytes) -> tuple[str, float, list[int]]:
    """Worker, when it said so (Unix time), and versions of a field of ``loading:MODEL``; raises ProtocolError."""
    worker = name_in(name, "A worker that loads weights")
    what = f"What worker {worker} loads"
    record = unpack_map(data, what)
    versions = record.get("versions")
    if not isinstance(versions, list) or not set(map(type, versions)) <= {int}:
        raise ProtocolError(f"{what} is not a list of versions.")
    return worker, number_in(record, "at", what), versions
