"""What one engine is asked for over SGLang's HTTP interface: tokens, scores, and the controls of its weights.

One server (``engine.py``), or several behind a router (``workers/router``), which answer to the same requests. Tried on
releases 0.5.17 to 0.5.23. Knows nothing of Redis.

Over 400 lines because requests and controls hold each other: what a request drew is known by the version at its
sending, by what was loaded meanwhile, and by the marks that a change of weights leaves in its stream.
"""

import asyncio
import itertools
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from penstock.config import EngineConfig, ModelConfig
from penstock.config.fleet import MemberConfig
from penstock.errors import EngineDied, EngineError, EngineRefused, PublishError
from penstock.protocol.presence import EnginePresence
from penstock.protocol.records.publication import Publication
from penstock.protocol.records.sample import FinishReason, LogprobKind
from penstock.weights.model_folder import read_eos_token_ids, read_vocab_size
from penstock.words import MAX_SAID, writable
from workers.engine import ROUTED_EXPERTS, Heard, Rows, Scores, Segment
from workers.sglang.http import EngineHttp
from workers.sglang.provenance import Provenance
from workers.sglang.routed_experts import ASK, Routing
from workers.sglang.seeds import sample_seed
from workers.sglang.segment import STALE_PREFIX, Drawn, all_finite, count_of, meta_of, read_drawn, read_scored
from workers.sglang.server_info import ServerInfo
from workers.sglang.stream import MARK, MAX_EVENT_BYTES, PROVEN, Answer, check_length, read_events, read_head
from workers.weights.verify import Tensors, has_tied_embeddings, read_folder, verify_publication

#: Tokens of one event where the stream proves versions.
_PROOF_TOKENS = 4
log = logging.getLogger(__name__)


