"""Campaigns run seeds that a commit decides, for a limited time; steps are checked as far as they concern something."""

from __future__ import annotations

import pytest

from fray.testing.invariants.check import check, check_changed
from tests.simulation import fresh_seeds
from tests.simulation.commands import main
from tests.simulation.progress import Progress
from tests.simulation.scenario_plans import direct_plan
from tests.support.scheduler import Cluster, job

PLAN = direct_plan(["value job"], [], machines=2)


def test_seeds_of_a_commit_are_the_same_each_time_and_of_no_other_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = {}
    for commit in ("c0ffee000" + "1" * 31, "c0ffee001" + "1" * 31, ""):
        monkeypatch.setattr(fresh_seeds, "_commit", lambda commit=commit: commit)
        first, source = fresh_seeds.first_fresh_seed()
        assert fresh_seeds.first_fresh_seed() == (first, source)
        blocks[source] = range(first, first + fresh_seeds.BLOCK)
    assert [*blocks][:2] == ["commit c0ffee000", "commit c0ffee001"]
    assert len({seed for block in blocks.values() for seed in block}) == 3 * fresh_seeds.BLOCK


def test_fresh_seeds_are_printed_with_their_commit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.run.draw_plan", lambda rng: PLAN)
    monkeypatch.setattr("tests.simulation.commands.draw_directed", lambda seed, name: PLAN)
    monkeypatch.setattr(fresh_seeds, "_commit", lambda: "000000007" + "0" * 31)
    assert main(["--fresh", "2"]) == 0
    printed = capsys.readouterr().out
    assert "seeds 7000-7001, derived from commit 000000007\n" in printed
    assert "\n2 seeds, 0 broken" in printed


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_campaign_whose_time_is_over_begins_no_seed_and_says_how_many_are_missing(
    jobs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seeds", "0-999", "--jobs", str(jobs), "--limit-s", "0"]) == 0
    printed = capsys.readouterr().out
    assert "0 seeds, 0 broken" in printed
    assert "of 1000 seeds 1000 were not run: the limit was 0 s" in printed


def test_a_line_of_status_comes_every_so_many_seconds_if_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 4.0, 5.0, 9.0, 11.0])
    progress = Progress(5.0, clock=lambda: next(times))
    for count in range(1, 5):
        progress.show(f"{count} seeds")
    assert capsys.readouterr().err == "5 s: 2 seeds\n11 s: 4 seeds\n"


def test_no_status_is_written_to_what_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1000.0])
    Progress(clock=lambda: next(times)).show("1 seed")
    assert capsys.readouterr().err == ""


def test_after_a_step_the_nodes_that_it_concerns_are_checked_and_the_others_with_everything() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for name in ("n1", "n2"):
        scheduler.node(name)
    scheduler.launch(job("a"))
    state = scheduler.state
    scheduler.save()
    state.touch("attempt", "a:0:0")
    assert check_changed(state) == []
    where = state.attempts["a:0:0"].node
    other = "n1" if where == "n2" else "n2"
    state.pool.machines[other].cpu_milli -= 1
    assert check_changed(state) == []
    assert check(state) == [f"the pool differs on node {other}"]
    state.pool.machines[where].cpu_milli -= 1
    assert check_changed(state) == [f"the pool differs on node {where}"]
