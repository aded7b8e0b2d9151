"""Check before a start how weights will be transferred: addresses, ports, TLS, the delta store, folders."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from penstock.config import Config
from penstock.config.agents import AgentsConfig
from penstock.config.serving import ServingConfig, TlsConfig
from penstock.errors import ConfigError, PublishError
from penstock.system.disk import check_own
from penstock.text import printable, redact
from penstock.weights.delta_store import DeltaStore
from penstock.weights.serving import client_context, server_context

_STORE = "trainer.delta_store"
#: File that names the run whose trainer deletes in a folder; and the most characters of it that are read.
_MARKER, _MOST = ".penstock-run", 200


def check_ports(config: Config) -> None:
    """Raise ConfigError for one port shared by several parts that ``penstock run`` starts on this machine."""
    if config.metrics.port:
        raise ConfigError(
            f"metrics.port is {config.metrics.port}, and penstock run starts several parts on this machine, each with "
            "metrics of its own: set it to 0, and Prometheus finds them by targets.json in the run's folder."
        )


def steps(config: Config, *, claims: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks: a name, and a function that raises ConfigError.

    They block for a response of an object store, if one is used, and for name resolution.

    Args:
        claims: whether to create folders in which the trainer deletes, and mark them for the run, as its start does;
            else nothing is created.
    """
    if config.serving.enabled:
        yield "TLS of weights over HTTP", lambda: check_tls(config.serving)
        yield "address of weights over HTTP", lambda: check_listening("serving", config.serving)
    if config.trainer.transport == "delta":
        yield "delta store", lambda: _check_store(config.delta_store)
    yield "trainer.weights_dir", lambda: _check_weights_folder(config)
    for key, folder in _of_workers(config):
        yield key, partial(_check_workers_folder, key, folder)
    for key, folder in _owned(config):
        yield f"owner of {key}", partial(_check_owner, key, folder, config.run, claims=claims)


def check_tls(section: TlsConfig) -> None:
    """Raise ConfigError if the certificates of a section cannot be used. Reads files."""
    server_context(section)
    client_context(section)


def _of_workers(config: Config) -> Iterator[tuple[str, Path]]:
    if config.trainer.transport == "delta":
        yield "worker.copies_dir", config.copies_dir
    elif config.serving.enabled:
        yield "serving.folder", config.serving.folder or config.run_dir / "fetched"


def _owned(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield folders in which the trainer deletes, other than those below the run's own."""
    if (weights := config.trainer.weights_dir) is not None:
        yield "trainer.weights_dir", Path(weights)
    store = config.trainer.delta_store
    if config.trainer.transport == "delta" and store is not None and "://" not in store:
        yield _STORE, Path(store)


def _check_owner(key: str, folder: Path, run: str, *, claims: bool) -> None:
    marker = folder / _MARKER
    try:
        if claims:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), marker.open("x") as file:
                file.write(run)
        owner = marker.read_text(errors="replace")[:_MOST]
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ConfigError(f"{key} {folder} cannot be used ({exc.strerror}): name another folder.") from exc
    if owner != run:
        raise ConfigError(
            f"{key} {folder} is of run {printable(owner)}, which deletes there: name another folder, or remove "
            f"{_MARKER} in it if that run is over."
        )


def check_listening(section: str, config: ServingConfig | AgentsConfig) -> None:
    """Raise ConfigError if the address of a section cannot be listened on. Blocks for name resolution."""
    host, port = config.host, config.port
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen()
    except OSError as exc:
        if exc.errno in (socket.EAI_NONAME, None) or not port:
            what, then = f"{section}.host {host}", "give an address of this machine"
        else:
            what, then = f"{section}.host {host}, {section}.port {port}", "give another one, or 0 for a free one"
        raise ConfigError(f"{what} cannot be listened on ({exc.strerror}): {then}.") from exc


def _check_store(place: str) -> None:
    if "://" not in place:
        _check_folder(_STORE, Path(place))
        return
    try:
        DeltaStore(place).names()
    except PublishError as exc:
        scheme, said = place.partition("://")[0], redact(str(exc.__cause__ or exc))
        raise ConfigError(f"{_STORE} {scheme}:// does not list what it has: {said}.") from exc


def _check_folder(key: str, folder: Path) -> None:
    try:
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    except OSError as exc:
        raise ConfigError(f"{key} {folder} cannot be looked at ({exc.strerror}): name another folder.") from exc
    if not there.is_dir():
        raise ConfigError(f"{key} {folder} cannot be: {there} is a file: name a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        it = "it" if there == folder.absolute() else str(there)
        raise ConfigError(f"{key} {folder} cannot be written: {it} {_shut(there)}; name another folder.")


def _shut(folder: Path) -> str:
    """Return why a folder cannot be written."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "is on a disk that is read only"
    owner = folder.stat().st_uid
    return "has a mode that forbids it" if owner == os.geteuid() else f"belongs to another user (uid {owner})"


def _check_weights_folder(config: Config) -> None:
    own = config.run_dir / "weights"
    if config.trainer.weights_dir is not None:
        _check_folder("trainer.weights_dir", Path(config.trainer.weights_dir))
    elif os.access(config.run_dir, os.X_OK) and own.exists():  # another user may have made it in an earlier start
        _check_folder("trainer.weights_dir", own)


def _check_workers_folder(key: str, folder: Path) -> None:
    _check_folder(key, folder)
    if not folder.exists():
        return  # the start creates it, also below another user's folder
    try:
        check_own(folder)
    except OSError as exc:
        what = f"{folder} cannot be used ({exc.strerror}): name another folder" if exc.strerror else str(exc)
        raise ConfigError(f"{key} {what}.") from exc
