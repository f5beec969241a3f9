"""Fixtures of the network laboratory: a laboratory per test, and times that are promised, measured and printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define

from tests.network.laboratory import Laboratory
from tests.network.namespaces import reason_to_skip

TIME = "time of a scenario"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    """An empty laboratory; it ends with all its hosts after the test."""
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    with Laboratory(tmp_path) as laboratory:
        yield laboratory


@define
class Times:
    """Measured times of one test, checked against what the design promises, with slack for a busy machine."""

    node: pytest.Item

    def check(self, what: str, took_s: float, at_most_s: float) -> None:
        """Record a time, for the summary of the run, and fail if it is too long."""
        self.node.user_properties.append((TIME, f"{took_s:7.2f} s (at most {at_most_s:g}): {what}"))
        assert took_s <= at_most_s, f"{what} took {took_s:.2f} s; the design promises at most {at_most_s:g} s"


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Times:
    """Times of this test. These tests alone assert times: the times are what is promised."""
    return Times(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        text
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, text in report.user_properties
        if name == TIME
    ]
    if lines:
        terminalreporter.section("network laboratory: measured times")
        terminalreporter.write_line("\n".join(str(line) for line in lines))
