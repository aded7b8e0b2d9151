"""What a worker needs of an engine: tokens and scores, and the controls of its weights.

One SGLang server (``workers/sglang/engine.py``) is one, several behind a router (``workers/router/engine.py``) are one
together. Jobs, weights and the worker itself know no more than this.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from penstock.config import EngineConfig
from penstock.config.fleet import MemberConfig
from penstock.protocol.presence import EnginePresence
from penstock.protocol.records.causes import EngineStarting
from penstock.protocol.records.publication import Publication
from penstock.protocol.records.sample import LogprobKind
from penstock.weights.pictures import Images

#: An abort that overtakes its request on the way finds nothing: it is repeated until every request has returned.
ABORT_AGAIN_S = 0.05
#: Numbers of experts, by position, layer and choice.
Rows = NDArray[Any]
#: Called with tokens while they are drawn: version at the sending of the request, ids, logprobs.
Heard = Callable[[int, list[int], list[float]], None]


class Drafts(NamedTuple):
    """What speculative decoding came to in one answer."""

    #: Times that the model looked at a draft.
    checks: int
    #: Tokens that were drafted, and those of them that it kept.
    drafted: int
    right: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One answer of the engine: what it drew for one request."""

    #: [T] as returned; a drawn eos is the last one.
    output_ids: list[int]
    #: [T] log-probability with which each was drawn.
    logprobs: list[float]
    #: [T] weight version each was drawn with; where that cannot be proven, the older one (T6).
    versions: list[int]
    #: stop | length | abort
    finish_reason: str
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_tokens: int
    #: 0 where the request was aborted before it ran.
    prompt_tokens: int
    #: What the engine said about an abort.
    message: str = ""
    #: [P + T - 1, layers, top_k] experts of every position but the last, where that was asked for; else None.
    experts: Rows | None = field(default=None, compare=False)
    #: [T] True on tokens that a newer version than theirs may have drawn; empty: none is such a token.
    unproven: list[bool] = field(default_factory=list)
    #: None where it was drawn without drafts.
    drafts: Drafts | None = None
    #: Tokens that were drawn and are not among these: what they go by was of older weights.
    num_thrown: int = 0
    #: Nobody knows what was drawn: the answer was lost on its way.
    is_unheard: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens."""

    #: [L - start] of each token given what stands before it, at temperature 1.
    logprobs: list[float]
    #: Version of the weights; -1: those the server started with. None: it was aborted, or weights changed meanwhile.
    version: int | None
    #: [L - 1, layers, top_k] experts of every position but the last, where that was asked for.
    experts: Rows | None = field(default=None, compare=False)


class EngineInfo(Protocol):
    """What is known of an engine that runs; before it was asked, what holds of any."""

    @property
    def version(self) -> str:
        """Its release; '' before it was asked."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that it takes."""

    @property
    def num_ranks(self) -> int:
        """Processes that hold its weights, where they can be sent to it without the disk; else 0."""

    @property
    def saves_memory(self) -> bool:
        """Whether it can give memory back while it lives."""


