"""What the client makes of an engine's answer: T6's versions, and answers it may not take."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied, EngineError, EngineRefused
from penstock.workers.engine import Drafts, Segment
from penstock.workers.sglang.client import sample_seed
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.segment import STALE_PREFIX, read_generated
from penstock.workers.sglang.server_info import ServerInfo


def engine(*, version: int = 3, newest: int = 3, window: int = 0, reports_spans: bool = True) -> SglangEngine:
    engine = SglangEngine(EngineConfig(), ModelConfig(path="."), name="t", log_dir=Path())
    engine.version, engine.newest = version, newest
    engine.info = ServerInfo(window=window, reports_spans=reports_spans)
    return engine


def answer(ids: list[int], spans: list[tuple[str, int, int]] | None = None, **changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "output_token_logprobs": [[-0.1 * token, token, None] for token in ids],
        "prompt_tokens": 4,
        "cached_tokens": 2,
        "weight_version": spans[-1][0] if spans else "3",
    }
    if spans:
        meta["weight_versions"] = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return {"output_ids": ids, "meta_info": meta | changes}


def read(given: Any, sent: int = 3, **options: Any) -> Segment:
    return engine(**options).segment_of(given, sent, "a/0/0/0")


def test_T6_reported_spans_are_taken_as_they_are() -> None:
    segment = read(answer([1, 2, 3, 4], [("2", 0, 1), ("3", 1, 4)]), sent=2)
    assert segment.versions == [2, 3, 3, 3]
    assert segment.logprobs == [-0.1 * token for token in (1, 2, 3, 4)]
    assert (segment.prompt_tokens, segment.cached_tokens) == (4, 2)


DRAFTS = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 3}


@pytest.mark.parametrize(
    ("told", "drafts"),
    [
        (DRAFTS, Drafts(2, 6, 3)),
        ({"spec_verify_ct": 2, "spec_draft_token_num": 6, "spec_accept_token_num": 3}, Drafts(2, 6, 3)),
        ({}, None),
        (DRAFTS | {"spec_verify_ct": 0}, None),
        (DRAFTS | {"spec_num_correct_drafts": 7}, None),
        (DRAFTS | {"spec_num_correct_drafts": "3"}, None),
        (DRAFTS | {"spec_num_correct_drafts": -1}, None),
    ],
)
def test_what_an_answer_says_of_drafts_is_read_and_nothing_fails_of_it(
    told: dict[str, Any], drafts: Drafts | None
) -> None:
    assert read(answer([1, 2], [("3", 0, 2)], **told)).drafts == drafts


def test_T6_without_spans_every_token_carries_the_version_at_the_sending() -> None:
    given = answer([1, 2, 3, 4], [("2", 0, 1), ("3", 1, 4)])
    assert read(given, sent=2, reports_spans=False).versions == [2, 2, 2, 2]
    del given["meta_info"]["weight_versions"]
    assert read(given, sent=2).versions == [2, 2, 2, 2]


@pytest.mark.parametrize(("reported", "unproven"), [("2", False), ("3", True), (None, True)])
def test_T6_without_spans_a_token_is_of_a_proven_version_only_where_no_newer_weights_were_there(
    reported: str | None, unproven: bool
) -> None:
    given = answer([1, 2], weight_version=reported)
    segment = read(given, sent=2, newest=3, reports_spans=False)
    assert (segment.versions, segment.unproven) == ([2, 2], [unproven, unproven])
    client = engine(version=2, newest=3, reports_spans=False)
    client.changes_in_place = False
    assert not any(client.segment_of(given, 2, "r").unproven), "it was answered before the load"


def test_T6_results_in_flight_during_a_change_carry_the_older_version() -> None:
    spans = [("2", 0, 2), ("3", 2, 5), ("4", 5, 6)]
    given = answer([1, 2, 3, 4, 5, 6], spans)
    segment = read(given, sent=2, newest=4, window=1)
    assert segment.versions == [2, 2, 2, 3, 3, 3]
    assert segment.unproven == [False, False, True, False, False, True]
    assert read(given, sent=2, newest=4, window=2).versions == [2, 2, 2, 2, 3, 3]
    # The first token may have been drawn before the change that its prefill saw the end of.
    assert read(answer([1, 2], [("3", 0, 2)], cached_tokens=0), sent=2, window=1).versions == [2, 3]


def test_an_answer_that_began_on_prefix_KV_of_older_weights_is_thrown_away_to_be_drawn_anew() -> None:
    waited = read(answer([1, 2], [("3", 0, 2)]), sent=2)
    assert (waited.output_ids, waited.finish_reason, waited.message) == ([], "abort", STALE_PREFIX)
    assert waited.num_discarded == 2
    assert read(answer([1, 2], [("3", 0, 2)], cached_tokens=0), sent=2).output_ids == [1, 2], "nothing was cached"
    assert read(answer([1, 2], [("2", 0, 1), ("3", 1, 2)]), sent=2).output_ids == [1, 2], "it began before the change"
    assert read(answer([1, 2], [("3", 0, 2)]), sent=3).output_ids == [1, 2], "it was sent after the change"


def test_prefix_KV_of_an_older_version_with_the_same_weights_is_not_stale() -> None:
    waited = answer([1, 2], [("4", 0, 2)])
    client = engine(version=2, newest=2)
    for version in (3, 4):
        client._record_same(version)
        client.version = version
    assert client.segment_of(waited, 2, "r").output_ids == [1, 2]
    client.version = client.newest = 5
    client._record_same(6)
    later = answer([1, 2], [("6", 0, 2)])
    assert client.segment_of(later, 5, "r").output_ids == [1, 2]
    assert client.segment_of(later, 4, "r").message == STALE_PREFIX, "other weights were loaded between"


async def test_where_spans_are_not_told_no_request_finds_KV_of_another_if_weights_may_change_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows then whether it waited in the server's queue during the change."""
    client, keys = engine(), []

    async def call(method: str, path: str, body: dict[str, Any], timeout_s: float, *, keep: bool = False) -> Any:
        keys.append(body["extra_key"])
        return answer([1])

    monkeypatch.setattr(client, "call", call)
    for in_place, spans in ((True, True), (False, False), (True, False)):
        client.changes_in_place, client.info = in_place, ServerInfo(reports_spans=spans)
        for rid in ("a", "b"):
            await client.generate([5], {}, rid=rid)
    assert keys[0] == keys[1] == keys[2] == keys[3]
    assert len({keys[0], keys[4], keys[5]}) == 3


