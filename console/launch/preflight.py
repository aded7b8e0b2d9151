"""Check before a start what would fail later: every failure is a ConfigError, and leaves nothing behind."""

import contextlib
import logging
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from penstock.config import Config
from penstock.config.agents import AgentsConfig
from penstock.config.load import check_files
from penstock.config.reading.dataset_path import is_file, parse_path
from penstock.config.serving import ServingConfig, TlsConfig
from penstock.console.launch.placement import serves_agents
from penstock.console.launch.trainable import check_device, check_groups, check_hooks, check_rollouts, warn_of_unheeded
from penstock.errors import ConfigError, EngineError, PublishError
from penstock.hooks.user_imports import check_user_code
from penstock.model.pictures import place_id_of
from penstock.payloads.store import open_store
from penstock.protocol.staleness import definition_of
from penstock.redis.connect import connect
from penstock.system.disk import check_own
from penstock.system.extras import check_installed
from penstock.text import printable, redact
from penstock.weights.delta_store import DeltaStore
from penstock.weights.serving import client_context, server_context
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.frozen import check_ids
from penstock.workers.rewards.jail.detect import check_jail
from penstock.workers.rewards.kinds.registry import check_packages, needs_jail

_BUILD_IT = "run `penstock engine install` (SGLang on CPUs), or set engine.python or engine.url"
#: Longest wait for an interpreter, which answers within a second unless the machine is overloaded.
_ANSWER_S = 300
#: Most lines of prompts that are read here, and again by the producer, to fail early.
_READ_LINES = 100_000


log = logging.getLogger(__name__)


def check(config: Config, *, without: Collection[str] = ()) -> None:
    """Run all checks, cheap ones first, so that a wrong path fails at once.

    Packages, settings that cannot be trained, files, Redis; then the engine's environment, which takes seconds.

    Args:
        without: parts that are not started here; a custom trainer may do what the reference trainer cannot.
    """
    for _, step in steps(config, without=without):
        step()
    if "trainer" not in without:
        warn_of_unheeded(config)


