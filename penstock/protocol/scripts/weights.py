"""State of weights: completed folders, copies in trainers' memory, and which worker loads which version."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from penstock.errors import ProtocolError
from penstock.protocol.keys import Keys
from penstock.protocol.records.copied import Copied
from penstock.protocol.records.publication import Publication
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import count_of, name_in, number_in, unpack_map
from penstock.protocol.records.whole import Whole
from penstock.redis.call import Call, Value, script, text, version_field
from penstock.redis.commands import AsyncClient, Client


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


def copied(keys: Keys, sub: str, *, owner: str, gen: int, model: str, told: Copied) -> Call[str]:
    """Report that the newest version is served from memory: copied | already | owner | version (not the newest)."""
    names = [keys.clock, keys.sub(sub), keys.copied(model)]
    args: list[Value] = [keys.prefix, owner, gen, version_field(model), told.version, told.to_bytes()]
    return Call(script("copied"), names, args, text)


def copied_of(data: bytes, model: str) -> Copied:
    """Parse the value of ``copied:MODEL``. Raises ProtocolError if it is invalid."""
    what = f"The copy of the newest version of model {model!r}"
    found = Copied.from_bytes(data, what)
    if not found.index:
        raise ProtocolError(f"{what} has a record without an index: publish again.")
    return found


async def read_copied(client: AsyncClient, keys: Keys, publication: Publication) -> Publication | None:
    """Return the publication with the index of its trainer's copy, and no folder; None without a copy.

    Blocks for a round trip. Raises ProtocolError.
    """
    data = await client.get(keys.copied(publication.model))
    found = None if data is None else copied_of(data, publication.model)
    return replace(publication, index=found.index) if found and found.version == publication.version else None


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
