"""The table of modes: what the configuration, the policy and the documentation say of each."""

import re
from pathlib import Path

import pytest

from penstock.config import StalenessConfig
from penstock.config.staleness import MODES, Mode, OnExpiry
from penstock.protocol.staleness import Policy

CONCEPTS = Path(__file__).parents[4] / "docs" / "concepts.md"


def rows_of(title: str) -> list[list[str]]:
    """Cells of the table below the line that begins so."""
    lines = CONCEPTS.read_text().partition(title)[2].splitlines()[2:]
    end = next(at for at, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


@pytest.mark.parametrize("mode", Mode)
def test_T5_the_configuration_and_the_policy_follow_the_table_of_modes(mode: Mode) -> None:
    rules, config = MODES[mode], StalenessConfig(mode=mode)
    assert config.bound == (4 if rules.bound is None else rules.bound)
    for filtered, sampler in ((False, rules.sampler), (True, rules.filtered_sampler)):
        policy = Policy.of(config, filtered=filtered)
        assert policy == Policy(mode, config.bound, rules.on_expiry, sampler)


def test_the_documentation_has_the_table_of_modes() -> None:
    told = {name: (bound, on_expiry, sampler) for name, bound, on_expiry, sampler, _ in rows_of("| `staleness.mode` ")}
    assert told == {
        f"`{mode}`": (
            "`staleness.bound`" if rules.bound is None else str(rules.bound),
            f"`{rules.on_expiry}`",
            f"`{rules.sampler}`",
        )
        for mode, rules in MODES.items()
    }
    assert [re.findall("`([a-z]+)`", name)[0] for name, _, _ in rows_of("| `staleness.on_expiry` ")] == list(OnExpiry)
