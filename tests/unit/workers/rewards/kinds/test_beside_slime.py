"""The table's verdicts of slime on instructions, by slime itself.

Needs ``SLIME_SOURCE=/path/to/slime``, a checkout of IFBench beside it, which slime would else fetch, and nltk's
punkt_tab.
"""

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.workers.rewards.kinds.cases import INSTRUCTIONS, RAISES, Case

SOURCE = Path(os.environ.get("SLIME_SOURCE", "nowhere")).absolute()
pytestmark = pytest.mark.skipif(
    not (SOURCE.is_dir() and (SOURCE.parent / "IFBench").is_dir()),
    reason="SLIME_SOURCE names no checkout of slime with IFBench beside it, and CI has neither",
)


@pytest.fixture(scope="module")
def slime() -> Any:
    spec = importlib.util.spec_from_file_location("slime_ifbench", SOURCE / "slime/rollout/rm_hub/ifbench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", [one for one in INSTRUCTIONS if one.reward == "ifbench"], ids=lambda case: case.text)
def test_the_table_says_what_slime_says(slime: Any, case: Case) -> None:
    random.seed(0)  # a checker draws what it is not told
    wanted = case.verdict if case.slime is None else case.slime
    try:
        found = slime.compute_ifbench_reward(case.text, case.label, dict(case.metadata) or None)
    except Exception:  # slime's rollout ends with any
        found = RAISES
    assert found == wanted
