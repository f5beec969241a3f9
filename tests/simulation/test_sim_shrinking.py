"""Violations are reduced to short scenarios, which are written to files and run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fray.model.policy.policy import TenantPolicy
from fray.scheduler.jobs import retries
from fray.testing.ground_truth import Violation
from fray.testing.seed import Seed
from tests.simulation import scenario_files
from tests.simulation.code_version import code_version
from tests.simulation.commands import main
from tests.simulation.scenario_plans import direct_plan, draw_plan
from tests.simulation.shrink import NothingToShrink, kind_of, shrink

SEED = 3
PLAN = direct_plan(
    ["stumbling job", "value job", "background job", "gang"] * 10,
    [(2.0, "break connections", 0.1), (6.0, "kill process", 0.1), (9.0, "crash controller", 1.0)],
    every_s=0.5,
    terms=TenantPolicy(weight=3.0),
)


@pytest.fixture
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate bug: jobs are retried at once."""
    monkeypatch.setattr(retries, "restart_delay_s", lambda *arguments: 0.0)


@pytest.fixture
def short_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.commands.draw_plan", lambda rng: PLAN)


@pytest.mark.usefixtures("no_back_off", "short_scenarios")
def test_a_violation_is_reduced_to_a_short_scenario_which_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short"
    assert main(["--seed", str(SEED), "--shrink", str(path)]) == 1
    printed = capsys.readouterr().out
    assert path.read_text() in printed
    assert f"python -m tests.simulation --scenario {path}" in printed
    found = scenario_files.read(path.read_text())
    assert found.expects == "P2: # begins # s after a failure, its back-off is # s"
    assert len(found.plan.acts) <= 2
    assert not found.plan.faults
    assert (len(found.plan.machines), found.plan.drivers, found.plan.terms) == (1, 1, {})
    assert main(["--scenario", str(path)]) == 1
    again = capsys.readouterr().out
    assert "is there\n" in again
    assert "has changed since" not in again


@pytest.mark.usefixtures("no_back_off")
def test_the_time_to_look_for_a_short_scenario_is_limited() -> None:
    found = shrink(SEED, PLAN, limit_s=0.0)
    assert found.plan == PLAN


def test_a_scenario_without_a_violation_is_not_reduced() -> None:
    with pytest.raises(NothingToShrink, match="seed 3 has no violation"):
        shrink(SEED, draw_plan(Seed(SEED).stream("plan"), acts=6, faults=0))


def test_what_differs_between_scenarios_is_no_part_of_the_kind_of_a_violation() -> None:
    texts = ("a72.t-bj2zx:0:1 of stage 1 begins before m0", "a3.t-9x:1:0 of stage 2 begins before m1")
    assert {kind_of(Violation("P6", 1.0, text)) for text in texts} == {"P6: # of stage # begins before #"}
    assert kind_of(Violation("P5", 1.0, texts[0])) == "P5: # of stage # begins before #"


RECORDED = scenario_files.RecordedScenario(SEED, PLAN, "P6: # begins", "ab12")


def test_a_scenario_file_has_the_whole_plan() -> None:
    assert scenario_files.read(scenario_files.write(RECORDED)) == RECORDED


def test_a_scenario_that_ran_with_another_version_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = draw_plan(Seed(SEED).stream("plan"), acts=2, faults=0)
    path = tmp_path / "old"
    path.write_text(scenario_files.write(scenario_files.RecordedScenario(SEED, plan, "P6: #", "", version="0.0.1")))
    assert main(["--scenario", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "(P6: #) is not there any more" in printed
    assert "it was written by Fray 0.0.1, and this is" in printed


def test_a_seed_of_another_version_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = draw_plan(Seed(SEED).stream("plan"), acts=2, faults=0)
    monkeypatch.setattr("tests.simulation.commands.draw_plan", lambda rng: plan)
    assert main(["--seed", str(SEED), "--version", "0.0.1+ab"]) == 0
    assert f"was run by Fray 0.0.1+ab, and this is {code_version()}: " in capsys.readouterr().out
    assert main(["--seed", str(SEED), "--version", code_version()]) == 0
    assert "was run by" not in capsys.readouterr().out


def test_a_violation_says_the_version_of_its_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.commands.draw_directed", lambda seed, name: PLAN)
    monkeypatch.setattr("tests.simulation.checks.final", lambda scenario: scenario.truth.breach("P1", "on purpose"))
    assert main(["--seed", "2", "--directed", "full disk"]) == 1
    assert f"--seed 2 --directed 'full disk' --version {code_version()}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: ["fray scenario 2  #12345678", *lines[1:]], "line 1 is 'fray scenario 2"),
        (lambda lines: [*lines[:2], lines[2].replace("3", "4"), *lines[3:]], "line 3 was edited"),
        (lambda lines: [*lines[:-3], *lines[-2:]], "one before it removed"),
        (lambda lines: lines[:-1], "without its end"),
        (lambda lines: [], "without its end"),
    ],
    ids=["another format", "a changed seed", "a line less", "cut off", "empty"],
)
def test_an_edited_scenario_file_is_refused_with_the_line(
    edit: Callable[[list[str]], list[str]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "edited"
    path.write_text("\n".join(edit(scenario_files.write(RECORDED).splitlines())))
    assert main(["--scenario", str(path)]) == 2
    assert message in capsys.readouterr().err
