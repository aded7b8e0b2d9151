"""The interface of an engine to a worker: tokens and scores, and control of its weights.

One SGLang server (``workers/sglang/engine.py``), or several behind a router (``workers/router/engine.py``). Jobs,
weights and the worker itself use only this interface.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from penstock.config import EngineConfig, ModelConfig
from penstock.config.fleet import MemberConfig
from penstock.errors import EngineError, PublishError
from penstock.model.folder import read_eos_token_ids, read_vocab_size
from penstock.model.pictures import Images
from penstock.protocol.presence import EnginePresence
from penstock.records.publication import Publication
from penstock.records.sample import LogprobKind
from penstock.records.worker_causes import EngineStarting

#: Interval of aborts: one that overtakes its request has no effect, so it is repeated until every request has returned.
ABORT_AGAIN_S = 0.05
#: Expert indices, by position, layer and rank among the chosen.
Rows = NDArray[Any]
#: Called with newly generated tokens: version when the request was sent, ids, logprobs.
Heard = Callable[[int, list[int], list[float]], None]
#: Receives weights other than from a folder into a frozen engine. Raises NotBegun, Partial, and EngineDied.
Receive = Callable[[], Awaitable[None]]


class NotBegun(PublishError):
    """Weights were not sent to this engine, which is unchanged."""


class Partial(PublishError):
    """Weights were sent in part: the engine's are mixed, and it generates nothing until it loads a folder."""


