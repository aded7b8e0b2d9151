"""Causes of waits: each has a kind and a text, travels as name and fields, and is listed in docs/internals/waits.md."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.errors import ProtocolError
from penstock.records.cause import EDGE, END, MAX_ENTRIES, MAX_NAME, MAX_TEXT, Cause, Unknown, field_names
from penstock.records.causes import MAX_USER_TEXT, REGISTRY, BatchNotCut, GateClosed, UserWait, decode, user_wait
from penstock.records.worker_causes import CodeCalled, EngineStarting, RoomOnDisk, ServiceCalled
from tests.reference.waits import page, sample

ROOT = Path(__file__).parents[4]
CAUSES = [one for one in REGISTRY.values() if one is not Unknown]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda one: one.name)
def test_every_cause_has_a_kind_a_text_and_a_label_and_travels_unchanged(cause: type[Cause]) -> None:
    one = sample(cause)
    assert "{" not in str(one)
    assert one.words()
    assert len(cause.name) <= MAX_NAME
    assert bool(cause.action) == (cause.kind is END), "what a person does about it"
    assert cause.kind is not EDGE or one.part is not None
    assert set(cause.subject) <= set(field_names(cause))
    assert decode(one.name, one.fields(), "it") == one


def test_the_page_is_current() -> None:
    assert page() == (ROOT / "docs" / "internals" / "waits.md").read_text(), "run `make reference`"


def test_the_staleness_limit_is_named_with_its_places() -> None:
    said = "trainer:actor to publish (blocked by the staleness limit: 160 of 160 groups in flight)"
    assert str(GateClosed("actor", 160, 160)) == said


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("of_tomorrow", {"gpu": 3, "who": ["a", "b"], "counts": {"a": 1}}),
        ("batch_not_cut", {"subscription": "actor"}),
        ("batch_not_cut", {"subscription": "actor", "batch": "3"}),
        ("unknown", {"cause": "x"}),
    ],
)
def test_a_cause_that_this_version_does_not_know_is_kept_with_its_fields(name: str, fields: dict[str, Any]) -> None:
    one = decode(name, fields, "it")
    assert isinstance(one, Unknown)
    assert (one.name, one.fields()) == (name, fields)
    assert str(one).startswith(f"{name} (")


def test_a_field_of_a_later_version_is_left_out() -> None:
    assert decode("batch_not_cut", {"subscription": "a", "batch": 3, "eta_s": 1.5}, "it") == BatchNotCut("a", 3)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (3, {}),
        ("x" * (MAX_NAME + 1), {}),
        ("x\ny", {}),
        ("x", []),
        ("x", {"a\nredis": 1}),
        ("x", {f"a{i}": 1 for i in range(MAX_ENTRIES + 1)}),
        ("x", {"a": [1] * (MAX_ENTRIES + 1)}),
        ("x", {"a": [[1]]}),
        ("x", {"a": {"b": {}}}),
        ("x", {"a": float("nan")}),
        ("x", {"a": 2**70}),
        ("x", {"a": b"1"}),
    ],
)
def test_what_exceeds_the_bounds_is_refused(name: Any, fields: Any) -> None:
    with pytest.raises(ProtocolError, match=r"^it has"):
        decode(name, fields, "it")


def test_an_unknown_cause_is_one_line_of_bounded_length() -> None:
    words = str(decode("of_tomorrow", {f"a{i}": "x\ny" * 1000 for i in range(MAX_ENTRIES)}, "it"))
    assert "\n" not in words
    assert len(words) < MAX_TEXT + 10


def test_texts_are_bounded_and_hold_no_password() -> None:
    url = "sftp://me:hushhush@store/deltas"
    assert "hushhush" not in str(RoomOnDisk(f"no answer of {url}").fields())
    assert ServiceCalled("judge", url).fields()["url"] == url.replace("hushhush", "***")
    assert len(decode("room_on_disk", {"error": "x" * 9999}, "it").fields()["error"]) < MAX_TEXT + 10


#: Values that a record of a cause may hold, whoever wrote it.
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2.5,
    2**64 - 1,
    "x",
    "{bad}",
    "",
    [],
    ["a"],
    [1, None],
    {},
    {"a": 1},
    {"a": "b"},
)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_I8_whatever_fields_a_cause_has_it_can_be_shown(name: str) -> None:
    """One record must not keep `penstock why` from showing the others."""
    draw = Random(name)
    for _ in range(500):
        fields = {field: draw.choice(VALUES) for field in field_names(REGISTRY[name]) if draw.random() < 0.9}
        cause = decode(name, fields, "A wait")
        assert isinstance(str(cause), str)
        assert decode(cause.name, cause.fields(), "A wait") == cause
        hash(cause.part)


def test_a_text_of_user_code_is_quoted_and_cut() -> None:
    """It must not be taken for a text of penstock, nor fill the screen."""
    cause = user_wait("the gate; restart Redis " + "x" * 5000)
    assert isinstance(cause, UserWait)
    assert len(cause.quote) < MAX_USER_TEXT + 10
    assert str(cause).startswith('"the gate; restart Redis xx')
    assert str(cause).endswith("x\" (reported by the trainer's own code)")
    assert len(str(decode("user_wait", {"quote": "x" * 3000}, "it"))) < MAX_USER_TEXT + 100, "whoever wrote it"


def test_the_code_that_is_called_and_the_phase_of_a_start_are_fields() -> None:
    assert str(CodeCalled("step", "m:Env", "sample", "d/0/0/1", more=2)) == (
        "step of environment m:Env of sample d/0/0/1, and 2 more"
    )
    assert CodeCalled("reward", "math", "group", "d/0/0").label == "group d/0/0: reward math"
    assert str(EngineStarting("weights", 50)) == "its engine to start: loading weights (50 %)"
    assert str(EngineStarting()) == "its engine to start"
    assert isinstance(decode("engine_starting", {"phase": "dancing"}, "it"), Unknown)
