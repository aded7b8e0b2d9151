"""The trainer's server of weights: what was published is offered to workers, in the background.

    offer(version)   queued ─> every range read and its digest made ─> on the shelf ─> verb relay_offer
    offer_copy       as that, of a copy in memory, until its folder takes its place, which is not read again
    again and again  each offer that is served still is said again; one whose folder or copy is gone is not

With ``transport: delta`` and a store that is a folder, what is whole in that store is offered too, before the version
that it leads to: who has the version before takes the delta.

Nothing here holds a step up, and nothing that fails here fails a publication: its folder is there, or comes.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.config import Config
from penstock.errors import PenstockError, ProtocolError, PublishError
from penstock.protocol.scripts import OFFER_EVERY_S, OFFER_MS, relay_offer
from penstock.records.keys import Keys
from penstock.records.offer import Offer
from penstock.redis.control import Control
from penstock.text import format_exc, redact
from penstock.weights.deltas.chains import MARKER, Anchor, Delta, catalog_of
from penstock.weights.deltas.objects import FolderObjects, listed
from penstock.weights.http.blobs import AnyBlob, files_of, make_offer, object_name
from penstock.weights.http.server import WeightsServer
from penstock.weights.http.token import token_of

log = logging.getLogger(__name__)

#: Between two looks whether there is something to offer.
LOOK_S = 0.05
#: Versions that are offered at once, the newest ones; of the store of deltas all that it has.
KEPT = 8
#: Longest wait for the thread to end.
END_S = 10.0


class Owner(Protocol):
    """The offering process and its subscription; its generation rises while this serves."""

    keys: Keys
    name: str

    @property
    def owner(self) -> str: ...

    @property
    def gen(self) -> int: ...


class CopyFiles(NamedTuple):
    """Files of a version served from memory."""

    #: That of its folder too.
    index_digest: str
    files: Mapping[str, AnyBlob]


class InMemory(Protocol):
    """A version served from memory until its folder is complete."""

    version: int

    @property
    def is_gone(self) -> bool:
        """Whether its memory was taken; for any thread, at once."""
        ...

    def files(self) -> CopyFiles:
        """Blocks for reading all of it. Raises OSError where it is gone, PublishError."""
        ...

    def tell(self, control: Control, index: str) -> bool:
        """Have workers look for it; whether they may. Blocks for a round trip."""
        ...


class _Offered(NamedTuple):
    offer: Offer
    #: What is there as long as it is; None: it is in memory.
    needs: Path | None
    is_stored: bool = False
    copy: InMemory | None = None


class Serving:
    """Serves versions of one model until ``close``.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.
        owner: of the subscription that publishes; where another one has it, nothing is offered.

    Raises:
        ConfigError: it cannot listen, there is no token, or TLS will not do.
    """

    def __init__(self, config: Config, owner: Owner) -> None:
        assert config.redis.url is not None
        self._owner = owner
        self._is_owner = True
        self._model = config.model.name
        self._range_bytes = config.serving.range_bytes
        token = token_of(config)
        self._closed = threading.Event()
        self._control = Control(config.redis.url, stopped=self._closed.is_set, check=False)
        self._wanted: deque[Callable[[], None]] = deque(maxlen=KEPT)
        #: What was given last to be served out of memory.
        self._copy: InMemory | None = None
        self._offers: dict[str, _Offered] = {}
        #: Folder of the store of deltas; None: there is none, or workers reach it without us.
        self._store: Path | None = None
        if config.trainer.transport == "delta" and "://" not in config.delta_store:
            self._store = Path(config.delta_store)
        #: Of the store, what cannot be offered.
        self._refused: set[str] = set()
        self._said_at = 0.0
        self.server = WeightsServer(config.serving, token, bytes_per_s=config.trainer.serve_bytes_per_s)
        self._thread = threading.Thread(target=self._run, name="weights-offers", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Config, owner: Owner) -> "Serving | None":
        """Make the server if ``serving.enabled`` is set; raises the errors of the class."""
        return cls(config, owner) if config.serving.enabled else None

    def offer(self, version: int, index: str, folder: Path) -> None:
        """Have a version offered. Returns at once; what fails is logged.

        Args:
            index: digest of its ``weights.index``, which must be among the files.
        """
        self._wanted.append(partial(self._begin, version, index, folder))

    def offer_copy(self, copy: InMemory) -> None:
        """Have the newest version offered out of memory, until that is gone or its folder there. As ``offer``."""
        self._copy = copy
        self._wanted.append(partial(self._begin_copy, copy))

    def close(self) -> None:
        """Serve no more. Blocks for ``END_S`` at most."""
        self._closed.set()
        self._thread.join(END_S)
        self.server.close()
        self._control.close()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                if self._wanted:
                    # Deltas first, so that who has the version before does not take all of this one.
                    self._offer_stored(anchors=False)
                    self._wanted.popleft()()
                elif self._is_due():
                    self._offer_stored()
                self._goes_on()
            except Exception as exc:  # whatever it was, the next version must be offered
                self._warn(exc)

    def _warn(self, exc: Exception) -> None:
        if not self._closed.is_set():
            log.warning(
                "weights over HTTP: %s", redact(str(exc) if isinstance(exc, PenstockError) else format_exc(exc))
            )

    def _offer_stored(self, *, anchors: bool = True) -> None:
        """Offer what is whole in the store of deltas by now, deltas first, the newest of each first."""
        if self._store is None:
            return
        try:
            catalog = catalog_of(listed(FolderObjects(self._store)))
        except PublishError as exc:
            self._warn(exc)
            return
        stored: list[Delta | Anchor] = [*reversed(catalog.deltas)]
        if anchors:
            stored += reversed(catalog.anchors)
        for one in stored:
            if one.group not in self._offers and one.group not in self._refused:
                try:
                    self._make_stored(one)
                except PublishError as exc:
                    self._refused.add(one.group)
                    self._warn(exc)

    def _make_stored(self, one: Delta | Anchor) -> None:
        assert self._store is not None
        folder = self._store / one.group
        blobs = {name: blob for name, blob in files_of(folder).items() if name != MARKER}
        self._make(one.group, one.version, one.index, blobs, needs=folder / MARKER, is_stored=True)

    def _begin(self, version: int, index: str, folder: Path) -> None:
        name = object_name(version, index)
        if self._store is not None and _is_there(self._store / name / MARKER):
            # The same bytes, and there for longer.
            if name not in self._offers:
                self._make_stored(Anchor(version, index))
        elif not self._replaces(name, folder):
            self._make(name, version, index, files_of(folder), needs=folder)
        self._leave_old()

    def _replaces(self, name: str, folder: Path) -> bool:
        """Whether a folder takes the place of the copy that it was written from, which went by the same index."""
        offered = self._offers.get(name)
        if offered is None or offered.copy is None:
            return False
        blobs = files_of(folder)
        if {file: blob.size for file, blob in blobs.items()} != offered.offer.sizes():
            return False
        self.server.shelf.put(name, blobs)
        self._offers[name] = _Offered(offered.offer, folder)
        return True

    def _begin_copy(self, copy: InMemory) -> None:
        def is_over() -> bool:
            return copy is not self._copy or copy.is_gone or self._goes_on()

        try:
            if is_over():
                return
            index, blobs = copy.files()
            name = object_name(copy.version, index)
            self._make(name, copy.version, index, blobs, copy=copy, stopped=is_over)
        except (OSError, PublishError) as exc:
            if not is_over():
                raise
            log.info("version %d is not served out of memory: %s", copy.version, exc)
            return
        self._say(name, self._offers[name].offer)  # first, so that who hears of it finds it
        if not copy.tell(self._control, index):
            self._drop(name)
        self._leave_old()

    def _leave_old(self) -> None:
        for old in [name for name, one in self._offers.items() if not one.is_stored][:-KEPT]:
            self._drop(old)

    def _make(
        self,
        name: str,
        version: int,
        index: str,
        blobs: Mapping[str, AnyBlob],
        *,
        needs: Path | None = None,
        is_stored: bool = False,
        copy: InMemory | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        try:
            offer = make_offer(
                blobs,
                url=self.server.url,
                version=version,
                index=index,
                range_bytes=self._range_bytes,
                is_whole=name == object_name(version, index),
                stopped=stopped or self._goes_on,
            )
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc
        self.server.shelf.put(name, blobs)
        self._offers[name] = _Offered(offer, needs, is_stored, copy)
        self._said_at = 0.0

    def _is_due(self) -> bool:
        return time.monotonic() - self._said_at > OFFER_EVERY_S

    def _goes_on(self) -> bool:
        """Say what is offered, where that is due: reading one takes longer than the others hold. Whether it ends."""
        if self._is_due() and not self._closed.is_set():
            self._said_at = time.monotonic()
            self._say_all()
        return self._closed.is_set()

    def _say_all(self) -> None:
        for name, one in list(self._offers.items()):
            if (one.needs is not None and not _is_there(one.needs)) or (one.copy is not None and one.copy.is_gone):
                self._drop(name)
                continue
            self._say(name, one.offer)

    def _say(self, name: str, offer: Offer, ttl_ms: int = OFFER_MS) -> None:
        by, thing = self._owner, f"{self._model}:{name}"
        call = relay_offer(by.keys, by.name, thing, offer, owner=by.owner, gen=by.gen, ttl_ms=ttl_ms)
        was, self._is_owner = self._is_owner, self._control.call(call) == "offered"
        if was and not self._is_owner:
            log.warning("weights over HTTP: nothing is offered while another trainer has subscription %r", by.name)

    def _drop(self, name: str) -> None:
        """Stop serving it, and release all waiters."""
        dropped = self._offers.pop(name, None)
        self.server.shelf.remove(name)
        if dropped is not None:
            self._say(name, dropped.offer, 1)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # a share that does not answer now may do so again
