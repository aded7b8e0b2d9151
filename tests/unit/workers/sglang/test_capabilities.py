"""Which release of SGLang can do what."""

import logging

import pytest

from penstock.errors import ConfigError
from penstock.workers.sglang.server_info import release_of, reports_spans


def test_releases_compare_as_numbers() -> None:
    assert release_of("0.5.9") < release_of("0.5.20.post1") < release_of("0.6")
    assert release_of("unknown") == ()


def test_a_release_has_the_row_that_began_before_it() -> None:
    wanted = {"0.5.17": False, "0.5.18": False, "0.5.19": True, "0.5.20.post1": True, "0.5.23.rc1": True}
    assert {version: reports_spans(version) for version in wanted} == wanted


def test_a_newer_release_is_taken_for_the_newest_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert reports_spans("0.5.23.post3")
        assert not caplog.records
        assert reports_spans("0.6.0")
    assert "newer than 0.5.23" in caplog.text


@pytest.mark.parametrize("version", ["0.5.16", "0.4.9", "", "unknown"])
def test_what_is_older_or_no_release_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"needs 0\.5\.17 or later"):
        reports_spans(version)
