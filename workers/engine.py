"""Define the engine interface of a worker: generation, scores, and control of the weights.

It is implemented by one SGLang server (``workers/sglang/engine.py``) and by several servers behind a router
(``workers/router/engine.py``); all other code of a worker uses only this interface.
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

#: Seconds between repeated aborts: an abort that overtakes its request has no effect, so it is repeated.
ABORT_AGAIN_S = 0.05
#: Expert indices by position, layer and rank among the selected experts.
Rows = NDArray[Any]
#: Called with newly generated tokens: version when the request was sent, ids, logprobs.
OnTokens = Callable[[int, list[int], list[float]], None]
#: Receives transferred weights into a frozen engine. Raises NotBegun, Partial, and EngineDied.
Receive = Callable[[], Awaitable[None]]


class NotBegun(PublishError):
    """Report that weights were not sent to this engine, which is unchanged."""


class Partial(PublishError):
    """Report a partial transfer: the weights are mixed, and the engine must load a folder before it generates."""


class Drafts(NamedTuple):
    """Count the drafts of speculative decoding in one answer."""

    #: Number of draft verifications by the model.
    checks: int
    #: Drafted tokens, and accepted ones.
    drafted: int
    right: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold the answer of the engine to one request."""

    #: [T] token ids as returned, including a generated eos.
    output_ids: list[int]
    #: [T] log-probability of each token.
    logprobs: list[float]
    #: [T] weight version of each token; the older candidate if it cannot be proven (T6).
    versions: list[int]
    #: stop | length | abort
    finish_reason: str
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_tokens: int
    #: 0 if the request was aborted before it started.
    prompt_tokens: int
    #: Reason of an abort.
    message: str = ""
    #: [P + T - 1, layers, top_k] experts of every position except the last, if requested; else None.
    experts: Rows | None = field(default=None, compare=False)
    #: [T] True for tokens that a newer version may have generated; empty if all versions are proven.
    unproven: list[bool] = field(default_factory=list)
    #: None without speculative decoding.
    drafts: Drafts | None = None
    #: Generated tokens that were discarded because their prefix KV came from older weights.
    num_discarded: int = 0
    #: Whether an answer to this request, or to an earlier one that it replaces, was lost, with an unknown number of
    #: generated tokens.
    was_lost: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """Hold log-probabilities of given tokens."""

    #: [L - start] log-probability of each token given all earlier tokens, at temperature 1.
    logprobs: list[float]
    #: Version of the weights; -1: initial weights; None: the request was aborted, or weights changed meanwhile.
    version: int | None
    #: [L - 1, layers, top_k] experts of every position except the last, if requested.
    experts: Rows | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Hold properties of a running engine; the defaults apply until it is queried."""

    #: SGLang release.
    version: str = ""
    #: Context length: most tokens of prompt and answer together.
    max_context: int = sys.maxsize
    #: Number of processes that hold the weights, or 0 if weights cannot be transferred without the disk.
    num_ranks: int = 0
    #: Whether the engine can release memory while it runs.
    saves_memory: bool = False


class Engine(ABC):
    """Generate tokens, score sequences, and load weights. All methods must run in one event loop.

    Methods raise EngineError and its subclasses. EngineDied means that the engine is lost: all its requests raise the
    same error, and it must be restarted.

    Args:
        config: address of the engine, or settings to spawn it.
        model: model whose folder has config, tokenizer and initial weights.
        name: name of the engine in errors.
    """

    #: Properties of the engine.
    info: EngineInfo

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str) -> None:
        self.config = config
        self.model = model
        self.name = name
        #: Version of the loaded publication; -1 if none was loaded.
        self.version = -1
        #: Revision of that publication.
        self.rev = 0
        #: Ranges (first, last) of abandoned versions, whose tokens are not continued (T1).
        self.abandoned: list[list[int]] = []
        #: scaled: logprobs after temperature; original: before temperature.
        self.logprob_kind: LogprobKind = config.logprob_kind or "scaled"
        #: True while an external engine does not respond.
        self.is_away = False
        #: True while generation is frozen.
        self.paused = False
        #: True during a weight transfer: the weights may be mixed.
        self.is_receiving = False
        #: Released memory: weights, cuda_graph, kv_cache. Health checks are suspended meanwhile.
        self.offloaded: set[str] = set()
        #: Number of aborted answers.
        self.num_aborted = 0
        #: Number of answers discarded and generated again because their prefix KV came from older weights.
        self.num_stale_prefixes = 0
        #: Token ids that end an answer of this model.
        self.eos_token_ids = read_eos_token_ids(model.path)
        #: Vocabulary size; 0 if unknown.
        self.vocab_size = read_vocab_size(model.path)
        #: Seed of the run, from which the seed of each sample is derived if the engine samples with seeds.
        self.seed = 0
        #: Whether weights may change during requests.
        self.changes_in_place = True

    @property
    @abstractmethod
    def url(self) -> str:
        """Address of the running engine."""

    @property
    def pid(self) -> int | None:
        """Pid of the main process; None for an external engine."""
        return None

    @property
    @abstractmethod
    def returns_routing(self) -> bool:
        """Whether answers include the expert routing of each token."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Number of generate requests without an answer."""

    @abstractmethod
    def silent(self) -> list[tuple[str, float]]:
        """Return (name, seconds) of hanging generate requests, longest first: silent for 10 s, and older than three
        times the expected duration of a complete answer."""

    def describe(self) -> list[EnginePresence]:
        """Return the states of the member servers, for presence; [] for a single server."""
        return []

    def set_members(self, members: Sequence[MemberConfig]) -> None:
        """Set the member servers of an engine with ``engine.router``. Returns at once."""
        raise EngineError(f"engine {self.name} is a single server without members: set engine.router.")

    def phase(self) -> EngineStarting:
        """Return the current phase of the start, as far as known. Blocks to read the engine's log."""
        return EngineStarting()

    @abstractmethod
    async def start(self, publication: Publication | None = None) -> None:
        """Start the engine and wait until it serves.

        Args:
            publication: initial weights; None: the weights in ``model.path``, as version -1.

        Raises:
            ConfigError: the configuration is invalid.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: the engine exited or timed out; no process is left running.
        """

    async def restart(self, publication: Publication | None) -> None:
        """Stop any remaining process and start with ``publication``; raises like :meth:`start`."""
        await self.stop()
        await self.start(publication)

    @abstractmethod
    async def stop(self) -> None:
        """Stop the started processes; running requests return as aborted or raise EngineDied."""

    @abstractmethod
    async def watch(self) -> str:
        """Wait until the engine is lost; return the reason."""

    def last_words(self) -> str:
        """Return how the engine exited, with the end of its log; '' while it runs, or if unknown."""
        return ""

    @abstractmethod
    def unwatched(self) -> AbstractContextManager[None]:
        """Suspend health checks inside the ``with``, for calls that block the engine and have their own time limit."""

    @abstractmethod
    async def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        *,
        rid: str,
        on_tokens: OnTokens | None = None,
        interval: int = 1,
        images: Images | None = None,
    ) -> Segment:
        """Generate tokens after ``input_ids``. Blocks until the answer is complete or aborted.

        Args:
            input_ids: [P] complete sequence so far.
            sampling: SGLang's sampling parameters.
            rid: name of the request, for :meth:`abort`.
            on_tokens: called with streamed tokens in chunks of ``interval``; the last chunk may only be in the answer.
            images: images of the prompt; None without images.

        Raises:
            EngineDied: the connection was lost, or the engine reports unexpected weights.
            EngineRefused: the engine can never answer this request.
            EngineError: the request failed, or the answer is malformed.
        """

    @abstractmethod
    async def score(
        self, input_ids: list[int], start: int, *, rid: str = "score", with_routing: bool = False
    ) -> Scores:
        """Compute log-probabilities of given tokens from ``start`` on, at temperature 1. Blocks for one prefill.

        Args:
            start: index with 1 <= start < L; the first token has no log-probability.
            with_routing: also return expert routing, if answers include it.

        Raises:
            EngineDied, EngineRefused, EngineError: see :meth:`generate`.
        """

    @abstractmethod
    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, list[tuple[str, str]]]:
        """Split an answer into text and tool calls, each with name and arguments (JSON).

        Args:
            text: answer decoded with special tokens.
            tools: OpenAI schemas; calls of other tools are ignored.
            parser: name of the SGLang parser.

        Raises:
            EngineDied: the connection was lost.
            EngineError: the parser is unknown, or failed to parse the text.
        """

    @abstractmethod
    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Split an answer into its reasoning and the remaining text; raises like :meth:`parse_calls`."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Abort the requests named ``rid``, which return their tokens so far. Returns at once."""

    @abstractmethod
    async def abort_all(self) -> None:
        """Abort all requests, which return their tokens so far. Returns at once."""

    @abstractmethod
    async def pause(self) -> None:
        """Freeze generation and keep the KV cache."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume generation after :meth:`pause`."""

    @abstractmethod
    async def verify(self, publication: Publication, *, files: bool = True) -> None:
        """Raise PublishError unless the publication is complete and fits the model. Reads its files in a thread.

        Args:
            files: False reads only the index, for weights that are transferred without the disk.
        """

    @abstractmethod
    async def load(self, publication: Publication, receive: Receive | None = None) -> float:
        """Load verified weights; return the duration in seconds. The engine must be frozen or idle.

        Args:
            receive: transfers the weights; None loads them from their folder.

        Raises:
            PublishError: the engine refused, and keeps the old weights.
            NotBegun, Partial: see ``receive``.
            EngineDied: the engine crashed, or did not respond within ``load_timeout_s``.
        """

    @abstractmethod
    async def adopt(self, publication: Publication) -> None:
        """Adopt the version of a publication whose weights are already loaded. Blocks for two round trips.

        Requests continue, and cached prefixes stay valid.

        Raises:
            EngineDied: the engine was lost, or reports unexpected weights.
            EngineError: the call failed; the version is unchanged.
        """

    @abstractmethod
    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        """Generate test tokens, which belong to no sample. Blocks; raises like :meth:`generate`."""

    @abstractmethod
    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release GPU memory: ``weights`` (discards them), ``kv_cache``, ``cuda_graph``."""

    @abstractmethod
    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate released memory again. Weights must be loaded afterwards."""

    @abstractmethod
    async def flush_cache(self) -> bool:
        """Flush the prefix cache; return False and do nothing if a request is running."""

    @abstractmethod
    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a call for weight transfers, whose response has ``success`` and ``message``."""