class Engine(Protocol):
    """All methods belong to one event loop. Errors are those of penstock/errors.py, EngineError and below.

    EngineDied means that it is lost: what ran on it returns by the same error, and it has to be started again.
    """

    config: EngineConfig
    #: Named in errors.
    name: str
    #: Publication number of its weights; -1 when none was loaded.
    version: int
    #: Revision of that publication.
    rev: int
    #: Ranges (first, last) of versions that were abandoned before it: tokens of theirs are not continued (T1).
    abandoned: list[list[int]]
    #: scaled: logprobs are after temperature; original: before it.
    logprob_kind: LogprobKind
    #: True while it belongs to somebody else and does not answer.
    is_away: bool
    #: True while its generation is frozen.
    paused: bool
    #: True while weights are brought to it in another way than from a folder: they may be partly new.
    is_receiving: bool
    #: Memory that it has given back: weights, cuda_graph, kv_cache.
    offloaded: set[str]
    #: Answers so far that ended by an abort.
    num_aborted: int
    #: Answers so far that were thrown away because their prefix KV was of older weights; they are drawn again.
    num_stale_prefixes: int
    #: Ids that end an answer of this model.
    eos_token_ids: frozenset[int]
    #: Number of its ids; 0: unknown.
    vocab_size: int
    #: Seed of the run, of which each sample has one of its own where the engine draws by seeds.
    seed: int
    #: Whether weights may change under running requests.
    changes_in_place: bool

    @property
    def info(self) -> EngineInfo:
        """What is known of it."""

    @property
    def url(self) -> str:
        """Address while it runs."""

    @property
    def pid(self) -> int | None:
        """Pid of its main process; None where it is somebody else's."""

    @property
    def tells_routing(self) -> bool:
        """Whether answers say which experts saw each token."""

    @property
    def num_running(self) -> int:
        """Requests for tokens sent and not answered."""

    def silent(self, limit_s: float | None) -> list[tuple[str, float]]:
        """(name, seconds) of requests for tokens of which nothing was heard for ``limit_s``, longest first.

        Args:
            limit_s: None: for 10 s, of one that is older than three answers of all its tokens would take.
        """

    def describe(self) -> list[EnginePresence]:
        """Its servers with their states, for presence; [] of one that is a single server."""

    def set_members(self, members: Sequence[MemberConfig]) -> None:
        """Say which servers it stands for, where it is several (``engine.router``). Returns at once."""

    def phase(self) -> EngineStarting:
        """Return the phase of its start, if that is known. Blocks to read its log."""

    async def start(self, publication: Publication | None = None) -> None:
        """Bring it up, and wait until it serves.

        Args:
            publication: weights to start with; None: those of ``model.path``, as version -1.

        Raises:
            ConfigError: it cannot be started as it is configured.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: it ended or did not answer in time; nothing is left running.
        """

    async def restart(self, publication: Publication | None) -> None:
        """Stop whatever is left of it and start it with ``publication``; raises as :meth:`start`."""

    async def stop(self) -> None:
        """End what was started; requests still running return as aborted or raise EngineDied."""

    async def watch(self) -> str:
        """Wait until it is lost; returns why."""

    def last_words(self) -> str:
        """How it ended, with the end of its log; '' while it runs, and where that is not known."""

    def unwatched(self) -> AbstractContextManager[None]:
        """No health checks inside the ``with``: for what it cannot answer meanwhile, and has its own limit."""

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
        """Draw tokens after ``input_ids``. Blocks until they are drawn, or :meth:`abort` ends it.

        Args:
            input_ids: [P] the whole sequence so far.
            sampling: SGLang's sampling parameters.
            rid: name for :meth:`abort`.
            heard: called with tokens while they are drawn, in portions of ``interval``; those of the last portion may
                not be reported before the answer is there.
            images: of the prompt; None: it has none.

        Raises:
            EngineDied: the connection was lost, or it has other weights than were loaded.
            EngineRefused: it can never answer this.
            EngineError: it failed, or its answer cannot be read.
        """

    async def score(
        self, input_ids: list[int], start: int, *, rid: str = "score", with_routing: bool = False
    ) -> Scores:
        """Log-probabilities of given tokens from ``start`` on, at temperature 1. Blocks for one prefill.

        Raises:
            EngineDied, EngineRefused, EngineError: as :meth:`generate`.
        """

    async def abort(self, rid: str) -> None:
        """Ask for the end of the requests named ``rid``; they return with what they have. Returns at once."""

    async def abort_all(self) -> None:
        """Ask for the end of every request; each returns with what it has. Returns at once."""

    async def pause(self) -> None:
        """Freeze generation where it stands; KV is kept."""

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    async def verify(self, publication: Publication, *, files: bool = True) -> None:
        """Raise PublishError unless the publication is whole and fits the model. Reads its files in a thread.

        Args:
            files: False for weights that will not come from the disk: then only their index is read.
        """

    async def load(
        self, publication: Publication, receive: "Callable[[], Awaitable[Publication | None]] | None" = None
    ) -> float:
        """Load verified weights; returns the seconds it took. It must be frozen, or without requests.

        Args:
            receive: brings the weights; where it returns a publication (this or a later one), or is None, that is
                loaded from its folder.

        Raises:
            PublishError: it refused, or was not sent them, and goes on with the old weights.
            EngineDied: it died of it, or did not answer within ``load_timeout_s``.
        """

    async def adopt(self, publication: Publication) -> None:
        """Take the number of a publication whose weights are those that are loaded. Blocks for two round trips.

        Requests continue, and find the prefixes that were cached before.

        Raises:
            EngineDied: it was lost, or has other weights than were loaded.
            EngineError: it cannot; it keeps the number that it has.
        """

    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        """Draw tokens that belong to no sample, to see that it serves. Blocks for them; raises as :meth:`generate`."""

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory back to the GPU: ``weights`` (their contents are lost), ``kv_cache``, ``cuda_graph``."""

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again. Weights have to be loaded after it."""

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False where something still runs, and nothing was done."""

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """A call to its server whose answer says ``success`` and ``message``: for transfers of weights."""
