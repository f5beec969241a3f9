"""Campaigns count what occurred, and name what never did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulation import coverage
from tests.simulation.commands import NOT_COVERED, main
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import direct_plan

PLAN = direct_plan(["value job", "impatient job"], [(2.5, "kill machine", 1.0)], machines=2)


def test_a_scenario_counts_the_rows_that_occurred_in_it() -> None:
    counts = run_seed(1, plan=PLAN).coverage
    rows = set(coverage.all_rows())
    assert set(counts) <= rows, "every count is of a row that a campaign has to reach"
    for row in (
        "job: queued + placed",
        "attempt: desired + starting",
        "node: alive + lost connection",
        "event: LaunchRequested",
        "effect: DesiredAttemptsChanged",
        "job ended: succeeded",
        "attempt ended: succeeded",
        "act: value job",
        "fault: kill machine",
    ):
        assert counts[row] > 0, row
    for row in ("job ended: time_limit", "fault: slow link", "unit: joined + doomed", "event: GroupScaled"):
        assert row in rows
        assert not counts[row], row


def test_a_campaign_names_what_never_occurred_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.run.draw_plan", lambda rng: PLAN)
    path = tmp_path / "coverage.json"
    command = ["--seeds", "1-1", "--coverage", str(path)]
    assert main(command) == NOT_COVERED
    printed = capsys.readouterr().out
    assert "never: fault: slow link\n" in printed
    assert "never: fault: kill machine\n" not in printed
    found = json.loads(path.read_text())
    assert found["counts"]["fault: kill machine"] == 1
    assert found["counts"]["fault: slow link"] == 0
    exempt = {**coverage.EXEMPT, **dict.fromkeys(found["never"], "not needed here")}
    monkeypatch.setattr(coverage, "EXEMPT", exempt)
    assert main(command) == 0
    assert f"{len(exempt)} are exempt, 0 are missing" in capsys.readouterr().out


def test_a_violation_weighs_more_than_what_never_occurred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.run.draw_plan", lambda rng: PLAN)
    monkeypatch.setattr("tests.simulation.checks.final", lambda scenario: scenario.truth.breach("P1", "on purpose"))
    assert main(["--seeds", "1-1", "--coverage", str(tmp_path / "coverage.json")]) == 1


def test_an_exempt_row_that_occurs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "EXEMPT", {"fault: kill machine": "an error in the list"})
    lines = coverage.report({"fault: kill machine": 2}, tmp_path / "coverage.json")
    assert "exempt, and occurred 2 times: fault: kill machine" in lines


def test_a_campaign_fails_at_an_exempt_row_that_occurs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.run.draw_plan", lambda rng: PLAN)
    monkeypatch.setattr(coverage, "EXEMPT", dict.fromkeys(coverage.all_rows(), "an error in the list"))
    assert main(["--seeds", "1-1", "--coverage", str(tmp_path / "coverage.json")]) == NOT_COVERED
    printed = capsys.readouterr().out
    assert "exempt, and occurred 1 times: fault: kill machine" in printed
    assert "0 are missing" in printed


def test_exempt_rows_exist() -> None:
    assert set(coverage.EXEMPT) <= set(coverage.all_rows())


def test_coverage_of_one_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--seed", "1", "--coverage", str(tmp_path / "coverage.json")])