async def test_in_place_without_spans_asks_for_complete_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a few tokens each keep the server's tokenizer process busy and limit the rate."""
    client, bodies = engine(reports_spans=False), []

    async def call(method: str, path: str, body: dict[str, Any], timeout_s: float, *, keep: bool = False) -> Any:
        bodies.append(body)
        return answer([1])

    async def stream(body: dict[str, Any], *_: Any) -> Any:
        return await call("POST", "/generate", body, 0)

    monkeypatch.setattr(client, "call", call)
    monkeypatch.setattr(client, "_stream", stream)
    assert (await client.generate([5], {"max_new_tokens": 3072}, rid="a")).versions == [3]
    assert ["stream" in body or "stream_interval" in body["sampling_params"] for body in bodies] == [False]


async def test_no_two_clients_of_a_server_ever_name_a_request_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang aborts what runs under the name of a stream two seconds after its end: a request of a later client too."""
    names = []
    for client in (engine(), engine()):

        async def call(method: str, path: str, body: dict[str, Any], timeout_s: float, *, keep: bool = False) -> Any:
            names.append(body["rid"])
            return answer([1])

        monkeypatch.setattr(client, "call", call)
        await client.prove(1.0)
        await client.generate([5], {}, rid="j/1")
        await client.generate([5], {}, rid="j/10")
    assert len(set(names)) == 6
    assert not any(one.startswith(other) for one in names for other in names if one != other)


async def test_a_sample_has_a_seed_of_its_own_where_the_engine_draws_by_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    client, bodies = engine(), []

    async def call(method: str, path: str, body: dict[str, Any], timeout_s: float, *, keep: bool = False) -> Any:
        bodies.append(body["sampling_params"])
        return answer([1])

    monkeypatch.setattr(client, "call", call)
    client.seed = 7
    await client.generate([5], {"temperature": 1.0}, rid="d/0/0/1")
    client.info = replace(client.info, deterministic=True)
    for seed, rid in ((7, "d/0/0/1"), (7, "d/0/0/1"), (7, "d/0/0/2"), (8, "d/0/0/1")):
        client.seed = seed
        await client.generate([5], {"temperature": 1.0}, rid=rid)
    await client.generate([5], {"temperature": 1.0, "sampling_seed": 7}, rid="d/0/0/1")
    assert bodies[0] == {"temperature": 1.0}
    # Pinned: another number is another run.
    assert bodies[1] == {"temperature": 1.0, "sampling_seed": sample_seed(7, "d/0/0/1")}
    assert sample_seed(7, "d/0/0/1") == 107_011_178
    assert bodies[1] == bodies[2] == bodies[5]
    assert len({body["sampling_seed"] for body in bodies[1:]}) == 3
    assert all(0 <= body["sampling_seed"] < 2**31 for body in bodies[1:])


@pytest.mark.parametrize("ids", [[5, 45], [45], [-1, 5]])
async def test_an_id_that_the_model_does_not_have_never_reaches_the_engine(ids: list[int]) -> None:
    client = engine()
    client.vocab_size = 45
    with pytest.raises(EngineRefused, match="outside the model's vocabulary of 45"):
        await client.generate(ids, {}, rid="a")
    with pytest.raises(EngineRefused, match="outside the model's vocabulary of 45"):
        await client.score([5, *ids], 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"meta_info": {}}, "lacks"),
        ({"text": "hm"}, "lacks"),
        ([], "lacks"),
        (answer([1, 2, 3], output_token_logprobs=[[-0.1, 1, None]]), "1 logprobs for 3 ids"),
        (answer([1, 2], output_token_logprobs=[[-0.1, 2, None], [-0.1, 1, None]]), "not one for each"),
        (answer([1, 2], output_token_logprobs=None), "0 logprobs for 2 ids"),
        (answer([1], output_token_logprobs=[[float("-inf"), 1, None]]), "finite"),
        (answer([1], output_token_logprobs=[[float("nan"), 1, None]]), "finite"),
        (answer([1], output_token_logprobs=[[None, 1, None]]), "finite"),
        (answer([1], finish_reason={"type": "stop", "matched": "NaN happened"}), "finite"),
        (answer([], finish_reason={"type": "other"}), "returned no token, with unknown finish reason 'other'"),
        (answer([1], finish_reason=None), "lacks"),
        (answer([1, 2], [("3", 0, 1)]), "cover 1 of 2"),
        (answer([1, 2], [("3", 1, 2)]), "gap at token 0"),
    ],
)
def test_T6_answers_that_prove_nothing_are_errors(given: Any, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        read(given)


@pytest.mark.parametrize("version", ["default", "2", "5", "x"])
def test_weights_that_are_not_ours_lose_the_engine(version: str) -> None:
    with pytest.raises(EngineDied, match="load the current publication"):
        read(answer([1], [(version, 0, 1)]))
    with pytest.raises(EngineDied, match="load the current publication"):
        read(answer([1], weight_version=version), reports_spans=False)


def test_an_abort_before_the_first_token_is_an_empty_segment() -> None:
    given = answer([], [("3", 0, 0)], finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    del given["meta_info"]["prompt_tokens"]
    segment = read(given)
    assert (segment.output_ids, segment.versions, segment.prompt_tokens) == ([], [], 0)


def test_an_answer_that_ended_for_an_unknown_reason_is_one_that_was_cut_short() -> None:
    drawn = read_generated(answer([1, 2], finish_reason={"type": "content_filter"}), "a/0/0/0", 0)
    assert (drawn.ids, drawn.reason) == ([1, 2], "length")
