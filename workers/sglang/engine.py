"""Client of one SGLang server: tokens with their logprobs and weight versions, and the controls of its weights.

The only module that knows SGLang's HTTP interface; tried on releases 0.5.17 to 0.5.23. Knows nothing of Redis.
"""

import asyncio
import itertools
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from penstock.config import EngineConfig, FaultsConfig, ModelConfig
from penstock.config.load import redact
from penstock.config.out_of_memory import engine_advice
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.errors import ConfigError, EngineDied, EngineError, EngineRefused, PublishError
from penstock.protocol.messages import LogprobKind, Publication
from penstock.weights.model_folder import read_config, read_eos_token_ids, read_vocab_size
from penstock.words import MAX_SAID, shown, writable
from workers.faults import FaultyPath
from workers.sglang import server as servers
from workers.sglang.args import check_arguments
from workers.sglang.external import check_external
from workers.sglang.logprob_kind import NUM_TOKENS, kind_of
from workers.sglang.logprob_kind import TEMPERATURE as PROBE_TEMPERATURE
from workers.sglang.provenance import Provenance
from workers.sglang.routed_experts import ASK, FLAG, Routing, Rows
from workers.sglang.routed_experts import NAME as ROUTED_EXPERTS
from workers.sglang.seeds import sample_seed
from workers.sglang.segment import (
    STALE_PREFIX,
    Drawn,
    Scores,
    Segment,
    all_finite,
    count_of,
    meta_of,
    read_drawn,
    read_scored,
)
from workers.sglang.server_info import ServerInfo, read_info
from workers.sglang.stream import (
    MARK,
    MAX_EVENT_BYTES,
    PROVEN,
    Answer,
    Heard,
    check_length,
    read_body,
    read_events,
    read_head,
)
from workers.weights.verify import Tensors, has_tied_embeddings, read_folder, verify_publication

#: Idle connections are dropped before the server (5 s) drops them: a POST on a dropped one cannot be sent again.
_KEEP_ALIVE_S = 3.0
_JSON = {"Content-Type": "application/json"}
_NO_FAULTS = FaultsConfig()
#: Tokens of one event where the stream proves versions.
_PROOF_TOKENS = 4
log = logging.getLogger(__name__)


