"""Request tokens and scores from one engine over SGLang's HTTP interface. Its controls are in ``controls.py``.

Tested with releases 0.5.17 to 0.5.23. Token versions come from the spans that an answer reports, else from the version
that was loaded when its request was sent.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied, EngineError, EngineRefused
from penstock.model.pictures import Images
from penstock.names import ROUTED_EXPERTS
from penstock.records.sample import FinishReason
from penstock.text import safe_repr
from penstock.workers.engine import OnTokens, Rows, Scores, Segment
from penstock.workers.sglang.batches import MOST, Batches, BatchFailed, BatchRefused
from penstock.workers.sglang.controls import SglangControls
from penstock.workers.sglang.http import ConnectionClosed
from penstock.workers.sglang.routed_experts import ASK
from penstock.workers.sglang.segment import (
    NO_ROUTING,
    STALE_PREFIX,
    Drawn,
    count_of,
    drafts_of,
    finite_of,
    meta_of,
    read_drawn,
    read_scored,
    spans_of,
)
from penstock.workers.sglang.stream import UNHEARD, Answer, check_length, most_tokens, number_in, read_events, read_head

#: Paths of the parsers of answers; any server can parse any text.
PARSE_CALLS, SEPARATE_REASONING = "/parse_function_call", "/separate_reasoning"
#: Statuses of a batch (too large, malformed) after which no more are sent until the engine is restarted.
_NO_BATCHES = (413, 422)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Facts about one request when its answer arrives."""

    #: Request id, for errors.
    rid: str
    #: Version that was loaded when the request was sent; -1: the initial weights of the server.
    sent: int
    #: Newest version that was loaded, or whose load has begun.
    newest: int
    #: Whether the server reports spans of versions.
    has_spans: bool
    #: Whether weights may change while a request is answered.
    in_place: bool
    #: Tokens after a weight change that may still be of the old weights.
    window: int
    #: Ranges (first, last) of versions with the same weights.
    same: Sequence[tuple[int, int]] = ()

    def versions(self, meta: dict[str, Any], count: int) -> tuple[list[int], list[bool]]:
        """Return [T] the version of each token, and [T] whether a newer one may have generated it.

        The versions are those of the reported spans; without spans, the version when the request was sent.

        Weights only move forward, so that version is the oldest that could have generated a token, and the true one
        whenever the request was answered before the next load (drain, abort).

        Args:
            meta: ``meta_info`` of the answer.
            count: T.

        Raises:
            EngineDied: weights of another run or worker generated it.
            EngineError: the spans do not cover its tokens.
        """
        last = self.check(meta.get("weight_version"))
        spans = spans_of(meta, count, self.rid) if self.has_spans else []
        if spans:
            return self._by_spans(spans)
        # No token has newer weights than the version at the end of the answer.
        newest = (last if last >= 0 else self.newest) if self.in_place else self.sent
        return [self.sent] * count, [self.sent < newest] * count

    def _by_spans(self, spans: Sequence[tuple[Any, int]]) -> tuple[list[int], list[bool]]:
        versions: list[int] = []
        doubted: list[bool] = []
        older = self.sent
        for reported, length in spans:
            version = self.check(reported)
            unproven = min(self.window, length) if version != older else 0
            versions += [older] * unproven + [version] * (length - unproven)
            doubted += [True] * unproven + [False] * (length - unproven)
            older = version
        return versions, doubted

    def has_stale_prefix(self, meta: dict[str, Any]) -> bool:
        """Return whether the request started under newer weights than when it was sent, on prefix KV of older ones.

        A request that waits in the server's queue during an in-place update uses the prefix namespace of the version
        it was sent under. Its tokens follow the policy of no version, so they are generated again.
        """
        spans = meta.get("weight_versions") if self.has_spans else None
        if not spans or not count_of(meta, "cached_tokens", self.rid):
            return False
        first = spans[0]["version"]
        version = number_in(first) if isinstance(first, str) else None
        if version is None or version <= self.sent:
            return False
        return not any(earliest <= self.sent and version <= last for earliest, last in self.same)

    def check(self, reported: Any) -> int:
        """Return the version a server reports, -1 if none. Raises EngineDied if it cannot be one of ours."""
        known = number_in(reported) if isinstance(reported, str) else None
        version = -1 if known is None else known
        if self.sent >= 0 and reported is not None and not self.sent <= version <= self.newest:
            raise EngineDied(
                f"{self.rid}: the engine answered with weights {safe_repr(reported)}, but {self.sent} to {self.newest} "
                "was loaded: it was restarted or loaded by someone else; load the current publication."
            )
        return version