class SglangClient(ABC):
    """Requests for tokens and controls of weights, wherever they go; what they promise is in workers/engine.py.

    Args:
        config: where it is, or how to spawn it.
        model: folder of config, tokenizer and first weights.
        name: used in errors and in the name of the log.
        log_dir: a spawned server logs to ``engine-NAME.log`` in it.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        self.config = config
        self.model = model
        self.name = name
        self.log_dir = log_dir
        #: Publication number of its weights; -1 when none was loaded.
        self.version = -1
        #: Revision of that publication.
        self.rev = 0
        #: Ranges (first, last) of versions that were abandoned before it: tokens of theirs are not continued (T1).
        self.abandoned: list[list[int]] = []
        #: What the server says about itself.
        self.info = ServerInfo()
        #: True while an external server does not answer.
        self.is_away = False
        #: scaled: logprobs are after temperature; original: before it. A spawned server is given it; a server at a
        #: URL is asked when it is met.
        self.logprob_kind: LogprobKind = config.logprob_kind or "scaled"
        #: Answers so far that ended by an abort.
        self.num_aborted = 0
        #: Answers so far that were thrown away because their prefix KV was of older weights; they are drawn again.
        self.num_stale_prefixes = 0
        #: Seed of the run. Where the server draws by seeds, each sample has one of its own, made of this and its id.
        self.seed = 0
        #: Whether weights may change under running requests; what is cached is then shared less where the server does
        #: not tell which weights a request began with.
        self.changes_in_place = True
        #: What the model routes, where answers are to say so; None: they are not.
        self.routing: Routing | None = None
        #: True while its generation is frozen.
        self.paused = False
        #: True while it loads weights: its scheduler answers nobody then, so health is not checked.
        self.loading = False
        #: Memory that it has given back: weights, cuda_graph, kv_cache. Health is not checked meanwhile.
        self.offloaded: set[str] = set()
        #: Ids that end an answer of this model.
        self.eos_token_ids = read_eos_token_ids(model.path)
        #: Number of its ids; 0: unknown.
        self.vocab_size = read_vocab_size(model.path)
        self.http = EngineHttp(name, config, most_bytes=self._most_bytes, ended=self._how_it_ended)
        self.http.url = (config.url or "").rstrip("/")
        self._unwatched = 0
        self._namespace = ""
        #: Version that it is loading, or loaded last: what is drawn meanwhile may be of it already.
        self.newest = -1
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
    def url(self) -> str:
        """Address while it runs."""
        return self.http.url

    @property
    def pid(self) -> int | None:
        """Pid of a process of ours that serves; None where there is none."""
        return None

    @property
    def tells_routing(self) -> bool:
        """Whether answers say which experts saw each token."""
        return self.routing is not None

    def describe(self) -> list[EnginePresence]:
        """Its servers with their states, for presence; [] of one that is a single server."""
        return []

    def set_members(self, members: Sequence[MemberConfig]) -> None:
        """Say which servers it stands for; for several behind a router."""
        raise EngineError(f"engine {self.name} is one server and has no members: set engine.router.")

    def last_words(self) -> str:
        """How its process ended, with the end of its log; '' while it runs, and where it is not ours."""
        return ""

    @abstractmethod
    async def watch(self) -> str: ...

    @abstractmethod
    async def start(self, publication: Publication | None = None) -> None: ...

    async def stop(self) -> None:
        """End what was started; requests still running return as aborted or raise EngineDied."""
        await self._end_marking()
        session = self._detach()
        if session is not None:
            await session.close()

    def _detach(self) -> aiohttp.ClientSession | None:
        """It is down from now on; its session is for the caller to close."""
        self.paused = False
        self.offloaded = set()
        self._set_version(-1)
        return self.http.detach()

    async def restart(self, publication: Publication | None) -> None:
        """Stop whatever is left of it and start it with ``publication``; raises as :meth:`start`."""
        await self.stop()
        await self.start(publication)

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        ok: Iterable[int] = (200,),
        is_json: bool = True,
    ) -> Any:
        """See :meth:`EngineHttp.call`."""
        return await self.http.call(method, path, body, timeout_s, ok=ok, is_json=is_json)

    def _how_it_ended(self) -> str:
        """How its process ended, as the end of a sentence."""
        return ""

    @property
    def num_running(self) -> int:
        """Requests for tokens sent and not answered."""
        return sum(map(len, self._live.values()))

    def silent(self, limit_s: float) -> list[tuple[str, float]]:
        """(name, seconds) of requests for tokens of which nothing was heard for ``limit_s``, longest first."""
        now = time.monotonic()
        late = [(wire_rid.rpartition(":")[0], now - at) for wire_rid, at in self._heard.items() if now - at >= limit_s]
        return sorted(late, key=lambda one: -one[1])

    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        """Draw tokens that belong to no sample, to see that it serves. Blocks until they are there.

        Raises:
            EngineDied: the connection was lost, or the server has other weights than were loaded.
            EngineError: it refused, or did not answer within ``timeout_s``.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            "rid": self._wire_rid("proof"),
        }
        answer = await self.call("POST", "/generate", body, timeout_s)
        self._provenance(self.version, "proof").check(meta_of(answer, "proof").get("weight_version"))

    def _set_version(self, version: int, rev: int = 0) -> None:
        self.version, self.rev, self.newest = version, rev, version
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
        """As the Protocol says.

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
                answer = await self.call("POST", "/generate", body, timeout_s=self.config.request_timeout_s)
            else:
                body["sampling_params"] = sampling | {"stream_interval": interval}
                answer = await self._stream(body | {"stream": True}, sent, rid, heard)
        finally:
            live.pop(wire_rid, None)
            self._heard.pop(wire_rid, None)
            if not live:
                self._live.pop(rid, None)
        segment = self.segment_of(answer, sent, rid)
        check_length(len(segment.output_ids), _most_tokens(body), rid)
        return segment

    async def _stream(self, body: dict[str, Any], sent: int, rid: str, heard: Heard) -> dict[str, Any]:
        answer = Answer(rid, incremental=self.info.streams_increments, most=_most_tokens(body))
        async with self.http.request("POST", "/generate", body, self.config.request_timeout_s) as response:
            if response.status != 200:
                raise self.http.refusal("/generate", response.status, await read_head(response.content))
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

    def segment_of(self, answer: Any, sent: int, rid: str) -> Segment:
        drawn = read_drawn(answer, rid)
        meta = drawn.meta
        self.num_aborted += drawn.reason == FinishReason.ABORT
        provenance = self._provenance(sent, rid)
        versions, unproven = provenance.versions(meta, len(drawn.ids), answer.get(PROVEN) or [])
        if provenance.has_stale_prefix(meta):
            self.num_stale_prefixes += 1
            return Segment([], [], [], FinishReason.ABORT, 0, 0, STALE_PREFIX)
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
        if self.routing is None or (told is None and drawn.reason == FinishReason.ABORT):
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
        return Provenance(rid, sent, self.newest, info.reports_spans, self.changes_in_place, info.window)

    async def abort(self, rid: str) -> None:
        """Ask for the end of the requests named ``rid``; they return with what they have. Returns at once."""
        for wire_rid in list(self._live.get(rid, ())):
            await self.call("POST", "/abort_request", {"rid": wire_rid})

    async def score(
        self, input_ids: list[int], start: int, *, rid: str = "score", with_routing: bool = False
    ) -> Scores:
        """Log-probabilities of given tokens from ``start`` on, at temperature 1. Blocks for one prefill.

        Args:
            with_routing: ask for the experts too, where ``routing`` says that answers hold them.

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
        answer = await self.call("POST", "/generate", body, timeout_s=self.config.request_timeout_s)
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
        self.newest = publication.version
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
            self.newest = self.version
            raise PublishError(f"the engine refused version {publication.version} and keeps {self.version}: {message}")
        self._set_version(publication.version, publication.rev)
        self.abandoned = publication.abandoned
        return time.perf_counter() - started

    async def pause(self) -> None:
        """Freeze generation where it stands; KV is kept."""
        await self._end_marking()
        self.paused = True
        await self.call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self.call("POST", "/continue_generation", {})
        self.paused = False
        older = any(sent < self.version for live in self._live.values() for sent in live.values())
        if older and self._proves_by_stream:
            await self._end_marking()
            self._marking = asyncio.create_task(self._mark(self.version), name=f"mark version {self.version}")

    @property
    def _proves_by_stream(self) -> bool:
        """Whether weights change in place under a server that does not say which of them drew a token."""
        return self.changes_in_place and not self.info.reports_spans and self.info.answers_in_turn

    async def _mark(self, version: int) -> None:
        """Have events say that tokens of weights before ``version`` are through (T6).

        A token that belongs to no sample is asked for after the server was told to continue. Answers leave the server
        in turn, so once it is there, nothing that was drawn before the change is still inside, a step in flight
        included. From then on the server names its weights with a mark, and what comes after a marked event was drawn
        under them. It needs no clock: whatever holds the stream back holds marks back too. Without one tokens stay
        with the older version.
        """
        try:
            await self.prove(self.config.request_timeout_s)
            self._is_marking = True
            body = {"new_version": f"{version}{MARK}", "abort_all_requests": False}
            await self.call("POST", "/update_weight_version", body)
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
        await self.call("POST", "/release_memory_occupation", {"tags": list(tags)}, self.config.load_timeout_s)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again. Weights have to be loaded after it."""
        await self.call("POST", "/resume_memory_occupation", {"tags": list(tags)}, self.config.load_timeout_s)
        self.offloaded -= set(tags)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False where something still runs, and nothing was done."""
        try:
            await self.call("POST", "/flush_cache", {}, is_json=False)
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
        answer = await self.call("POST", path, body, timeout_s, ok=(200, 400))
        return answer if isinstance(answer, dict) else {}

    async def abort_all(self) -> None:
        """Ask for the end of every request; each returns with what it has. Returns at once."""
        await self.call("POST", "/abort_request", {"abort_all": True})

    async def healthy(self) -> bool:
        """Whether its scheduler answers within ``health_timeout_s``; also true while it is frozen."""
        try:
            await self.call("GET", "/server_info", timeout_s=self.config.health_timeout_s)
        except EngineError:
            return False
        return True

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

    def _most_bytes(self, body: dict[str, Any] | None) -> int:
        """Most bytes of the answer to a request, or of one event of it."""
        if self.routing is None or body is None or "input_ids" not in body:
            return MAX_EVENT_BYTES
        return MAX_EVENT_BYTES + self.routing.wire_bytes(len(body["input_ids"]) + (_most_tokens(body) or 0))


def _unheard(_: int, __: list[int], ___: list[float]) -> None:
    """What is drawn is read at its end."""


def _most_tokens(body: dict[str, Any]) -> int | None:
    most = body["sampling_params"].get("max_new_tokens")
    return None if most is None else int(most)


def _absolute(path: str) -> str:
    # The server may have been started in another folder.
    return os.path.abspath(path)
