"""Each seeded defect is found by the property that must find it, within its faults: `make chaos-defects`, minutes."""

import pytest

from tests.chaos.defects import DEFECTS
from tests.chaos.hunt import hunt

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

#: That every seed finds them is seen by ``python -m tests.chaos.hunt --seeds 1,2,3,4,5``.
SEED = 1


@pytest.mark.parametrize("name", DEFECTS)
def test_a_seeded_defect_is_found(name: str) -> None:
    found = hunt(DEFECTS[name], SEED)

    assert found.found, f"{name} was not found in {found.faults} faults; broken: {found.by or 'nothing'}. {found.words}"
