"""docs/metrics.md is what the code serves."""

from collections import Counter
from pathlib import Path

from tests.reference.metrics import all_series, page

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    assert page() == (ROOT / "docs" / "metrics.md").read_text(), "run `make reference`"


def test_a_name_is_of_one_series() -> None:
    assert [name for name, count in Counter(one.name for one in all_series()).items() if count > 1] == []


def test_every_series_says_what_it_is() -> None:
    assert [one.name for one in all_series() if not one.says.endswith(".")] == []