class Drafts(NamedTuple):
    """Counts of speculative decoding for one answer."""

    #: Times that the model checked a draft.
    checks: int
    #: Drafted tokens, and those that it accepted.
    drafted: int
    right: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The answer of the engine to one request."""

    #: [T] as returned; a generated eos is the last one.
    output_ids: list[int]
    #: [T] log-probability of each.
    logprobs: list[float]
    #: [T] weight version of each; the older one if it cannot be proven (T6).
    versions: list[int]
    #: stop | length | abort
    finish_reason: str
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_tokens: int
    #: 0 if the request was aborted before it started.
    prompt_tokens: int
    #: Why it was aborted.
    message: str = ""
    #: [P + T - 1, layers, top_k] experts of every position except the last, if requested; else None.
    experts: Rows | None = field(default=None, compare=False)
    #: [T] True for tokens that a newer version may have generated; empty: none.
    unproven: list[bool] = field(default_factory=list)
    #: None without speculative decoding.
    drafts: Drafts | None = None
    #: Generated tokens that were discarded: their prefix was of older weights.
    num_thrown: int = 0
    #: The answer to this request, or to an earlier one that this replaces, was lost on its way: the number of tokens
    #: generated for it is unknown.
    is_unheard: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens."""

    #: [L - start] of each token given those before it, at temperature 1.
    logprobs: list[float]
    #: Version of the weights; -1: the initial ones. None: it was aborted, or weights changed meanwhile.
    version: int | None
    #: [L - 1, layers, top_k] experts of every position except the last, if requested.
    experts: Rows | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a running engine; the defaults are those before it was queried."""

    #: Its release.
    version: str = ""
    #: Most tokens of prompt and answer together.
    max_context: int = sys.maxsize
    #: Processes that hold its weights, if they can be sent without the disk; else 0.
    num_ranks: int = 0
    #: Whether it can release memory while it runs.
    saves_memory: bool = False


class Engine(ABC):
    """All methods belong to one event loop. Errors are those of penstock/errors.py, EngineError and below.

    EngineDied means that it is lost: all its requests raise the same error, and it must be started again.

    Args:
        config: its address, or how to spawn it.
        model: folder of config, tokenizer and initial weights.
        name: used in errors.
    """

    #: Its properties.
    info: EngineInfo

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str) -> None:
        self.config = config
        self.model = model
        self.name = name
        #: Publication number of its weights; -1 if none was loaded.
        self.version = -1
        #: Revision of that publication.
        self.rev = 0
        #: Ranges (first, last) of abandoned versions: their tokens are not continued (T1).
        self.abandoned: list[list[int]] = []
        #: scaled: logprobs are after temperature; original: before it.
        self.logprob_kind: LogprobKind = config.logprob_kind or "scaled"
        #: True while an external engine does not respond.
        self.is_away = False
        #: True while its generation is frozen.
        self.paused = False
        #: True while it receives weights other than from a folder: they may be partly new.
        self.is_receiving = False
        #: Memory it has released: weights, cuda_graph, kv_cache. Health is not checked meanwhile.
        self.offloaded: set[str] = set()
        #: Number of aborted answers.
        self.num_aborted = 0
        #: Number of answers discarded because their prefix KV was of older weights; they are generated again.
        self.num_stale_prefixes = 0
        #: Ids that end an answer of this model.
        self.eos_token_ids = read_eos_token_ids(model.path)
        #: Size of the vocabulary; 0: unknown.
        self.vocab_size = read_vocab_size(model.path)
        #: Seed of the run; each sample has its own, derived from it and its id, if the engine samples by seeds.
        self.seed = 0
        #: Whether weights may change during requests.
        self.changes_in_place = True

    @property
    @abstractmethod
    def url(self) -> str:
        """Address while it runs."""

    @property
    def pid(self) -> int | None:
        """Pid of its main process; None if it is external."""
        return None

    @property
    @abstractmethod
    def tells_routing(self) -> bool:
        """Whether answers include the expert routing of each token."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests for tokens that were sent and not answered."""

    @abstractmethod
    def silent(self) -> list[tuple[str, float]]:
        """Return (name, seconds) of requests for tokens that were silent for 10 s, longest first, and are older than
        three times the expected duration of an answer of all their tokens."""

    def describe(self) -> list[EnginePresence]:
        """Return its servers with their states, for presence; [] if it is a single server."""
        return []

    def set_members(self, members: Sequence[MemberConfig]) -> None:
        """Set the member servers of an engine behind a router (``engine.router``). Returns at once."""
        raise EngineError(f"engine {self.name} is one server and has no members: set engine.router.")

    def phase(self) -> EngineStarting:
        """Return the phase of its start, if that is known. Blocks to read its log."""
        return EngineStarting()

    @abstractmethod
    async def start(self, publication: Publication | None = None) -> None:
        """Start it, and wait until it serves.

        Args:
            publication: initial weights; None: those of ``model.path``, as version -1.

        Raises:
            ConfigError: its configuration is invalid.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: it ended or did not answer in time; nothing is left running.
        """

    async def restart(self, publication: Publication | None) -> None:
        """Stop what is left of it and start it with ``publication``; raises as :meth:`start`."""
        await self.stop()
        await self.start(publication)

    @abstractmethod
    async def stop(self) -> None:
        """Stop what was started; running requests return as aborted or raise EngineDied."""

    @abstractmethod
    async def watch(self) -> str:
        """Wait until it is lost; return why."""

    def last_words(self) -> str:
        """Return how it ended, with the end of its log; '' while it runs, or if unknown."""
        return ""

    @abstractmethod
    def unwatched(self) -> AbstractContextManager[None]:
        """Suspend health checks inside the ``with``, for calls that block it and have their own limit."""

    @abstractmethod
    async def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        *,
        rid: str,
        heard: Heard | None = None,
        interval: int = 1,
        images: Images | None = None,
    ) -> Segment:
        """Generate tokens after ``input_ids``. Blocks until they are complete, or :meth:`abort` ends it.

        Args:
            input_ids: [P] the whole sequence so far.
            sampling: SGLang's sampling parameters.
            rid: name for :meth:`abort`.
            heard: called with streamed tokens, in portions of ``interval``; the last portion may only be in the
                answer.
            images: of the prompt; None if it has none.

        Raises:
            EngineDied: the connection was lost, or it has other weights than were loaded.
            EngineRefused: it can never answer this.
            EngineError: it failed, or its answer is malformed.
        """

    @abstractmethod
    async def score(
        self, input_ids: list[int], start: int, *, rid: str = "score", with_routing: bool = False
    ) -> Scores:
        """Return log-probabilities of given tokens from ``start`` on, at temperature 1. Blocks for one prefill.

        Args:
            start: 1 <= start < L: the first token has none.
            with_routing: also return the experts, if answers include the routing.

        Raises:
            EngineDied, EngineRefused, EngineError: as :meth:`generate`.
        """

    @abstractmethod
    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of an answer without its calls of tools, and each call's name and arguments (JSON).

        Args:
            text: decoded with special tokens.
            tools: OpenAI schemas; a call of another tool is not a call.
            parser: name of SGLang's parser.

        Raises:
            EngineDied: the connection was lost.
            EngineError: it knows no such parser, or failed to parse the text.
        """

    @abstractmethod
    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Return the reasoning in an answer, and the rest of its text; raises as :meth:`parse_calls`."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Abort the requests named ``rid``; they return the tokens they have. Returns at once."""

    @abstractmethod
    async def abort_all(self) -> None:
        """Abort every request; each returns the tokens it has. Returns at once."""

    @abstractmethod
    async def pause(self) -> None:
        """Freeze generation in place; KV is kept."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume generation after :meth:`pause`."""

    @abstractmethod
    async def verify(self, publication: Publication, *, files: bool = True) -> None:
        """Raise PublishError unless the publication is complete and fits the model. Reads its files in a thread.

        Args:
            files: False for weights that will not come from the disk: then only their index is read.
        """

    @abstractmethod
    async def load(self, publication: Publication, receive: Receive | None = None) -> float:
        """Load verified weights; return the seconds it took. The engine must be frozen or idle.

        Args:
            receive: transfers the weights; None: they are loaded from their folder.

        Raises:
            PublishError: it refused; it keeps the old weights.
            NotBegun, Partial: as ``receive``.
            EngineDied: it crashed, or did not respond within ``load_timeout_s``.
        """

    @abstractmethod
    async def adopt(self, publication: Publication) -> None:
        """Take the version of a publication whose weights are already loaded. Blocks for two round trips.

        Requests continue, and cached prefixes stay valid.

        Raises:
            EngineDied: it was lost, or has other weights than were loaded.
            EngineError: it failed; the version is unchanged.
        """

    @abstractmethod
    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        """Check that it generates, with tokens that belong to no sample. Blocks; raises as :meth:`generate`."""

    @abstractmethod
    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release GPU memory: ``weights`` (their contents are lost), ``kv_cache``, ``cuda_graph``."""

    @abstractmethod
    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate memory again. Weights must be loaded afterwards."""

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Empty the prefix cache; return False, and do nothing, if a request is running."""

    @abstractmethod
    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a call whose answer has ``success`` and ``message``: for weight transfers."""
