"""One description of a subscription: what a configuration means, what Redis holds, and what is read back from there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import StalenessConfig, TrainerConfig
from penstock.config.staleness import Mode, OnExpiry, Sampler
from penstock.config.subscription import ASKED, Definition, Split, SubscriptionConfig, Trait, Unit, fields_with
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.position import Position
from penstock.protocol.staleness import Lineage, Policy

COUNTS = st.integers(1, 10**9)
SHARES = st.floats(0, 1, exclude_min=True)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)
#: What a user may write under ``trainer.subscription``; much of it contradicts itself.
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "share": NAMES, "driving": st.booleans(), "unit": st.sampled_from(Unit), "size": COUNTS,
        "multiple": st.integers(1, 64), "sampler": st.sampled_from(Sampler), "priority": st.text(max_size=20),
        "exponent": st.floats(0, 100), "reuse": st.integers(1, 9), "quota": SHARES,
        "prefetch": st.none() | st.integers(0, 9), "keep_groups": st.integers(0, 10**9),
        "keep_s": st.floats(0, 1e9), "bound": st.none() | st.integers(0, 99),
        "start": st.sampled_from(["oldest", "newest", "completed:7", "version:123456"]),
        "on_expiry": st.sampled_from(OnExpiry), "mask_offpolicy": st.booleans(),
        "mask_truncated": st.booleans(), "split": st.sampled_from(Split),
    },
)  # fmt: skip


def stored(definition: Definition) -> dict[bytes, bytes]:
    return {key.encode(): text.encode() for key, text in definition.fields().items()}


@given(
    given=GIVEN, mode=st.sampled_from(Mode), seed=st.integers(-(2**63) + 1, 2**63 - 1),
    filters=st.lists(st.sampled_from(["nonzero_std", "mine.filters:long"]), unique=True),
    on_error=st.sampled_from(["keep", "drop", "stop"]), roles=st.lists(NAMES, unique=True, max_size=3),
)  # fmt: skip
def test_a_configuration_that_is_accepted_is_read_back_from_redis_as_it_was_written(
    given: dict[str, Any], mode: Mode, seed: int, filters: list[str], on_error: str, roles: list[str]
) -> None:
    try:
        config = SubscriptionConfig.of(given, "actor")
        trainer = TrainerConfig.model_validate({"filter": {"functions": filters, "on_error": on_error}})
        policy = Policy.of(StalenessConfig(mode=mode), filtered=bool(filters))
        definition = policy.definition(trainer, model="policy", seed=seed, subscription=config, roles=roles)
    except ConfigError:
        return
    assert Definition.read(stored(definition), "actor") == definition
    assert definition.roles == tuple(roles)
    for name, value in given.items():
        assert value is None or getattr(definition, name) == value, name


def test_redis_holds_texts_under_the_names_that_they_always_had() -> None:
    definition = Definition(
        lanes=("train", "score"), start="newest", size=4, per_version=3, driving=True, model="policy", quota=0.5
    )
    fields = definition.fields()
    assert fields == {
        "lanes": "train,score", "from": "newest", "size": "4", "per_version": "3", "gb": "12", "driving": "1",
        "model": "policy", "quota": "0.5", "share": "", "unit": "groups", "multiple": "1", "sampler": "fifo",
        "priority": "reward", "exponent": "1.0", "reuse": "1", "prefetch": "", "keep_groups": "0",
        "keep_s": "0.0", "bound": "0", "on_expiry": "mask", "mask_offpolicy": "0", "mask_truncated": "0",
        "split": "balanced", "mode": "async", "seed": "0", "over": "0", "min_first": "0", "filters": "",
        "on_filter_error": "keep", "keep_when_few": "0", "roles": "", "minibatches": "1",
    }  # fmt: skip
    assert Definition(unit=Unit.TOKENS, size=4096, per_version=2).fields()["gb"] == "2", "a guess"


def test_what_nobody_has_set_is_read_as_its_default_and_verbs_fields_are_not_taken_for_it() -> None:
    assert Definition.read({}, "actor") == Definition()
    assert Definition.read({b"size": b"", b"start": b"17", b"cut": b"3", b"set:size": b"1"}, "actor") == Definition()
    half = Definition.read({b"driving": b"1", b"size": b"9", b"keep_groups": b"2"}, "actor")
    assert (half.driving, half.size, half.keep_groups) == (True, 9, 2), "field by field, whatever they mean together"


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        (b"size", b"many", "size: it should be an integer, not 'many'"),
        (b"size", b"0", "size: it should be greater than 0, not '0'"),
        (b"size", b"9" * 19, "size: the value must be at most 9223372036854775807"),
        (b"bound", b"9" * 5000, "bound: it should be an integer with fewer digits, not '9999"),
        (b"quota", b"nan", "quota: it should be a finite number, not 'nan'"),
        (b"keep_s", b"1e999", "keep_s: it should be a finite number, not '1e999'"),
        (b"driving", b"perhaps", "driving: it should be true or false, not 'perhaps'"),
        (b"unit", b"litres", "unit: it should be 'groups', 'samples' or 'tokens', not 'litres'"),
        (b"mode", b"someday", "mode: it should be 'sync', 'one_step' or 'async', not 'someday'"),
        (b"on_expiry", b"\xff\xfe", "on_expiry: it should be 'wait'"),
        (b"lanes", b"train,tarin", r"lanes: no jobs are admitted to \['tarin'\]"),
        (b"lanes", b",", "lanes: no jobs are admitted to"),
        (b"share", b"a b", "share: pool 'a b' is not a name"),
        (b"from", b"yesterday", "start: start 'yesterday' is invalid"),
        (b"priority", b"p" * 20_000, "priority: the value must have at most 16384 characters"),
        (b"filters", b"a:b," * 10_000, "filters: the value must have at most 16384 characters"),
    ],
)
def test_a_field_that_redis_holds_wrongly_is_named(key: bytes, text: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=f"Subscription 'actor' cannot be read from Redis: {said}") as caught:
        Definition.read({b"lanes": b"train", key: text}, "actor")
    assert len(str(caught.value)) < 500


def test_several_wrong_fields_are_told_at_once() -> None:
    with pytest.raises(
        ProtocolError, match=r"size: .*, not 'x'; reuse: .*, not '-1'; correct it with `penstock subs set`"
    ):
        Definition.read({b"size": b"x", b"reuse": b"-1"}, "actor")


def test_what_is_asked_for_is_checked_as_a_whole() -> None:
    bad = {
        "sized: there is no such key": {"sized": 4},
        "lanes: there is no such key": {"lanes": "eval"},
        "use each group once": {"share": "pool", "reuse": 2},
        "cannot be divided": {"share": "pool", "sampler": "cohort"},
        "can never be cut while at most 2 are held": {"size": 4, "keep_groups": 2},
        "can never be cut: at most 65536 fit": {"size": 65537},
    }
    for words, values in bad.items():
        with pytest.raises(ConfigError, match=f"Subscription 'rm' is invalid: .*{words}"):
            SubscriptionConfig.of(values, "rm")
    with pytest.raises(ConfigError, match="a driving subscription requires model"):
        Definition.of({"driving": True}, "rm")
    drives = {"driving": True, "model": "policy", "size": 4}
    alone = {
        "mode sync requires bound 0 for a driving subscription, but bound is 9": {"mode": "sync", "bound": 9},
        "mode one_step requires bound 1 for a driving subscription, but bound is 0": {"mode": "one_step", "bound": 0},
        "mode one_step trains complete cohorts, but sampler is fifo": {"mode": "one_step", "bound": 1},
        "leave trainer.over_sampling_groups out": {"sampler": "cohort", "over": 5},
        "leave trainer.filter.keep_when_few out": {"sampler": "cohort", "keep_when_few": True},
    }
    for words, values in alone.items():
        with pytest.raises(ConfigError, match=f"Subscription 'rm' is invalid: .*{words}"):
            Definition.of({**drives, **values}, "rm")
    first = {"min_first": 32, "size": 32, "bound": 1}
    wide: list[dict[str, Any]] = [
        {}, {"size": 16}, {"size": 8, "per_version": 2}, {"size": 4, "over": 24}, {"size": 4, "bound": 7},
        {"size": 4, "driving": False}, {"unit": "samples", "size": 64}, {"unit": "tokens", "size": 100_000},
        {"size": 4, "share": "pool"}, {"keep_groups": 32},
    ]  # fmt: skip
    for values in wide:
        assert Definition.of({**drives, **first, **values}, "rm").min_first == 32
    narrow: dict[str, dict[str, Any]] = {
        "the gate admits at most 8 groups": {"size": 4},
        "the gate admits at most 31 groups": {"size": 15, "over": 1},
        "the gate admits at most 28 groups": {"size": 7, "per_version": 2},
        "can never be cut while at most 31 are held": {"keep_groups": 31, "size": 16},
    }
    for words, values in narrow.items():
        with pytest.raises(ConfigError, match=f"Subscription 'rm' is invalid: .*{words}"):
            Definition.of({**drives, **first, **values}, "rm")
    for mode, bound in (("sync", 0), ("one_step", 1), ("async", 9)):
        assert Definition.of({**drives, "mode": mode, "bound": bound, "sampler": "cohort"}, "rm").bound == bound
    assert Definition.of({"size": 4, "mode": "sync", "bound": 9}, "rm").bound == 9, "a mode is of who drives"
    policy = Policy.of(StalenessConfig(mode=Mode.ASYNC))
    stepwise = policy.definition(TrainerConfig(batch_groups=4, minibatches=4), model="policy").model_dump()
    with pytest.raises(ConfigError, match=r"a batch of 3 groups, .*, cannot be divided over 4 minibatches"):
        Definition.of({**stepwise, "size": 3}, "rm")
    assert Definition.of({**stepwise, "size": 3, "unit": "samples"}, "rm").size == 3
    evaluation = Definition(lanes=("eval",), mode=ASKED, sampler=Sampler.COHORT, size=10**6)
    assert evaluation.size == 10**6, "as large as what was asked for"


def test_fields_that_may_change_on_a_live_subscription() -> None:
    assert fields_with(Trait.LIVE) == {
        "unit", "size", "multiple", "sampler", "priority", "exponent", "reuse", "quota", "prefetch", "keep_groups",
        "keep_s", "split", "bound", "on_expiry",
    }  # fmt: skip
    assert fields_with(Trait.LIVE_WHERE_ASKED) == {"prefetch", "keep_s", "split"}
    assert fields_with(Trait.POOL) == {
        "lanes", "sampler", "seed", "priority", "exponent", "reuse", "quota", "share", "filters", "on_filter_error",
        "keep_when_few",
    }  # fmt: skip
    assert fields_with(Trait.AGREED) == {"lanes", "bound", "on_expiry", "model", "reuse", "filters", "on_filter_error"}


def test_a_position_is_read_and_a_field_that_no_verb_wrote_is_named() -> None:
    raw = {
        b"ask": b"4", b"cut": b"3", b"cursor": b"2", b"abandoned": b"3-5,9-9", b"repeats": b"6", b"restored": b"1",
        b"drop:filter/zero_std_1.0": b"7", b"rejected_reward": b"-12.5", b"size": b"no matter",
    }  # fmt: skip
    position = Position.read(raw, "actor")
    assert (position.ask, position.cut, position.cursor, position.ckpt) == (4, 3, 2, 0)
    assert (position.restored, position.parked, position.rejected_reward) == (True, False, -12.5)
    assert position.lineage == Lineage(((3, 5), (9, 9)), frozenset({6}))
    assert position.dropped == {"filter/zero_std_1.0": 7}
    for key, value in {"cut": b"two", "drop:stale": b"1e9", "abandoned": b"3-", "rejected_reward": b"nan"}.items():
        with pytest.raises(ProtocolError, match=f"Field {key} of subscription 'actor' is {value!r} in Redis"):
            Position.read({key.encode(): value}, "actor")


def test_groups_are_taken_by_difficulty_only_where_a_bound_makes_all_of_them_due() -> None:
    for over in ({"bound": -1, "model": "policy"}, {"bound": 2}):
        with pytest.raises(ConfigError, match=r"easy and hard groups until they are due.*give it a bound"):
            Definition.of({"sampler": "difficulty", **over}, "reader")
    assert Definition.of({"sampler": "difficulty", "bound": 0, "model": "policy"}, "reader").sampler == "difficulty"