def sample_seed(seed: int, sample: str) -> int:
    """Return the seed of one sample, in 0 .. 2**31 - 1, as a function of run seed and sample id alone.

    SGLang hashes it with the position of each token, so a sample that resumes from its prefix gets the same tokens as
    without the interruption.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class SglangClient(SglangControls):
    """Requests for tokens, to one server or several."""

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        super().__init__(config, model, name=name, log_dir=log_dir)
        self._batches = Batches(self.http, config, hear=self.under_way.hear, abort=self._abort_one)

    @property
    def returns_routing(self) -> bool:
        return self.routing is not None

    @property
    def num_running(self) -> int:
        return len(self.under_way)

    def silent(self) -> list[tuple[str, float]]:
        return self.under_way.silent()

    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            "rid": self.under_way.wire_rid("proof"),
        }
        answer = await self.call("POST", "/generate", body, timeout_s)
        self._provenance(self.version, "proof").check(meta_of(answer, "proof").get("weight_version"))

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
        """Implement ``Engine.generate``.

        Requests use kept connections, and those that begin together for the same tokens share one (``batches.py``). If
        the server closes it before it answers, or ends the batch, the request is sent again, once, alone and on a new
        connection.

        Raises:
            EngineDied: the connection was lost, or the server has other weights than were loaded.
            EngineRefused: an id is not in the model's vocabulary, the server refused the request, or its number of
                image tokens differs from that of the processor here.
            EngineError: an HTTP error, or an answer without ids, without exactly one finite logprob per id, or with
                spans that do not cover it.
        """
        self._check_ids(input_ids, rid)
        sending = partial(self._generate_once, input_ids, sampling, rid, on_tokens, interval, images)
        try:
            return await sending(is_first=True)
        except BatchRefused as exc:
            if exc.status in _NO_BATCHES:
                self.info = replace(self.info, takes_batches=False)
            return await sending(is_first=False)
        except (ConnectionClosed, BatchFailed):
            return replace(await sending(is_first=False), was_lost=True)

    async def _generate_once(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        rid: str,
        on_tokens: OnTokens | None,
        interval: int,
        images: Images | None,
        *,
        is_first: bool,
    ) -> Segment:
        wire_rid = self.under_way.wire_rid(rid)
        if self.info.deterministic:
            sampling = sampling | {"sampling_seed": sample_seed(sampling.get("sampling_seed", self.seed), rid)}
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": sampling,
            "rid": wire_rid,
            "return_logprob": True,
        }
        if images is not None:
            body |= {"input_ids": images.folded(input_ids), "image_data": images.uris}
        if self.routing is not None:
            body |= ASK
        if self.info.shares_prefixes:
            # Without spans a request may have waited in the server's queue while weights changed.
            alone = self.changes_in_place and not self.info.reports_spans
            body["extra_key"] = f"{self._namespace}.{wire_rid}" if alone else self._namespace
        sent = self.version
        with self.under_way.sent(rid, wire_rid, most=most_tokens(body)):
            if on_tokens is not None:
                body["sampling_params"] = sampling | {"stream_interval": interval}
                answer = await self._stream(body | {"stream": True}, sent, rid, on_tokens, is_first)
            elif is_first and self._takes_batches and images is None and (most_tokens(body) or MOST) < MOST:
                answer = await self._batches.ask(body, incremental=self.info.streams_increments)
            else:
                answer = await self.call("POST", "/generate", body, self.config.request_timeout_s, keep=is_first)
            segment = self.segment_of(answer, sent, rid)
            self.under_way.answered(wire_rid, len(segment.output_ids))
        check_length(len(segment.output_ids), most_tokens(body), rid)
        # 0: it was aborted before it started.
        if images is not None and segment.prompt_tokens not in (0, len(input_ids)):
            raise EngineRefused(
                f"{rid}: the engine made {segment.prompt_tokens} tokens of a prompt with images, and the processor of "
                f"model.path {len(input_ids)}: set the sizes in its preprocessor_config.json to those the engine "
                "reads (min_pixels and max_pixels), or use images of a size that neither resizes."
            )
        return segment

    @property
    def _takes_batches(self) -> bool:
        return self.info.takes_batches and self.routing is None

    async def _stream(
        self, body: dict[str, Any], sent: int, rid: str, on_tokens: OnTokens, keep: bool
    ) -> dict[str, Any]:
        answer = Answer(rid, incremental=self.info.streams_increments, most=most_tokens(body))
        limit_s = self.config.request_timeout_s
        async with self.http.request("POST", "/generate", body, limit_s, keep=keep) as response:
            if response.status != 200:
                raise self.http.refusal("/generate", response.status, await read_head(response.content))
            async for event in read_events(response.content, self._most_bytes(body)):
                ids, logprobs = answer.add(event)
                self.under_way.hear(body["rid"])
                if answer.is_finished:
                    continue
                self._provenance(sent, rid).check(answer.weight_version)
                if ids and finite_of(logprobs) is not None:
                    on_tokens(sent, ids, logprobs)
        if not answer.is_finished:
            raise EngineDied(f"{rid}: the stream of engine {self.name} ended before the answer{self._how_it_ended()}.")
        return answer.whole()

    def segment_of(self, answer: Any, sent: int, rid: str) -> Segment:
        drawn = read_drawn(answer, rid)
        meta = drawn.meta
        self.num_aborted += drawn.reason == FinishReason.ABORT
        provenance = self._provenance(sent, rid)
        versions, unproven = provenance.versions(meta, len(drawn.ids))
        if provenance.has_stale_prefix(meta):
            self.num_stale_prefixes += 1
            return _discarded(drawn, STALE_PREFIX)
        if self.routing is not None and drawn.ids and _was_aborted_in_queue(drawn):
            return _discarded(drawn, NO_ROUTING)
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
            drafts=drafts_of(meta),
            was_lost=answer.get(UNHEARD) is True,
        )

    def _experts(self, drawn: Drawn, rid: str) -> Rows | None:
        """Return the routing of the whole sequence; None if the request was aborted before it started."""
        if self.routing is None or _was_aborted_in_queue(drawn):
            return None
        num_tokens = count_of(drawn.meta, "prompt_tokens", rid) + len(drawn.ids)
        return self.routing.read(drawn.meta.get(ROUTED_EXPERTS), num_tokens, rid)

    def _check_ids(self, input_ids: list[int], rid: str) -> None:
        """Refuse an id outside the vocabulary, which would crash SGLang's scheduler with all its requests."""
        if input_ids and self.vocab_size and not 0 <= min(input_ids) <= max(input_ids) < self.vocab_size:
            wrong = next(token for token in input_ids if not 0 <= token < self.vocab_size)
            raise EngineRefused(
                f"{rid}: token {wrong} is not among the {self.vocab_size} ids of the model: its prompt was made with "
                "the tokenizer of another model."
            )

    def _provenance(self, sent: int, rid: str) -> Provenance:
        info = self.info
        return Provenance(
            rid, sent, self.newest, info.reports_spans, self.changes_in_place, info.window, tuple(self._same)
        )

    async def abort(self, rid: str) -> None:
        for wire_rid in self.under_way.named(rid):
            await self._abort_one(wire_rid)

    async def _abort_one(self, wire_rid: str) -> None:
        await self.call("POST", "/abort_request", {"rid": wire_rid})

    async def score(
        self, input_ids: list[int], start: int, *, rid: str = "score", with_routing: bool = False
    ) -> Scores:
        if not 0 < start < len(input_ids):
            raise EngineError(f"{rid}: start must be in 1..{len(input_ids) - 1}, not {start}.")
        self._check_ids(input_ids, rid)
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "rid": self.under_way.wire_rid(rid),
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

    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, list[tuple[str, str]]]:
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        answer = await self.call("POST", PARSE_CALLS, body)
        try:
            rest, calls = answer["normal_text"], [(one["name"], one["parameters"]) for one in answer["calls"]]
        except (KeyError, TypeError) as exc:
            raise self._malformed(PARSE_CALLS, answer) from exc
        if not all(isinstance(one, str) for one in (rest, *chain.from_iterable(calls))):
            raise self._malformed(PARSE_CALLS, answer)
        return rest, calls

    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        answer = await self.call("POST", SEPARATE_REASONING, {"text": text, "reasoning_parser": parser})
        if not isinstance(answer, dict) or not {"reasoning_text", "text"} <= answer.keys():
            raise self._malformed(SEPARATE_REASONING, answer)
        return str(answer["reasoning_text"] or ""), str(answer["text"] or "")

    def _malformed(self, path: str, answer: Any) -> EngineError:
        return EngineError(
            f"engine {self.name} answered {path} with {safe_repr(answer)}, which is not the text's parts."
        )


def _discarded(drawn: Drawn, why: str) -> Segment:
    """Return an empty segment in place of tokens that must be generated again."""
    return Segment([], [], [], FinishReason.ABORT, 0, 0, why, num_discarded=len(drawn.ids))


def _was_aborted_in_queue(drawn: Drawn) -> bool:
    """Return whether a request was aborted without routing, as servers do with requests in their queue."""
    return drawn.reason == FinishReason.ABORT and drawn.meta.get(ROUTED_EXPERTS) is None
