"""Offer published versions to workers over HTTP, from the trainer, in the background.

    offer(version)   queue ─> read every range, compute its digest ─> put on the shelf ─> verb relay_offer
    periodically     renew each offer; drop those whose folder is gone

With ``transport: delta`` and a store in a folder, complete anchors and deltas of the store are offered too. Deltas are
offered before their target version, so that workers with the base fetch the delta.

Runs beside training: it delays no step, and its failures do not fail a publication.
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
from penstock.weights.delta_chain import MARKER, Anchor, Delta, catalog_of
from penstock.weights.delta_store import DeltaStore
from penstock.weights.http.blobs import AnyBlob, files_of, make_offer, object_name
from penstock.weights.http.server import WeightsServer
from penstock.weights.http.token import token_of

log = logging.getLogger(__name__)

#: Polling interval of the queue.
LOOK_S = 0.05
#: Most versions offered at once, the newest ones; objects of the delta store are not limited.
KEPT = 8
#: Longest wait for the thread to end.
END_S = 10.0


class Owner(Protocol):
    """Identify the offering process and its subscription, whose generation may rise while it serves."""

    keys: Keys
    name: str

    @property
    def owner(self) -> str: ...

    @property
    def gen(self) -> int: ...


class _Offered(NamedTuple):
    offer: Offer
    #: Path that exists while the object can be served.
    needs: Path
    is_stored: bool = False


class Serving:
    """Serve versions of one model until ``close``.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.
        owner: of the subscription that publishes; nothing is offered while another trainer has it.

    Raises:
        ConfigError: the address cannot be bound, there is no token, or the TLS settings are invalid.
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
        self._offers: dict[str, _Offered] = {}
        #: Folder of the delta store; None: no store, or workers read it directly.
        self._store: Path | None = None
        if config.trainer.transport == "delta" and "://" not in config.delta_store:
            self._store = Path(config.delta_store)
        #: Groups of the store that cannot be offered.
        self._refused: set[str] = set()
        self._renewed_at = 0.0
        self.server = WeightsServer(config.serving, token, bytes_per_s=config.trainer.serve_bytes_per_s)
        self._thread = threading.Thread(target=self._run, name="weights-offers", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Config, owner: Owner) -> "Serving | None":
        """Make the server if ``serving.enabled`` is set; raises the errors of the class."""
        return cls(config, owner) if config.serving.enabled else None

    def offer(self, version: int, index: str, folder: Path) -> None:
        """Queue a version to be offered. Returns at once; errors are logged.

        Args:
            index: digest of its ``weights.index``, which must be among the files.
        """
        self._wanted.append(partial(self._begin, version, index, folder))

    def close(self) -> None:
        """Stop serving. Blocks for at most ``END_S``."""
        self._closed.set()
        self._thread.join(END_S)
        self.server.close()
        self._control.close()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                if self._wanted:
                    # Deltas first, so that workers with the base do not fetch the complete version.
                    self._offer_stored(anchors=False)
                    self._wanted.popleft()()
                elif self._is_due():
                    self._offer_stored()
                self._renew_if_due()
            except Exception as exc:  # the thread must survive and offer the next version
                self._warn(exc)

    def _warn(self, exc: Exception) -> None:
        if not self._closed.is_set():
            log.warning(
                "weights over HTTP: %s", redact(str(exc) if isinstance(exc, PenstockError) else format_exc(exc))
            )

    def _offer_stored(self, *, anchors: bool = True) -> None:
        """Offer the complete groups of the delta store, deltas first, the newest of each first."""
        if self._store is None:
            return
        try:
            catalog = catalog_of(DeltaStore(str(self._store)).names())
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
        if self._store is not None and _exists(self._store / name / MARKER):
            # The store has the same bytes and keeps them longer.
            if name not in self._offers:
                self._make_stored(Anchor(version, index))
        else:
            self._make(name, version, index, files_of(folder), needs=folder)
        self._drop_old()

    def _drop_old(self) -> None:
        for old in [name for name, one in self._offers.items() if not one.is_stored][:-KEPT]:
            self._drop(old)

    def _make(
        self,
        name: str,
        version: int,
        index: str,
        blobs: Mapping[str, AnyBlob],
        *,
        needs: Path,
        is_stored: bool = False,
    ) -> None:
        try:
            offer = make_offer(
                blobs,
                url=self.server.url,
                version=version,
                index=index,
                range_bytes=self._range_bytes,
                is_whole=name == object_name(version, index),
                stopped=self._renew_if_due,
            )
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc
        self.server.shelf.put(name, blobs)
        self._offers[name] = _Offered(offer, needs, is_stored)
        self._renewed_at = 0.0

    def _is_due(self) -> bool:
        return time.monotonic() - self._renewed_at > OFFER_EVERY_S

    def _renew_if_due(self) -> bool:
        """Renew all offers if due; return whether the server is closed. Called during long reads too."""
        if self._is_due() and not self._closed.is_set():
            self._renewed_at = time.monotonic()
            self._renew()
        return self._closed.is_set()

    def _renew(self) -> None:
        for name, one in list(self._offers.items()):
            if not _exists(one.needs):
                self._drop(name)
                continue
            self._announce(name, one.offer)

    def _announce(self, name: str, offer: Offer, ttl_ms: int = OFFER_MS) -> None:
        by, thing = self._owner, f"{self._model}:{name}"
        call = relay_offer(by.keys, by.name, thing, offer, owner=by.owner, gen=by.gen, ttl_ms=ttl_ms)
        was, self._is_owner = self._is_owner, self._control.call(call) == "offered"
        if was and not self._is_owner:
            log.warning("weights over HTTP: nothing is offered while another trainer has subscription %r", by.name)

    def _drop(self, name: str) -> None:
        """Stop serving an object, and withdraw its offer."""
        dropped = self._offers.pop(name, None)
        self.server.shelf.remove(name)
        if dropped is not None:
            self._announce(name, dropped.offer, 1)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # a network file system may recover
