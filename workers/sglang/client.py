"""Request tokens and scores from an engine over SGLang's HTTP interface (controls: ``controls.py``).

Tested with releases 0.5.17 to 0.5.23. Token versions come from the spans that an answer reports, or from the version
that was loaded when the request was sent.
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
from penstock.workers.sglang.batches import MAX_TOKENS, Batches, BatchFailed, BatchRefused
from penstock.workers.sglang.controls import SglangControls
from penstock.workers.sglang.http import ConnectionClosed
from penstock.workers.sglang.routed_experts import REQUEST_FIELDS
from penstock.workers.sglang.segment import (
    HIGHEST,
    NO_ROUTING,
    STALE_PREFIX,
    RawAnswer,
    are_ids,
    count_of,
    drafts_of,
    finite_of,
    meta_of,
    read_generated,
    read_scored,
    spans_of,
)
from penstock.workers.sglang.stream import (
    ANSWER_LOST,
    Answer,
    check_length,
    most_tokens,
    number_in,
    read_events,
    read_head,
)

#: Paths of the answer parsers; any server can parse any text.
PARSE_CALLS, SEPARATE_REASONING = "/parse_function_call", "/separate_reasoning"
#: HTTP statuses of a batch (too large, malformed) that disable batches until the engine restarts.
_NO_BATCHES = (413, 422)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Determine the versions of an answer's tokens from the state at its request."""

    #: Request id, for errors.
    rid: str
    #: Version loaded when the request was sent; -1: the server's initial weights.
    sent: int
    #: Newest version loaded or being loaded.
    newest: int
    #: Whether the server reports version spans.
    has_spans: bool
    #: Whether weights may change during a request.
    in_place: bool
    #: Number of tokens after a weight change that the old weights may have generated.
    window: int
    #: Ranges (first, last) of versions with the same weights.
    same: Sequence[tuple[int, int]] = ()

    def versions(self, meta: dict[str, Any], count: int) -> tuple[list[int], list[bool]]:
        """Return [T] the version of each token, and [T] whether a newer version may have generated it.

        Versions come from the reported spans, or without spans from the time of sending. Weights only move forward, so
        the latter is the oldest possible version, and exact if the answer arrived before the next load (drain, abort).

        Args:
            meta: ``meta_info`` of the answer.
            count: T.

        Raises:
            EngineDied: weights of another run or worker generated the answer.
            EngineError: the spans do not cover the tokens.
        """
        last = self.check(meta.get("weight_version"))
        spans = spans_of(meta, count, self.rid) if self.has_spans else []
        if spans:
            return self._by_spans(spans)
        # No token is newer than the version at the end of the answer.
        newest = (last if last >= 0 else self.newest) if self.in_place else self.sent
        return [self.sent] * count, [self.sent < newest] * count

    def _by_spans(self, spans: Sequence[tuple[Any, int]]) -> tuple[list[int], list[bool]]:
        versions: list[int] = []
        unproven_tokens: list[bool] = []
        older = self.sent
        for reported, length in spans:
            version = self.check(reported)
            unproven = min(self.window, length) if version != older else 0
            versions += [older] * unproven + [version] * (length - unproven)
            unproven_tokens += [True] * unproven + [False] * (length - unproven)
            older = version
        return versions, unproven_tokens

    def has_stale_prefix(self, meta: dict[str, Any]) -> bool:
        """Return whether the request started under newer weights but with prefix KV of older ones.

        A request that is queued in the server during an in-place update uses the prefix namespace of the version at
        sending. Its tokens follow the policy of no version, so they are generated again.
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
        """Return the reported version, -1 without one. Raises EngineDied if this worker cannot have loaded it."""
        known = number_in(reported) if isinstance(reported, str) else None
        version = -1 if known is None else known
        if self.sent >= 0 and reported is not None and not self.sent <= version <= self.newest:
            raise EngineDied(
                f"{self.rid}: the engine answered with weights {safe_repr(reported)}, but {self.sent} to {self.newest} "
                "was loaded: another process restarted it or loaded weights; load the current publication."
            )
        return version


def sample_seed(seed: int, sample: str) -> int:
    """Derive the seed of a sample, in 0 .. 2**31 - 1, from run seed and sample id.

    SGLang hashes the seed with each token position, so a sample that resumes from its prefix gets the same tokens as an
    uninterrupted one.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class SglangClient(SglangControls):
    """Generate and score with one server or several."""

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        super().__init__(config, model, name=name, log_dir=log_dir)
        self._batches = Batches(self.http, config, on_tokens=self.in_flight.on_tokens, abort=self._abort_one)

    @property
    def returns_routing(self) -> bool:
        return self.routing is not None

    @property
    def num_running(self) -> int:
        return len(self.in_flight)

    def silent(self) -> list[tuple[str, float]]:
        return self.in_flight.silent()

    async def prove(self, timeout_s: float, *, num_tokens: int = 1) -> None:
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            "rid": self.in_flight.wire_rid("proof"),
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

        Requests reuse connections, and simultaneous requests with the same prompt are batched (``batches.py``). If the
        server closes the connection before answering, or fails the batch, the request is resent once, alone and on a
        new connection.

        Raises:
            EngineDied: the connection was lost, or the server reports unexpected weights.
            EngineRefused: an id is not in the model's vocabulary, the server refused the request, or server and worker
            count different numbers of image tokens.
            EngineError: an HTTP error, or an answer without ids, without one finite logprob per id, or with spans that
            do not cover it.
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
        wire_rid = self.in_flight.wire_rid(rid)
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
            body |= REQUEST_FIELDS
        if self.info.shares_prefixes:
            # Without spans, weights may have changed while the request was queued in the server.
            alone = self.changes_in_place and not self.info.reports_spans
            body["extra_key"] = f"{self._namespace}.{wire_rid}" if alone else self._namespace
        sent = self.version
        with self.in_flight.sent(rid, wire_rid, most=most_tokens(body)):
            if on_tokens is not None:
                body["sampling_params"] = sampling | {"stream_interval": interval}
                answer = await self._stream(body | {"stream": True}, sent, rid, on_tokens, is_first)
            elif is_first and self._takes_batches and images is None and (most_tokens(body) or MAX_TOKENS) < MAX_TOKENS:
                answer = await self._batches.send(body, incremental=self.info.streams_increments)
            else:
                answer = await self.call("POST", "/generate", body, self.config.request_timeout_s, keep=is_first)
            segment = self.segment_of(answer, sent, rid)
            self.in_flight.answered(wire_rid, len(segment.output_ids))
        check_length(len(segment.output_ids), most_tokens(body), rid)
        # 0 if the request was aborted before it started.
        if images is not None and segment.prompt_tokens not in (0, len(input_ids)):
            raise EngineRefused(
                f"{rid}: the engine counts {segment.prompt_tokens} tokens in a prompt with images, but the processor "
                f"of model.path counts {len(input_ids)}: set min_pixels and max_pixels in its "
                "preprocessor_config.json to the engine's values, or use images of a size that is not resized."
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
                self.in_flight.on_tokens(body["rid"])
                if answer.is_finished:
                    continue
                self._provenance(sent, rid).check(answer.weight_version)
                values = finite_of(logprobs)
                # The complete answer is refused for the others.
                if ids and are_ids(ids, self.vocab_size) and values is not None and values.max() <= HIGHEST:
                    on_tokens(sent, ids, logprobs)
        if not answer.is_finished:
            raise EngineDied(f"{rid}: the stream of engine {self.name} ended before the answer{self._how_it_ended()}.")
        return answer.complete()

    def segment_of(self, answer: Any, sent: int, rid: str) -> Segment:
        raw = read_generated(answer, rid, self.vocab_size)
        meta = raw.meta
        self.num_aborted += raw.reason == FinishReason.ABORT
        provenance = self._provenance(sent, rid)
        versions, unproven = provenance.versions(meta, len(raw.ids))
        if provenance.has_stale_prefix(meta):
            self.num_stale_prefixes += 1
            return _discarded(raw, STALE_PREFIX)
        if self.routing is not None and raw.ids and _was_aborted_in_queue(raw):
            return _discarded(raw, NO_ROUTING)
        return Segment(
            output_ids=raw.ids,
            logprobs=raw.logprobs,
            versions=versions,
            finish_reason=raw.reason,
            cached_tokens=count_of(meta, "cached_tokens", rid),
            prompt_tokens=count_of(meta, "prompt_tokens", rid),
            message=raw.message,
            experts=self._experts(raw, rid),
            unproven=unproven,
            drafts=drafts_of(meta),
            was_lost=answer.get(ANSWER_LOST) is True,
        )

    def _experts(self, raw: RawAnswer, rid: str) -> Rows | None:
        """Return the routing of the complete sequence; None if the request was aborted before starting."""
        if self.routing is None or _was_aborted_in_queue(raw):
            return None
        num_tokens = count_of(raw.meta, "prompt_tokens", rid) + len(raw.ids)
        return self.routing.read(raw.meta.get(ROUTED_EXPERTS), num_tokens, rid)

    def _check_ids(self, input_ids: list[int], rid: str) -> None:
        """Refuse ids outside the vocabulary, which would crash SGLang's scheduler with all its requests."""
        if input_ids and self.vocab_size and not 0 <= min(input_ids) <= max(input_ids) < self.vocab_size:
            wrong = next(token for token in input_ids if not 0 <= token < self.vocab_size)
            raise EngineRefused(
                f"{rid}: token id {wrong} is outside the model's vocabulary of {self.vocab_size}: tokenize the prompt "
                "with the tokenizer of this model."
            )

    def _provenance(self, sent: int, rid: str) -> Provenance:
        info = self.info
        return Provenance(
            rid, sent, self.newest, info.reports_spans, self.changes_in_place, info.window, tuple(self._same)
        )

    async def abort(self, rid: str) -> None:
        for wire_rid in self.in_flight.named(rid):
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
            "rid": self.in_flight.wire_rid(rid),
        }
        routing = self.routing if with_routing else None
        if routing is not None:
            body |= REQUEST_FIELDS
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
        return EngineError(f"engine {self.name} returned a malformed answer to {path}: {safe_repr(answer)}.")


def _discarded(raw: RawAnswer, why: str) -> Segment:
    """Return an empty segment for tokens that must be generated again."""
    return Segment([], [], [], FinishReason.ABORT, 0, 0, why, num_discarded=len(raw.ids))


def _was_aborted_in_queue(raw: RawAnswer) -> bool:
    """Return whether a request was aborted without routing, as for requests in a server's queue."""
    return raw.reason == FinishReason.ABORT and raw.meta.get(ROUTED_EXPERTS) is None
