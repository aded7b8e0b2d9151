"""The words that verbs write and compare are those of the enumerations."""

import re

from penstock.names import Lane
from penstock.records.job import JobFailure, JobState, TryEnd
from penstock.redis.lua_scripts import definitions

#: All verbs but those of transfers of weights, whose states are their own.
VERBS = {name: one.comment + one.code for name, one in definitions().items() if not name.startswith("transfer_")}


def words(pattern: str) -> set[str]:
    return {word for text in VERBS.values() for word in re.findall(pattern, text)}


def test_verbs_write_every_state_of_a_job_and_no_other() -> None:
    assert words(r"'HSET', [^\n]*'st', '(\w+)'") == set(JobState)


def test_verbs_compare_states_with_those_that_are_written() -> None:
    compared = words(r"(?:\bst|'st'\)) [=~]= '(\w+)'")
    assert {JobState.READY, JobState.LEASED} <= compared <= set(JobState)


def test_verbs_compare_lanes_with_those_there_are() -> None:
    compared = words(r"\b(?:lane|home) [=~]= '(\w+)'")
    assert {Lane.TRAIN, Lane.SUSPECT} <= compared <= set(Lane)


def test_verbs_bury_for_a_reason_that_is_known() -> None:
    assert words(r"\bbury\(\w+, \w+, \w+, '(\w+)'") == {JobFailure.CRASHED}


def test_verbs_end_tries_in_every_way_there_is_and_no_other() -> None:
    ends = words(r"\b(?:end_try|withdraw)\(\w+(?:\([^)]*\))?, (?:job, )?'(\w+)")
    assert ends == set(TryEnd) - {TryEnd.OPEN, TryEnd.COMMITTED}, "a try that committed has no end of its own"