def steps(
    config: Config, *, without: Collection[str] = (), claims: bool = True
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks of ``check``: a name, and a function that raises ConfigError or QueueUnavailable.

    Args:
        without: as of ``check``.
        claims: whether to create folders in which the trainer deletes, and mark them for the run, as its start does.
    """
    trains, works = "trainer" not in without, "worker" not in without
    yield "parts", lambda: _check_parts(config)
    yield "packages", lambda: check_extras(config, without)
    if runs_programs(config):
        yield "jail", lambda: check_jail(config.reward)
    yield "sampling", lambda: check_rollouts(config)
    if trains:
        yield "groups", lambda: check_groups(config)
        yield "hooks", lambda: check_hooks(config)
        yield "subscription", lambda: definition_of(config)
        yield "device", lambda: check_device(config)
    if serves_agents(config) and "gateway" not in without:
        yield "TLS of the gateway", lambda: check_tls(config.agents)
        yield "address of the gateway", lambda: check_listening("agents", config.agents)
    yield from steps_of_weights(config, claims=claims)
    if works and config.engine.url is None:
        yield "engine's interpreter", lambda: check_interpreter(config.engine.python)
    if config.prepare is None:
        yield "data and policy", lambda: check_data(config)
    else:
        script = config.prepare[0]
        yield "prepare", lambda: _check_prepare(script)
    if (url := config.redis.url) is not None:
        yield "redis", lambda: connect(url).close()
    for name, place in config.redis.payload_servers.items():
        yield f"payload server {name}", partial(_check_payloads, place)
    if config.prepare is None and config.rollout.scoring_models():
        yield "ids of the models that score", lambda: check_ids(config)
    if config.prepare is None:
        yield "code of the run", lambda: check_user_code(config)
    if works and config.engine.url is None:
        yield "engine", lambda: check_engine(config.engine.python)
        yield "engine.args", lambda: check_engine_arguments(config)


def _check_parts(config: Config) -> None:
    if config.debug.load_batches is not None:
        raise ConfigError(
            "debug.load_batches trains a recording, which needs no other part: use `penstock trainer`, or remove "
            "the key."
        )


def _check_prepare(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigError(f"prepare: there is no script {script}; correct the path, or remove the key.")


def _check_payloads(url: str) -> None:
    with contextlib.closing(open_store(url)) as store:
        store.check()


def check_extras(config: Config, without: Collection[str] = ()) -> None:
    """Raise ConfigError if a part needs a package that is not installed; parts in ``without`` do not count."""
    if "worker" not in without:
        check_installed("transformers", "a worker")
    if "trainer" not in without:
        for package in ("torch", "safetensors", "transformers"):
            check_installed(package, "the reference trainer")
        for name in config.trainer.report_to:
            check_installed(name, f"trainer.report_to {name}")
    if config.reward.pool.kind == "rq":
        check_installed("rq", "reward.pool.kind rq")
    check_packages(sorted(allowed_rewards(config)))


def runs_programs(config: Config) -> bool:
    """Return whether a reward of this configuration runs programs from answers."""
    return needs_jail(allowed_rewards(config))


def check_data(config: Config) -> int | None:
    """Raise ConfigError if prompts or the policy are missing, or a line of prompts cannot be read.

    Returns:
        Number of prompts to train on; None if they were not read.

    Files of more than 64 MiB or ``_READ_LINES`` together, and special files, are read by the producer only, which
    raises the same errors.
    """
    from penstock.producer.dataset import Dataset
    from penstock.producer.held_out import MAX_EARLY_BYTES, check_overlap, is_small
    from penstock.producer.prompt import Prompt, Template

    check_files(config)
    train, held_out = config.data.train, config.data.eval
    if not all(is_file(one.path) for one in (*train, *held_out)):
        return None  # it may be downloaded first, or run user code
    if sum(parse_path(one.path)[0].stat().st_size for one in (*train, *held_out)) > MAX_EARLY_BYTES:
        return None
    reads_images = place_id_of(config.model.path) is not None

    def look(dataset: Dataset, prompt: Prompt) -> None:
        if prompt.images and not reads_images:
            raise ConfigError(
                f"dataset {dataset.config.name} has images (line {prompt.index + 1}), and model.path "
                f"{config.model.path} reads none (its config.json names no image_token_id): name a model of the "
                "Qwen-VL kind, or other prompts."
            )

    # Rendering needs the model's tokenizer, which takes seconds to import; the producer checks it.
    renders = any(one.apply_chat_template for one in (*train, *held_out))
    template = Template(lambda messages, **_: str(messages)) if renders else None
    sets = [[Dataset(one, template) for one in some] for some in (train, held_out)]
    for dataset in (*sets[0], *sets[1]):
        if len(dataset) and not isinstance(first := dataset.take(0), str):
            look(dataset, first)
    if is_small([*sets[0], *sets[1]], _READ_LINES):
        check_overlap(sets[0], sets[1], look)
    return sum(map(len, sets[0]))


def check_interpreter(python: str) -> None:
    """Raise ConfigError if the interpreter does not exist."""
    if shutil.which(python) is None:
        raise ConfigError(f"engine.python: there is no interpreter {python}; {_BUILD_IT}.")


def check_engine(python: str) -> None:
    """Raise ConfigError if the interpreter does not exist or has no sglang. Blocks for a second."""
    check_interpreter(python)
    if _asked(python, "import importlib.util; print(importlib.util.find_spec('sglang') is not None)") != "True":
        raise ConfigError(f"engine.python: {python} has no sglang; {_BUILD_IT}.")


def _asked(python: str, program: str) -> str:
    """Return the output of a program in the engine's environment. Raises ConfigError if it does not run."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", program], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(
            f"engine.python: {python} did not answer within {_ANSWER_S} s: this machine may be overloaded or its disk "
            "slow; try again, or check that it starts from a shell."
        ) from exc
    except OSError as exc:
        raise ConfigError(f"engine.python: {python} does not run ({exc}); {_BUILD_IT}.") from exc
    return done.stdout.strip()


def check_engine_arguments(config: Config) -> None:
    """Raise ConfigError for ``engine.args`` that the installed SGLang does not accept. Blocks for seconds at first."""
    from penstock.workers.sglang.args import check_arguments

    check_arguments(config.engine)


def engine_version(config: Config) -> str:
    """Return the version of SGLang, from the engine's environment or the external server."""
    if config.engine.url is not None:
        return _served_version(config.engine.url)
    try:
        return _asked(config.engine.python, "import importlib.metadata as m; print(m.version('sglang'))") or "unknown"
    except ConfigError as exc:  # only a line of the summary
        log.warning("SGLang version unknown: %s", exc)
        return "unknown"


def check_url(url: str) -> None:
    """Raise ConfigError if no SGLang server answers at an address. Blocks for seconds."""
    from penstock.protocol.engine_http import fetch

    try:
        fetch(f"{url.rstrip('/')}/server_info", timeout_s=5)
    except EngineError as exc:
        raise ConfigError(
            f"engine.url {redact(url)} does not answer as an SGLang server ({redact(str(exc))}): start it, or correct "
            "the address."
        ) from exc


def _served_version(url: str) -> str:
    import json

    from penstock.protocol.engine_http import fetch

    try:
        info = json.loads(fetch(f"{url.rstrip('/')}/server_info", timeout_s=10))
    except (EngineError, ValueError, RecursionError) as exc:
        log.warning("%s does not say its version: %s", redact(url), redact(str(exc)))
        return "unknown"
    return str(info.get("version", "unknown")) if isinstance(info, dict) else "unknown"


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


def steps_of_weights(config: Config, *, claims: bool) -> Iterator[tuple[str, Callable[[], object]]]:
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
