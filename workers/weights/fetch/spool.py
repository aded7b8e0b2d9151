"""Present anchors and deltas that are offered over HTTP as an object store: fetch each group, and serve it to others.

FOLDER/GROUP/            a fetched group, verified range by range
FOLDER/.fetching-GROUP/  a fetch in progress, which the next fetch of the group resumes
"""

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from penstock.errors import PenstockError, PublishError
from penstock.system.disk import own_folder
from penstock.weights.deltas.chains import MARKER
from penstock.workers.weights.fetch.fetcher import Fetcher

T = TypeVar("T")
#: Interval at which a waiting thread checks whether its worker stops.
_LOOK_S = 0.1


class Spool:
    """Implement ``Objects`` on the relay's offers. Calls block.

    Args:
        folder: created if missing; only the caller of ``near`` uses it, and may delete anything in it.
        stopped: called often; True aborts a call with PublishError.
    """

    def __init__(self, fetcher: Fetcher, folder: Path, stopped: Callable[[], bool]) -> None:
        self._fetcher, self._folder, self._stopped = fetcher, folder, stopped

    def names(self) -> list[str]:
        """Return the marker of each offered group; its other names are known after the fetch."""
        try:
            return [f"{group}/{MARKER}" for group in self._await(self._fetcher.names(), self._stopped)]
        except PublishError:
            raise
        except PenstockError as exc:
            raise OSError(str(exc)) from exc

    def is_superseded(self, version: int) -> bool:
        """Return whether a newer version was announced, so that this one is not needed."""
        try:
            return self._await(self._fetcher.is_superseded(version), self._stopped)
        except PublishError:
            raise
        except PenstockError:
            return False

    def near(self, group: str, room: Callable[[int], None], stopped: Callable[[], bool]) -> Path | None:
        own_folder(self._folder)
        try:
            return self._await(self._fetcher.bring(group, self._folder, room), stopped)
        except PublishError:
            raise
        except PenstockError as exc:
            raise PublishError(str(exc)) from exc

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def open_range(self, name: str, start: int, end: int) -> BinaryIO:
        file = (self._folder / name).open("rb")
        file.seek(start)
        return file

    @staticmethod
    def _await(coming: "concurrent.futures.Future[T]", stopped: Callable[[], bool]) -> T:
        while not stopped() and not coming.cancelled():
            done, _ = concurrent.futures.wait([coming], timeout=_LOOK_S)
            if done and not coming.cancelled():
                return coming.result()
        coming.cancel()
        raise PublishError("nothing more is fetched over HTTP: this worker stops.")
