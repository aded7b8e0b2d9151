"""The pages' tables of what penstock brings by name: each name that a configuration takes has its row."""

import re
from pathlib import Path
from typing import get_args

import pytest

from penstock.config import TrainerConfig
from penstock.config.code_names import REWARDS
from penstock.weights.transport import TRANSPORTS

DOCS = Path(__file__).parents[2] / "docs"
LOSSES = get_args(TrainerConfig.model_fields["loss"].annotation)


@pytest.mark.parametrize(
    ("page", "head", "names"),
    [
        ("rewards.md", "| `reward.function` |", REWARDS),
        ("consumers.md", "| | loss per token |", LOSSES),
        ("consumers.md", "| `trainer.transport` |", TRANSPORTS),
    ],
    ids=["rewards", "losses", "transports"],
)
def test_each_name_has_its_row(page: str, head: str, names: tuple[str, ...]) -> None:
    table = (DOCS / page).read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0]
    first_cells = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(names)
