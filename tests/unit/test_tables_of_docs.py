"""The pages' tables of what penstock brings or shows by name: each name has its row, and each row its name."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from penstock.config import TrainerConfig
from penstock.config.hooks import REWARDS
from penstock.config.trainer import TRACKERS
from penstock.config.transport import TRANSPORTS
from penstock.console.read.stages import MEANING
from penstock.protocol.tokens import HEARD
from penstock.records.job import TryEnd
from penstock.redis.lua_scripts import LUA

DOCS = Path(__file__).parents[2] / "docs"
LOSSES = get_args(TrainerConfig.model_fields["loss"].annotation)
VERBS = "\n".join(file.read_text() for file in LUA.iterdir())


def accounts() -> set[str]:
    """Names under which verbs book tokens; what follows a colon apart."""
    fates = VERBS.partition("local function fate_of(")[2].partition("\nend\n")[0]
    thrown = VERBS.partition("local THROWN = {")[2].partition("}")[0]
    found = (
        re.findall(r"\bbook\(\w+, [\w\[\]]+, '(\w+)'", VERBS)
        + re.findall(r"\b(?:settle|forgo)\(.*, '(\w+)'\)", VERBS)
        + re.findall(r"\b(?:retire|fate_of)\(.*, '(\w+)(?::\w+)?'\)", VERBS)
        + re.findall(r"\breturn (?:\w+ and )?'(\w+):?'", fates)
        + re.findall(r"\{'(\w+)', (?:trained|lost)\}", VERBS)
        + re.findall(r"\w+", thrown)
    )
    return set(found) - {HEARD}


@pytest.mark.parametrize(
    ("page", "head", "names"),
    [
        ("rewards.md", "| `reward.function` |", REWARDS),
        ("trainer.md", "| | loss per token |", LOSSES),
        ("workers.md", "| `trainer.transport` |", TRANSPORTS),
        ("loop.md", "| | where | after a rewind", TRACKERS),
        ("internals/protocol.md", "| account |", accounts()),
        ("inspection.md", "| end |", set(TryEnd) - {TryEnd.OPEN}),
        ("inspection.md", "| stage of a sample |", MEANING),
    ],
    ids=["rewards", "losses", "transports", "trackers", "accounts", "tries", "stages"],
)
def test_each_name_has_its_row(page: str, head: str, names: Iterable[str]) -> None:
    table = (DOCS / page).read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0]
    first_cells = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)(?:[: ][A-Z]+)?`", first_cells)) == set(names)
