"""Deliberate bugs: their patches apply, and one that does not says so by name."""

from __future__ import annotations

import pytest

from fray.node import reconcile
from tests.simulation import mutants
from tests.simulation.directed_plans import draw_directed
from tests.simulation.mutants import MUTANTS, Mutant, PatchDoesNotApply, applied
from tests.simulation.run import run_seed


@pytest.mark.parametrize("name", MUTANTS)
def test_a_patch_applies_and_is_taken_back(name: str) -> None:
    function = mutants._function(name, MUTANTS[name])
    before = function.__code__
    with applied(name, MUTANTS[name]):
        assert function.__code__ != before
    assert function.__code__ is before


@pytest.mark.parametrize(
    "mutant",
    [
        Mutant("fray.node.reconcile:_act_on_observed", "return Halt()", "return None"),
        Mutant("fray.node.reconcile:_act_on_observed", "return", "pass"),
        Mutant("fray.node.reconcile:act_no_more", "return", "pass"),
        Mutant("fray.node.reconcile_no_more:decide", "return", "pass"),
    ],
    ids=["other source", "twice", "no function", "no module"],
)
def test_a_patch_that_no_longer_applies_fails_by_name(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PatchDoesNotApply, match="'an old bug' no longer applies"), applied("an old bug", mutant):
        pass
    monkeypatch.setattr(mutants, "MUTANTS", {"an old bug": mutant})
    assert mutants.main([]) == 2
    assert "the deliberate bug 'an old bug' no longer applies" in capsys.readouterr().err


def test_a_bug_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--only", "ignores orders to stop", "--seeds", "3"]) == 0
    assert "a node ignores orders to stop: seed 1: P" in capsys.readouterr().out
    assert "None" not in reconcile._act_on_observed.__code__.co_names


@pytest.mark.parametrize(
    ("name", "violation"),
    [
        ("busy devices are given to jobs", "the controller withholds [] of"),
        ("a node ends nothing that is not desired", "was given up: the node"),
        ("a node keeps its attempts for 10 minutes longer than its lease", "processes on"),
        ("a call that is sent again runs again", "was executed twice by"),
    ],
)
def test_a_bug_that_a_directed_scenario_shows_is_found_by_its_check(name: str, violation: str) -> None:
    with applied(name, MUTANTS[name]):
        result = run_seed(0, plan=draw_directed(0, MUTANTS[name].directed))
    assert any(violation in breach.text for breach in result.breaches)