class Engine:
    """One SGLang server, spawned or at a URL. All methods belong to one event loop.

    Args:
        config: where it is, or how to spawn it.
        model: folder of config, tokenizer and first weights.
        name: told in errors and in the name of the log.
        log_dir: a spawned server logs to ``engine-NAME.log`` in it.
        faults: what goes wrong on purpose with requests for tokens.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path, faults: FaultsConfig = _NO_FAULTS
    ) -> None:
        self.config = config
        self.model = model
        self.name = name
        self.log_dir = log_dir
        #: Address while it runs.
        self.url = (config.url or "").rstrip("/")
        #: Publication number of its weights; -1 when none was loaded.
        self.version = -1
        #: Revision of that publication.
        self.rev = 0
        #: Ranges (first, last) of versions that were abandoned before it: tokens of theirs are not gone on from (T1).
        self.abandoned: list[list[int]] = []
        #: What the server says about itself.
        self.info = ServerInfo()
        #: True while an external server does not answer.
        self.is_away = False
        #: scaled: logprobs are after temperature; original: before it. A spawned server is told which; a server at a
        #: URL is asked when it is met.
        self.logprob_kind: LogprobKind = config.logprob_kind or "scaled"
        #: False for one that answers only together with another (prefill, decode): it cannot be asked.
        self.answers_alone = True
        #: Answers so far that ended by an abort.
        self.num_aborted = 0
        #: Answers so far that were thrown away because their prefix KV was of older weights; they are drawn anew.
        self.num_stale_prefixes = 0
        #: Seed of the run. Where the server draws by seeds, each sample has one of its own, made of this and its id.
        self.seed = 0
        #: Whether weights may change under running requests; what is cached is then shared less where the server does
        #: not tell which weights a request began with.
        self.changes_in_place = True
        #: What the model routes, where answers are to tell it; None: they are not.
        self.routing: Routing | None = None
        #: True while its generation is frozen.
        self.paused = False
        #: True while it loads weights: its scheduler answers nobody then, so health is not checked.
        self.loading = False
        self._unwatched = 0
        #: Memory that it has given back: weights, cuda_graph, kv_cache. Health is not checked meanwhile.
        self.offloaded: set[str] = set()
        self._faults = faults
        self._faulty_path: FaultyPath | None = None
        #: Ids that end an answer of this model.
        self.eos_token_ids = read_eos_token_ids(model.path)
        #: Number of its ids; 0: unknown.
        self.vocab_size = read_vocab_size(model.path)
        self._namespace = ""
        self._newest = -1
        self._server: servers.Server | None = None
        self._session: aiohttp.ClientSession | None = None
        self._serial = itertools.count()
        self._client = secrets.token_hex(4)
        #: rid -> its requests on their way -> version at the sending of each.
        self._live: dict[str, dict[str, int]] = {}
        #: Request -> when (monotonic) it was sent, or tokens of it were heard last.
        self._heard: dict[str, float] = {}
        self._marking: asyncio.Task[None] | None = None
        #: True while the mark itself is on its way.
        self._is_marking = False
        self._reference: Tensors | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the spawned server's main process; None for an external one or none."""
        return self._server.pid if self._server and self._server.pid else None

    @property
    def num_running(self) -> int:
        """Requests for tokens sent and not answered."""
        return sum(map(len, self._live.values()))

    def silent(self, limit_s: float) -> list[tuple[str, float]]:
        """(name, seconds) of requests for tokens of which nothing was heard for ``limit_s``, longest first."""
        now = time.monotonic()
        late = [(wire_rid.rpartition(":")[0], now - at) for wire_rid, at in self._heard.items() if now - at >= limit_s]
        return sorted(late, key=lambda one: -one[1])

    async def start(self, publication: Publication | None = None) -> None:
        """Spawn the server (or probe the one at ``engine.url``) and wait until it serves.

        Args:
            publication: weights to start with; None: those of ``model.path``, as version -1.

        Raises:
            ConfigError: no environment, no model, no server at the URL, or one that is too old.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: it ended or did not answer in time; nothing is left running.
        """
        if publication is not None:
            await self.verify(publication)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=self.config.request_timeout_s, sock_connect=10)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        try:
            if self.config.url is None:
                await self._spawn(publication)
            await self._probe()
            if publication is not None and self.version != publication.version:
                await self._load_first(publication)
            if self._server is None:
                await self._learn_logprob_kind()
            if self._faults.any:
                self._faulty_path = FaultyPath(self._faults, None if self._server is None else self._kill)
                await self._faulty_path.up(self.url)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _load_first(self, publication: Publication) -> None:
        if self._server is not None:
            await self.load(publication)
            return
        # An external server may still work for a worker that is gone, or be frozen in the middle of its change.
        await self.pause()
        try:
            await self.load(publication)
        finally:
            await self.resume()

    async def _spawn(self, publication: Publication | None) -> None:
        first = publication if publication is not None and _is_model(publication.path) else None
        path, version = (first.path, first.version) if first else (None, -1)
        if not _is_model(self.model.path):
            raise ConfigError(
                f"model.path {self.model.path!r} is not a model: name a folder with config and tokenizer."
            )

        await asyncio.to_thread(check_arguments, self.config)

        def make() -> servers.Server:
            return servers.spawn(
                self.config, self.model, name=self.name, log_dir=self.log_dir, path=path, version=version
            )

        assert self._session is not None
        self._server = await servers.start(make, self._session, self.config.start_timeout_s)
        self._server.exit_reason()  # takes in the pid, where nobody has asked yet
        self.url = self._server.url
        self._set_version(version, first.rev if first else 0)
        self.abandoned = first.abandoned if first else []

    async def _probe(self) -> None:
        try:
            told = await self._ask("/server_info")
        except EngineError as exc:
            if self._server is None and not self.info.version:
                raise ConfigError(f"engine.url {self.url} does not answer as an SGLang server ({exc}).") from exc
            self.is_away = self._server is None
            raise
        self.is_away = False
        if self._server is None:
            served = await self._ask("/model_info")
            check_external(self.url, told, served, read_config(self.model.path))
        self.info = read_info(told, self.config.reports_spans)
        if self.routing is not None and not told.get(FLAG.replace("-", "_")):
            raise ConfigError(
                f"rollout.sides asks for {ROUTED_EXPERTS}, and engine {self.name} does not tell them: start it with "
                f"{FLAG}."
            )

    async def _learn_logprob_kind(self) -> None:
        """What a server that penstock did not start returns is looked at, whatever its shell was like (T6).

        Raises:
            ConfigError: it is not what ``engine.logprob_kind`` says.
            EngineError: it did not draw within ``engine.start_timeout_s``, or its answer cannot be read.
        """
        if not self.vocab_size or not self.answers_alone:
            return
        if self.version < 0:
            await self.resume()  # whoever used it before may have left it frozen
        sampling = {"temperature": PROBE_TEMPERATURE, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        rid = self._wire_rid("proof")
        body = {"input_ids": [0], "sampling_params": sampling, "rid": rid, "return_logprob": True}
        answer = await self._call("POST", "/generate", body, self.config.start_timeout_s)
        kind = kind_of(read_drawn(answer, rid).logprobs, self.vocab_size)
        if self.config.logprob_kind not in (None, kind):
            raise ConfigError(
                f"engine.logprob_kind is {self.config.logprob_kind}, and the server at {redact(self.url)} returns "
                f"{kind} ones: leave the key away to record these, or start the server with {ORIGINAL_LOGPROB}="
                f"{int(kind == 'scaled')}."
            )
        self.logprob_kind = kind

    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        """Draw tokens of nobody's, to see that it serves. Blocks until they are there.

        Raises:
            EngineDied: the connection was lost, or the server has other weights than were loaded.
            EngineError: it refused, or did not answer within ``timeout_s``.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            "rid": self._wire_rid("proof"),
        }
        answer = await self._call("POST", "/generate", body, timeout_s)
        self._provenance(self.version, "proof").check(meta_of(answer, "proof").get("weight_version"))

    async def stop(self) -> None:
        """End a spawned server with every process it made; requests still running raise EngineDied."""
        await self._end_marking()
        server, session, faulty_path = self._server, self._session, self._faulty_path
        self._server = self._session = self._faulty_path = None
        self.paused = False
        self.offloaded = set()
        self._set_version(-1)
        try:
            if server is not None:
                await server.stop()
        finally:
            if faulty_path is not None:
                await faulty_path.close()
            if session is not None:
                await session.close()

    def _kill(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def restart(self, publication: Publication | None) -> None:
        """Stop whatever is left of the server and start it with ``publication``; raises as :meth:`start`."""
        await self.stop()
        await self.start(publication)

    def _set_version(self, version: int, rev: int = 0) -> None:
        self.version, self.rev, self._newest = version, rev, version
        # Prefix KV is found by requests of the same load only: an in-place load leaves KV of two versions behind, and
        # the versions of another run on the same server mean other weights.
        self._namespace = f"{version}.{secrets.token_hex(4)}"

    async def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        *,
        rid: str,
        heard: Heard | None = None,
        interval: int = 1,
    ) -> Segment:
        """Draw tokens after ``input_ids``. Blocks until they are drawn, or :meth:`abort` ends it.

        Args:
            input_ids: [P] the whole sequence so far.
            sampling: SGLang's sampling parameters.
            rid: name for :meth:`abort`.
            heard: told of tokens while they are drawn, in portions of ``interval``; those of the last portion may not
                be told before the answer is there.

        Raises:
            EngineDied: the connection was lost, or the server has other weights than were loaded.
            EngineRefused: an id is not in the model's vocabulary, or the server refused the request.
            EngineError: an HTTP error, or an answer without ids, with other than one finite logprob per id, or
                with spans that do not cover it.
        """
        self._check_ids(input_ids, rid)
        wire_rid = self._wire_rid(rid)
        if self.info.deterministic:
            sampling = sampling | {"sampling_seed": sample_seed(sampling.get("sampling_seed", self.seed), rid)}
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": sampling,
            "rid": wire_rid,
            "return_logprob": True,
        }
        if self.routing is not None:
            body |= ASK
        if self.info.shares_prefixes:
            # Without spans nobody knows whether it waited in the server's queue while weights changed.
            alone = self.changes_in_place and not self.info.reports_spans
            body["extra_key"] = f"{self._namespace}.{wire_rid}" if alone else self._namespace
        sent = self.version
        live = self._live.setdefault(rid, {})
        live[wire_rid] = sent
        self._heard[wire_rid] = time.monotonic()
        if heard is None and self._proves_by_stream:
            heard, interval = _unheard, _PROOF_TOKENS
        try:
            if heard is None:
                answer = await self._call("POST", "/generate", body, timeout_s=self.config.request_timeout_s)
            else:
                body["sampling_params"] = sampling | {"stream_interval": interval}
                answer = await self._stream(body | {"stream": True}, sent, rid, heard)
        finally:
            live.pop(wire_rid, None)
            self._heard.pop(wire_rid, None)
            if not live:
                self._live.pop(rid, None)
        segment = self._segment(answer, sent, rid)
        check_length(len(segment.output_ids), _most_tokens(body), rid)
        return segment

    async def _stream(self, body: dict[str, Any], sent: int, rid: str, heard: Heard) -> dict[str, Any]:
        answer = Answer(rid, incremental=self.info.streams_increments, most=_most_tokens(body))
        async with self._request("POST", "/generate", body, self.config.request_timeout_s) as response:
            if response.status != 200:
                said = await read_head(response.content)
                raise _refusal(f"engine {self.name} answered /generate", response.status, said)
            async for event in read_events(response.content, self._most_bytes(body)):
                ids, logprobs = answer.add(event)
                self._heard[body["rid"]] = time.monotonic()
                if answer.is_finished:
                    continue
                self._provenance(sent, rid).check(answer.weight_version)
                if ids and all_finite(logprobs):
                    heard(sent, ids, logprobs)
        if not answer.is_finished:
            raise EngineDied(f"{rid}: the stream of engine {self.name} ended before the answer{self._how_it_ended()}.")
        return answer.whole()

    def _segment(self, answer: Any, sent: int, rid: str) -> Segment:
        drawn = read_drawn(answer, rid)
        meta = drawn.meta
        self.num_aborted += drawn.reason == "abort"
        provenance = self._provenance(sent, rid)
        versions, unproven = provenance.versions(meta, len(drawn.ids), answer.get(PROVEN) or [])
        if provenance.has_stale_prefix(meta):
            self.num_stale_prefixes += 1
            return Segment([], [], [], "abort", 0, 0, STALE_PREFIX)
        return Segment(
            output_ids=drawn.ids,
            logprobs=drawn.logprobs,
            versions=versions,
            finish_reason=drawn.reason,
            cached_tokens=count_of(meta, "cached_tokens", rid),
            prompt_tokens=count_of(meta, "prompt_tokens", rid),
            message=drawn.message,
            experts=self._experts(drawn, rid),
            unproven=unproven,
        )

    def _experts(self, drawn: Drawn, rid: str) -> Rows | None:
        """The routing of the whole sequence; a request that was aborted may have been before it ran."""
        told = drawn.meta.get(ROUTED_EXPERTS)
        if self.routing is None or (told is None and drawn.reason == "abort"):
            return None
        return self.routing.read(told, count_of(drawn.meta, "prompt_tokens", rid) + len(drawn.ids), rid)

    def _wire_rid(self, rid: str) -> str:
        """A name that no other request to the server ever has, of this client or of another.

        SGLang aborts whatever runs under the name of a stream two seconds after that has ended, and refuses a name that
        is taken: a worker that was started again asks for the samples of the one before. An abort matches by prefix:
        the terminator keeps j/1 from ending j/10.
        """
        return f"{rid}:{self._client}.{next(self._serial)};"

    def _check_ids(self, input_ids: list[int], rid: str) -> None:
        """The scheduler of SGLang dies of an id that is not in the vocabulary, with every request that it holds."""
        if input_ids and self.vocab_size and not 0 <= min(input_ids) <= max(input_ids) < self.vocab_size:
            wrong = next(token for token in input_ids if not 0 <= token < self.vocab_size)
            raise EngineRefused(
                f"{rid}: token {wrong} is not among the {self.vocab_size} ids of the model: its prompt was made with "
                "the tokenizer of another model."
            )

    def _provenance(self, sent: int, rid: str) -> Provenance:
        info = self.info
        return Provenance(rid, sent, self._newest, info.reports_spans, self.changes_in_place, info.window)

    async def abort(self, rid: str) -> None:
        """Ask for the end of the requests named ``rid``; they return with what they have. Returns at once."""
        for wire_rid in list(self._live.get(rid, ())):
            await self._call("POST", "/abort_request", {"rid": wire_rid})

    async def score(
        self, input_ids: list[int], start: int, *, rid: str = "score", with_routing: bool = False
    ) -> Scores:
        """Log-probabilities of given tokens from ``start`` on, at temperature 1. Blocks for one prefill.

        Args:
            with_routing: tell the experts too, where ``routing`` says that answers are to.

        Raises:
            EngineError: ``start`` is not in 1..L-1 (the first token has none), or the engine failed.
            EngineRefused: the engine can never score this (too long, for instance).
            EngineDied: the connection was lost, or the server has other weights than were loaded.
        """
        if not 0 < start < len(input_ids):
            raise EngineError(f"{rid}: start must be in 1..{len(input_ids) - 1}, not {start}.")
        self._check_ids(input_ids, rid)
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "rid": self._wire_rid(rid),
        }
        routing = self.routing if with_routing else None
        if routing is not None:
            body |= ASK
        if self.info.shares_prefixes:
            body["extra_key"] = self._namespace
        sent = self.version
        answer = await self._call("POST", "/generate", body, timeout_s=self.config.request_timeout_s)
        logprobs = read_scored(answer, input_ids, start, self.vocab_size, rid)
        if logprobs is None:
            return Scores([], None)
        meta = answer["meta_info"]
        reported = self._provenance(sent, rid).check(meta.get("weight_version"))
        proven = sent == self.version == (reported if sent >= 0 else -1)
        experts = None if routing is None else routing.read(meta.get(ROUTED_EXPERTS), len(input_ids), rid)
        return Scores(logprobs, sent if proven else None, experts)

    async def verify(self, publication: Publication, *, files: bool = True) -> None:
        """Raise PublishError unless the publication is whole and fits the model. Reads its files in a thread.

        Args:
            files: False for weights that will not come from the disk: then only their index is read.
        """
        folder = Path(self.model.path)
        if self._reference is None:
            self._reference = await asyncio.to_thread(read_folder, folder)
        await asyncio.to_thread(
            verify_publication, publication, self._reference, tied=has_tied_embeddings(folder), files=files
        )

    async def load(self, publication: Publication, receive: "Callable[[], Awaitable[bool]] | None" = None) -> float:
        """Load verified weights from disk; returns the seconds it took.

        Args:
            receive: brings the weights in another way; where it returns False they are loaded from disk after all.

        The server must be frozen, or without requests. Never lets the server flush its cache: with requests about
        (or the last answer just leaving) that ends its scheduler.

        Raises:
            PublishError: the engine refused; it goes on with the old weights.
            EngineDied: it died of it, or did not answer within ``load_timeout_s``.
        """
        body = {
            "model_path": _absolute(publication.path),
            "weight_version": str(publication.version),
            "flush_cache": False,
        }
        started = time.perf_counter()
        self._newest = publication.version
        self.loading = True
        try:
            received = receive is not None and await receive()
            if receive is not None and not received:
                await self.verify(publication)
            answer = (
                {"success": True}
                if received
                else await self.post("/update_weights_from_disk", body, timeout_s=self.config.load_timeout_s)
            )
        except PublishError as exc:
            raise EngineDied(f"the engine's weights are mixed and cannot be made whole; restart it: {exc}") from exc
        except EngineDied:
            raise
        except EngineError as exc:
            raise EngineDied(f"the engine failed to load version {publication.version}: {exc}") from exc
        finally:
            self.loading = False
        if not answer.get("success"):
            message = writable(str(answer.get("message", answer)), MAX_SAID)
            # Its roll-back reads the folder that just failed.
            if "rolling back" in message.lower():
                raise EngineDied(f"the engine's weights are mixed after a failed load; restart it: {message}")
            self._newest = self.version
            raise PublishError(f"the engine refused version {publication.version} and keeps {self.version}: {message}")
        self._set_version(publication.version, publication.rev)
        self.abandoned = publication.abandoned
        return time.perf_counter() - started

    async def pause(self) -> None:
        """Freeze generation where it stands; KV is kept."""
        await self._end_marking()
        self.paused = True
        await self._call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._call("POST", "/continue_generation", {})
        self.paused = False
        older = any(sent < self.version for live in self._live.values() for sent in live.values())
        if older and self._proves_by_stream:
            await self._end_marking()
            self._marking = asyncio.create_task(self._mark(self.version), name=f"mark version {self.version}")

    @property
    def _proves_by_stream(self) -> bool:
        """Whether weights change in place under a server that does not tell which of them drew a token."""
        return self.changes_in_place and not self.info.reports_spans and self.info.answers_in_turn

    async def _mark(self, version: int) -> None:
        """Have events say that tokens of weights before ``version`` are through (T6).

        A token of nobody's is asked for after the server was told to go on. Answers leave the server in turn, so once
        it is there, nothing that was drawn before the change is still inside, a step in flight included. From then on
        the server names its weights with a mark, and what comes behind a marked event was drawn under them. It needs
        no clock: whatever holds the stream back holds marks back too. Without one tokens stay with the older version.
        """
        try:
            await self.prove(self.config.request_timeout_s)
            self._is_marking = True
            body = {"new_version": f"{version}{MARK}", "abort_all_requests": False}
            await self._call("POST", "/update_weight_version", body)
        except EngineError as exc:
            log.info("tokens of running requests stay with the version before %d: %s", version, exc)
        finally:
            self._is_marking = False

    async def _end_marking(self) -> None:
        """No mark may arrive behind the next load: one that was sent is waited for, another one is given up."""
        marking, self._marking = self._marking, None
        if marking is None:
            return
        if not self._is_marking:
            marking.cancel()
        await asyncio.gather(marking, return_exceptions=True)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back to the GPU: ``weights`` (their contents are lost), ``kv_cache``, ``cuda_graph``.

        The server must be idle: it ends itself otherwise.
        """
        self.offloaded |= set(tags)
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)}, self.config.load_timeout_s)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again. Weights have to be loaded after it."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)}, self.config.load_timeout_s)
        self.offloaded -= set(tags)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False where something still runs, and nothing was done."""
        try:
            await self._call("POST", "/flush_cache", {}, is_json=False)
        except EngineRefused:
            return False
        return True

    async def checksum(self) -> str:
        """Checksum of the weights that it serves, for comparing engines with each other. Blocks its scheduler shortly.

        Raises:
            EngineError: it cannot (a server on CPU cannot).
        """
        answer = await self.post("/weights_checker", {"action": "checksum"}, timeout_s=self.config.load_timeout_s)
        if not answer.get("success"):
            raise EngineError(f"engine {self.name} has no checksum of its weights: {answer.get('message')}")
        return str(answer.get("per_engine_checksum", ""))

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """A control call whose answer says ``success`` and ``message``; 400 is such an answer too."""
        answer = await self._call("POST", path, body, timeout_s, ok=(200, 400))
        return answer if isinstance(answer, dict) else {}

    async def abort_all(self) -> None:
        """Ask for the end of every request; each returns with what it has. Returns at once."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def healthy(self) -> bool:
        """Whether its scheduler answers within ``health_timeout_s``; also true while it is frozen."""
        try:
            await self._call("GET", "/server_info", timeout_s=self.config.health_timeout_s)
        except EngineError:
            return False
        return True

    async def watch(self) -> str:
        """Wait until the engine is lost; returns why: its process ended, or it failed its health checks in a row.

        Does not check before ``health_first_wait_s``, while it loads weights, nor inside :meth:`unwatched`: these have
        limits of their own.
        """
        server = self._server
        died = asyncio.create_task(server.died()) if server else asyncio.create_task(asyncio.Event().wait())
        failures, wait_s = 0, max(self.config.health_first_wait_s, self.config.health_interval_s)
        try:
            while True:
                await asyncio.wait({died}, timeout=wait_s)
                wait_s = self.config.health_interval_s
                if died.done() and server:
                    return self.last_words()
                failures = 0 if self.is_busy or await self.healthy() or self.is_busy else failures + 1
                if failures >= self.config.health_failures:
                    return f"the engine at {self.url} failed {failures} health checks in a row"
        finally:
            died.cancel()

    @property
    def is_busy(self) -> bool:
        """Whether it may not answer for a reason of ours: no health check counts."""
        return self.loading or self._unwatched > 0 or bool(self.offloaded)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """No health checks inside the ``with``: for what a scheduler cannot answer meanwhile, and has its own limit."""
        self._unwatched += 1
        try:
            yield
        finally:
            self._unwatched -= 1

    def last_words(self) -> str:
        """How a spawned server ended, with the end of its log; '' while it runs, and for an external one."""
        server = self._server
        reason = server.exit_reason() if server else None
        if not server or not reason:
            return ""
        tail = server.log_tail()
        if advice := engine_advice(tail):
            return f"the engine process {reason}, because it {advice}; its log is {server.log}"
        return f"the engine process {reason}; the end of {server.log}:\n{tail}"

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        ok: Iterable[int] = (200,),
        is_json: bool = True,
    ) -> Any:
        """One request; returns the decoded answer."""
        async with self._request(method, path, body, timeout_s) as response:
            status = response.status
            if status in ok:
                answer = await read_body(response.content, self._most_bytes(body))
            else:
                answer = await read_head(response.content)
        if status not in ok:
            raise _refusal(f"engine {self.name} answered {path}", status, answer)
        try:
            return orjson.loads(answer) if answer and is_json else {}
        except orjson.JSONDecodeError as exc:
            raise EngineError(f"engine {self.name} answered {path} with what is not JSON: {answer[:200]!r}.") from exc

    async def _ask(self, path: str) -> dict[str, Any]:
        """What the server says about itself there. Raises EngineError where that is no map."""
        told = await self._call("GET", path, timeout_s=self.config.health_timeout_s)
        if not isinstance(told, dict):
            raise EngineError(f"engine {self.name} answered {path} with {shown(told)}, which is no map.")
        return told

    def _most_bytes(self, body: dict[str, Any] | None) -> int:
        """Most bytes of the answer to a request, or of one event of it."""
        if self.routing is None or body is None or "input_ids" not in body:
            return MAX_EVENT_BYTES
        return MAX_EVENT_BYTES + self.routing.wire_bytes(len(body["input_ids"]) + (_most_tokens(body) or 0))

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose body is still to be read; what goes wrong until its end is an error of ours."""
        session = self._session
        if session is None:
            raise EngineDied(f"engine {self.name} is not running.")
        limit = timeout_s if timeout_s is not None else self.config.health_timeout_s * self.config.health_failures
        data = orjson.dumps(body) if body is not None else None
        base = self._faulty_path.url if self._faulty_path is not None and path == "/generate" else self.url
        try:
            async with session.request(
                method, base + path, data=data, headers=_JSON, timeout=aiohttp.ClientTimeout(total=limit)
            ) as response:
                yield response
        except TimeoutError as exc:
            raise EngineError(f"engine {self.name} did not answer {path} within {limit:g} s.") from exc
        except (aiohttp.ClientError, ConnectionError) as exc:
            raise EngineDied(f"engine {self.name} was lost during {path} ({exc!r}){self._how_it_ended()}.") from exc

    def _how_it_ended(self) -> str:
        server = self._server
        reason = server.exit_reason() if server else None
        if not server or not reason:
            return ""
        advice = engine_advice(server.log_tail())
        return f"; its process {reason}" + (f", because it {advice}" if advice else "")


def _unheard(_: int, __: list[int], ___: list[float]) -> None:
    """What is drawn is read at its end."""


def _most_tokens(body: dict[str, Any]) -> int | None:
    most = body["sampling_params"].get("max_new_tokens")
    return None if most is None else int(most)


def _refusal(who: str, status: int, answer: bytes) -> EngineError:
    refused = EngineRefused if status == 400 else EngineError
    return refused(f"{who} with {status}: {answer[:500].decode(errors='replace')}")


def _absolute(path: str) -> str:
    # The server may have been started in another folder.
    return os.path.abspath(path)


def _is_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()
