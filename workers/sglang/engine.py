"""Start, check and stop one SGLang server, spawned or external."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, ModelConfig
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.errors import ConfigError, EngineError
from penstock.model.folder import read_config
from penstock.names import ROUTED_EXPERTS
from penstock.records.publication import Publication
from penstock.records.sample import LogprobKind
from penstock.records.worker_causes import EngineStarting
from penstock.system.out_of_memory import engine_advice
from penstock.text import redact, safe_repr
from penstock.workers.sglang import server as servers
from penstock.workers.sglang.args import check_arguments, refuse_hiding
from penstock.workers.sglang.client import SglangClient
from penstock.workers.sglang.routed_experts import FLAG
from penstock.workers.sglang.segment import read_generated
from penstock.workers.sglang.server_info import read_info

#: Temperature far above any spread of logits, at which scaled logits differ by less than 0.1.
TEMPERATURE = 1000.0
#: Number of tokens to compare.
NUM_TOKENS = 16
#: Largest difference between a scaled logprob and the uniform distribution's.
TOLERANCE = 0.5


def kind_of(logprobs: Sequence[float], vocab_size: int) -> LogprobKind:
    """Detect whether ``logprobs`` [T] of tokens sampled at ``TEMPERATURE`` are scaled by the temperature or original.

    Servers do not report the kind. At this temperature sampling is uniform over the vocabulary, and so are scaled
    logprobs. Original logprobs are uniform only if the model is, in which case both kinds hardly differ.
    """
    uniform = -math.log(vocab_size)
    return "scaled" if all(abs(logprob - uniform) < TOLERANCE for logprob in logprobs) else "original"


def check_external(url: str, info: Mapping[str, Any], served: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse an external server with another model or incompatible options.

    Host, devices, paths and parallelism may differ from the worker's.

    Args:
        info: answer of /server_info.
        served: answer of /model_info.
        model: config.json of ``model.path``.

    Raises:
        ConfigError: the server cannot serve this run.
    """
    server = f"engine.url {redact(url)}"
    ours, theirs = (set(map(str, one.get("architectures") or ())) for one in (model, served))
    if ours and theirs and not ours & theirs:
        raise ConfigError(
            f"{server} serves {', '.join(sorted(theirs))} from {served.get('model_path')}, but model.path has "
            f"{', '.join(sorted(ours))}: set model.path to the served model."
        )
    if served.get("is_generation") is False:
        raise ConfigError(f"{server} serves a model that does not generate: start it without is-embedding.")
    for name, why in _MUST_BE_OFF.items():
        if info.get(name) or served.get(name):
            raise ConfigError(f"{server} has {name.replace('_', '-')} enabled {why}: start it without this argument.")
    refuse_hiding(server, info)


_MUST_BE_OFF = {
    "skip_tokenizer_init": "and cannot see stop strings",
    "allow_auto_truncate": "and would answer truncated prompts",
    "preferred_sampling_params": "and would not sample as requested",
}


