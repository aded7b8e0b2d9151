"""docs/configuration.md is what the models say, and says something of every key."""

from pathlib import Path

from tests.reference.configuration import page

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert page() == PAGE.read_text(), "run `make reference`"


def test_every_key_is_explained() -> None:
    assert not [line for line in page().splitlines() if line.endswith("|  |")]


def test_defaults_and_limits_are_those_of_yaml() -> None:
    text = page()
    for cell in ("None", "True", "False", "MAX_", "Field("):
        assert f"`{cell}" not in text
    assert "=True" not in text, "a model stands in a table as Python shows it"
    assert "| `trainer` |" not in text, "sections have tables of their own"
    assert "| `bucket_bytes` | integer > 0 | `1073741824` |" in text
    assert "| `n` | integer >= 1, <= 65536 | `null` |" in text
    assert "| `require_aof` | true or false | `true` |" in text
