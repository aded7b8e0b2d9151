"""What a test wrote or failed with is told in characters that can be sent to the process that collects reports.

pytest-xdist ends a whole run with an internal error, and names no test, where a report holds a lone surrogate: tests
of hostile text write such.
"""

from collections.abc import Generator

import pytest


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.sections = [(title, _plain(text)) for title, text in report.sections]
    told = report.longreprtext
    if told != _plain(told):
        report.longrepr = _plain(told)
    return report