class SglangEngine(SglangClient):
    """Run one SGLang server. Not thread-safe.

    Args:
        answers_alone: False for a server that needs another one (prefill, decode) and is not probed.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        name: str,
        log_dir: Path,
        answers_alone: bool = True,
    ) -> None:
        super().__init__(config, model, name=name, log_dir=log_dir)
        self.answers_alone = answers_alone
        self._server: servers.Server | None = None
        #: Server that is starting.
        self._starting: servers.Server | None = None

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server and self._server.pid else None

    async def start(self, publication: Publication | None = None) -> None:
        """Spawn the server, or probe the external one, and wait until it serves.

        Args:
            publication: initial weights; None: the weights in ``model.path``, as version -1.

        Raises:
            ConfigError: the environment, the model or the server is missing, or the server is too old.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: the server exited or timed out; no process is left running.
        """
        if publication is not None:
            await self.verify(publication)
        self.http.open()
        try:
            if self.config.url is None:
                await self._spawn(publication)
            await self.probe()
            if publication is not None and self.version != publication.version:
                await self.load_first(publication)
            if self._server is None:
                await self._detect_logprob_kind()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def load_first(self, publication: Publication) -> None:
        if self._server is not None:
            await self.load(publication)
            return
        # An external server may still run requests of a previous worker, or be frozen by its update.
        await self.pause()
        try:
            await self.load(publication)
        finally:
            await self.resume()

    async def _spawn(self, publication: Publication | None) -> None:
        first = publication if publication is not None and _is_model(publication.path) else None
        path, version = (first.path, first.version) if first else (None, -1)
        if not _is_model(self.model.path):
            raise ConfigError(f"model.path {self.model.path!r} is not a model: set a folder with config and tokenizer.")

        await asyncio.to_thread(check_arguments, self.config)

        def make() -> servers.Server:
            self._starting = servers.spawn(
                self.config, self.model, name=self.name, log_dir=self.log_dir, path=path, version=version
            )
            return self._starting

        try:
            self._server = await servers.start(make, self.http.session, self.config.start_timeout_s)
        finally:
            self._starting = None
        self._server.exit_reason()  # reads the pid
        self.http.url = self._server.url
        self._set_version(version, first.rev if first else 0)
        self.abandoned = first.abandoned if first else []

    def phase(self) -> EngineStarting:
        starting = self._starting
        return EngineStarting() if starting is None else starting.phase()

    async def probe(self) -> None:
        try:
            answer = await self._get_map("/server_info")
        except EngineError as exc:
            if self._server is None and not self.info.version:
                raise ConfigError(
                    f"engine.url {self.url} does not answer like an SGLang server ({exc}): start one there, or correct "
                    "the address."
                ) from exc
            self.is_away = self._server is None
            raise
        self.is_away = False
        if self._server is None:
            served = await self._get_map("/model_info")
            check_external(self.url, answer, served, read_config(self.model.path))
        self.info = read_info(answer)
        if self.routing is not None and not answer.get(FLAG.replace("-", "_")):
            raise ConfigError(
                f"rollout.sides has {ROUTED_EXPERTS}, but engine {self.name} does not return them: start it with "
                f"{FLAG}."
            )

    async def _detect_logprob_kind(self) -> None:
        """Detect the kind of logprobs of an external server, which depends on its environment (T6).

        Raises:
            ConfigError: the kind differs from ``engine.logprob_kind``.
            EngineError: the server timed out (``engine.start_timeout_s``), or its answer is malformed.
        """
        if not self.vocab_size or not self.answers_alone:
            return
        if self.version < 0:
            await self.resume()  # a previous worker may have left it frozen
        sampling = {"temperature": TEMPERATURE, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        rid = self.in_flight.wire_rid("proof")
        body = {"input_ids": [0], "sampling_params": sampling, "rid": rid, "return_logprob": True}
        answer = await self.call("POST", "/generate", body, self.config.start_timeout_s)
        kind = kind_of(read_generated(answer, rid, self.vocab_size).logprobs, self.vocab_size)
        if self.config.logprob_kind not in (None, kind):
            raise ConfigError(
                f"engine.logprob_kind is {self.config.logprob_kind}, but the server at {redact(self.url)} returns "
                f"{kind} logprobs: remove the key, or start the server with {ORIGINAL_LOGPROB}="
                f"{int(kind == 'scaled')}."
            )
        self.logprob_kind = kind

    async def stop(self) -> None:
        """Stop a spawned server with all its processes; running requests raise EngineDied."""
        server, sessions = self._server, self._detach()
        self._server = None
        try:
            if server is not None:
                await server.stop()
        finally:
            if sessions is not None:
                await sessions.close()

    async def watch(self) -> str:
        """Wait until the engine's process exits or consecutive health checks fail; return the reason.

        Checks are suspended during weight loads and inside :meth:`unwatched`, which have their own time limits.
        """
        server = self._server
        died = asyncio.create_task(server.died()) if server else asyncio.create_task(asyncio.Event().wait())
        failures = 0
        try:
            while True:
                await asyncio.wait({died}, timeout=self.config.health_interval_s)
                if died.done() and server:
                    return self.last_words()
                failures = 0 if self.is_busy or await self.healthy() or self.is_busy else failures + 1
                if failures >= self.config.health_failures:
                    return self.last_words() or f"the engine at {self.url} failed {failures} consecutive health checks"
        finally:
            died.cancel()

    def last_words(self) -> str:
        """Return how a spawned server exited, with the end of its log; '' while it runs, or if it is external."""
        server = self._server
        reason = server.exit_reason() if server else None
        if not server or not reason:
            return ""
        tail = server.log_tail()
        if advice := engine_advice(tail):
            return f"the engine process {reason}, because it {advice}; its log is {server.log}"
        return f"the engine process {reason}; the end of {server.log}:\n{tail}"

    async def _get_map(self, path: str) -> dict[str, Any]:
        """GET a map from ``path``. Raises EngineError if the answer is not a map."""
        answer = await self.call("GET", path, timeout_s=self.config.health_timeout_s)
        if not isinstance(answer, dict):
            raise EngineError(f"engine {self.name} answered {path} with {safe_repr(answer)} instead of a map.")
        return answer

    def _how_it_ended(self) -> str:
        server = self._server
        reason = server.exit_reason() if server else None
        if not server or not reason:
            return ""
        advice = engine_advice(server.log_tail())
        return f"; its process {reason}" + (f", because it {advice}" if advice else "")


def _is_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()
