"""The trainer's server of weights: what was published is offered to workers, in the background.

    offer(version)   queued ─> every range read and its digest made ─> on the shelf ─> verb relay_offer
    again and again  each offer that is served still is said again; one whose folder is gone is not

Nothing here holds a step up, and nothing that fails here fails a publication: its folder is there.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from penstock.config import Config
from penstock.errors import PenstockError, ProtocolError, PublishError
from penstock.protocol.keys import Keys
from penstock.protocol.records.offer import Offer
from penstock.protocol.scripts import OFFER_EVERY_S, relay_offer
from penstock.redaction import redact
from penstock.redis.control import Control
from penstock.weights.http.blobs import AnyBlob, files_of, object_name
from penstock.weights.http.offering import make_offer
from penstock.weights.http.server import WeightsServer
from penstock.weights.http.token import token_of
from penstock.words import said

log = logging.getLogger(__name__)

#: Between two looks whether there is something to offer.
LOOK_S = 0.05
#: Objects that are offered at once, the newest ones.
KEPT = 8
#: Longest wait for the thread to end.
END_S = 10.0


class Serving:
    """Serves versions of one model until ``close``.

    Args:
        config: with ``redis.url`` set and ``serving.enabled``.

    Raises:
        ConfigError: it cannot listen, there is no token, or TLS will not do.
    """

    def __init__(self, config: Config, keys: Keys) -> None:
        assert config.redis.url is not None
        self._keys = keys
        self._model = config.model.name
        self._range_bytes = config.serving.range_bytes
        token = token_of(config)
        self._closed = threading.Event()
        self._control = Control(config.redis.url, stopped=self._closed.is_set, check=False)
        self._wanted: deque[tuple[int, str, Path | Mapping[str, AnyBlob]]] = deque(maxlen=KEPT)
        #: Object -> its offer, and the folder that must be there for it; None: it is in memory.
        self._offers: dict[str, tuple[Offer, Path | None]] = {}
        self.server = WeightsServer(config.serving, token, bytes_per_s=config.trainer.serve_bytes_per_s)
        self._thread = threading.Thread(target=self._run, name="weights-offers", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Config, keys: Keys) -> "Serving | None":
        """Where ``serving.enabled`` wants it; raises as the class."""
        return cls(config, keys) if config.serving.enabled else None

    def offer(self, version: int, index: str, files: Path | Mapping[str, AnyBlob]) -> None:
        """Have a version offered. Returns at once; what fails is logged.

        Args:
            index: digest of its ``weights.index``, which must be among the files.
            files: its folder, or copies of its files in memory, which must not change while they are offered.
        """
        self._wanted.append((version, index, files))

    def withdraw(self, version: int, index: str) -> None:
        """Offer it no more: its copies are about to go. Who reads them now may read on."""
        name = object_name(version, index)
        self._offers.pop(name, None)
        self.server.shelf.remove(name)

    def close(self) -> None:
        """Serve no more. Blocks for ``END_S`` at most."""
        self._closed.set()
        self._thread.join(END_S)
        self.server.close()
        self._control.close()

    def _run(self) -> None:
        said_at = 0.0
        while not self._closed.wait(LOOK_S):
            try:
                if self._wanted:
                    self._begin(*self._wanted.popleft())
                    said_at = 0.0
                if time.monotonic() - said_at > OFFER_EVERY_S:
                    said_at = time.monotonic()
                    self._say_all()
            except Exception as exc:  # whatever it was, the next version must be offered
                if not self._closed.is_set():
                    log.warning(
                        "weights over HTTP: %s", redact(str(exc) if isinstance(exc, PenstockError) else said(exc))
                    )

    def _begin(self, version: int, index: str, files: Path | Mapping[str, AnyBlob]) -> None:
        name = object_name(version, index)
        blobs = files_of(files) if isinstance(files, Path) else dict(files)
        try:
            offer = make_offer(
                blobs,
                url=self.server.url,
                version=version,
                index=index,
                range_bytes=self._range_bytes,
                stopped=self._closed.is_set,
            )
        except ProtocolError as exc:
            raise PublishError(str(exc)) from exc
        self.server.shelf.put(name, blobs)
        self._offers[name] = offer, files if isinstance(files, Path) else None
        for old in list(self._offers)[:-KEPT]:
            self._drop(old)

    def _say_all(self) -> None:
        for name, (offer, folder) in list(self._offers.items()):
            if folder is not None and not _is_there(folder):
                self._drop(name)
                continue
            self._control.call(relay_offer(self._keys, f"{self._model}:{name}", offer))

    def _drop(self, name: str) -> None:
        self._offers.pop(name, None)
        self.server.shelf.remove(name)


def _is_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return True  # a share that does not answer now may do so again
