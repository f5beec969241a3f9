"""Reinforcement learning example: environments, learning, actors, and complete runs on `LocalClient`."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fray.v2 import Entrypoint, JobRequest, JobStatus, LocalClient, wait_all

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import rl
import rl_actors
import rl_policy
import rl_worlds
from rl_actors import Curriculum, WeightCoordinator
from rl_worlds import LESSONS, Grid

# Environments --------------------------------------------------------------------------------------------------------


def test_a_step_into_a_wall_or_out_of_the_map_has_no_effect_and_the_goal_ends_the_episode() -> None:
    grid = Grid(("S#", ".G"), limit=4)
    rng, start = np.random.default_rng(0), np.zeros(4, dtype=np.int64)
    after = grid.step(rng, start, np.arange(4))  # up, right, down, left
    assert after.state.tolist() == [0, 0, 2, 0]
    assert after.over.tolist() == [False] * 4
    home = grid.step(rng, after.state[2:3], np.array([1]))
    assert (home.over.tolist(), home.won.tolist(), home.reward.tolist()) == ([True], [True], [0.98])


def test_a_view_contains_the_direction_of_the_goal_and_the_blocked_ways_in_every_grid() -> None:
    small, large = Grid(("S.", ".G"), limit=4), Grid(("S..", "...", "..G"), limit=4)
    assert small.views(np.array([0])) == large.views(np.array([0]))
    assert small.views(np.array([0])) != small.views(np.array([1]))


def test_every_goal_can_be_reached_from_every_start_within_the_limit() -> None:
    for lesson in LESSONS[1:]:
        grid = lesson.world
        assert isinstance(grid, Grid)
        near = {grid._goal}
        for _ in range(grid.limit):
            near |= {place for place in range(grid.places) if set(grid._next[place]) & near}
        assert set(grid._starts) <= near


def test_places_of_different_lessons_are_different_features() -> None:
    seen = [rl_worlds.features(n, np.arange(one.world.places))[:, 1].tolist() for n, one in enumerate(LESSONS)]
    every = [feature for lesson in seen for feature in lesson]
    assert len(set(every)) == len(every)
    assert max(every) == rl_worlds.count_features() - 1


# Learning ------------------------------------------------------------------------------------------------------------


def test_one_process_learns_all_lessons_and_forgets_none() -> None:
    rng, weights = np.random.default_rng(1), rl_policy.untrained()
    for lesson, one in enumerate(LESSONS):
        for version in range(400):
            batch = rl_policy.play(weights, version, lesson, rng, 32)
            weights = rl_policy.improved(weights, batch)
            if version % 10 == 9 and rl_policy.success_rate(weights, lesson) >= max(0.9, one.passing):
                break
    rates = [rl_policy.success_rate(weights, lesson) for lesson in range(len(LESSONS))]
    assert min(rates) >= 0.9
    assert rl_policy.success_rate(rl_policy.untrained(), len(LESSONS) - 1) < 0.05


def test_better_than_expected_actions_become_more_likely_and_importance_weights_are_limited() -> None:
    before, seen = rl_policy.untrained(), np.array([[0, 200]])
    batch = rl_policy.Batch(1, 0, seen, np.array([2]), np.array([0.25]), np.array([1.0]), episodes=1, won=1)
    after = rl_policy.improved(before, batch)
    assert after.chances(seen)[0].argmax() == 2
    assert before.chances(seen)[0].tolist() == [0.25] * 4, "the old weights are unchanged, as others read them"
    rare = rl_policy.Batch(1, 0, seen, np.array([2]), np.array([0.001]), np.array([1.0]), episodes=1, won=1)
    gained = rl_policy.improved(before, rare).chances(seen)[0, 2] - 0.25
    assert gained < 3 * (after.chances(seen)[0, 2] - 0.25), "250 times as likely counts twice"


def test_returns_are_sums_of_later_rewards() -> None:
    returns = rl_policy.discounted(np.array([[0.0], [0.0], [1.0]]))
    assert returns[:, 0] == pytest.approx([rl_policy.DISCOUNT**2, rl_policy.DISCOUNT, 1.0])


# Decisions -----------------------------------------------------------------------------------------------------------


def test_the_curriculum_advances_by_the_last_episodes_of_the_current_lesson_only() -> None:
    curriculum, window = Curriculum([("easy", 0.5), ("hard", 0.9)]), rl_actors.WINDOW
    curriculum.report(0, window - 1, window - 1)
    assert curriculum.standing() == []
    curriculum.report(0, 32, 0)
    assert [one["lesson"] for one in curriculum.standing()] == ["easy"]
    assert {curriculum.sample_lesson(seed) for seed in range(100)} == {0, 1}
    curriculum.report(0, window, window)  # a repeated lesson, or a late report
    curriculum.report(1, window, window // 2)
    curriculum.report(1, window, int(0.95 * window))  # the first ones no longer count
    assert curriculum.over()
    assert curriculum.standing()[1]["episodes"] == 2 * window


def empty_batch(version: int = 0) -> Any:
    return rl_policy.play(rl_policy.untrained(), version, 0, np.random.default_rng(0), 4)


def test_push_waits_for_room_and_returns_when_the_coordinator_is_closed() -> None:
    with LocalClient() as client:
        coordinator = client.create_actor(WeightCoordinator, rl_policy.untrained(), room=1, name="rl-test-weights")
        assert [coordinator.begin(0), coordinator.begin(0)] == [1, 2]
        assert coordinator.push(0, empty_batch())
        second, third = coordinator.push.remote(0, empty_batch()), coordinator.push.remote(0, empty_batch())
        with pytest.raises(TimeoutError):
            second.result(timeout=0.05)
        assert len(coordinator.pull(10)) == 1
        coordinator.close()
        assert sorted([second.result(timeout=10), third.result(timeout=10)]) in ([False, False], [False, True])
        assert coordinator.pull(10) is None


def test_weights_are_fetched_by_version_and_an_old_version_is_ignored() -> None:
    coordinator = WeightCoordinator(rl_policy.untrained(), room=1)
    newer = rl_policy.improved(rl_policy.untrained(), empty_batch())
    coordinator.publish(2, newer)
    coordinator.publish(1, rl_policy.untrained())
    assert coordinator.fetch(0) == (2, newer)
    assert coordinator.fetch(2) is None


# Complete runs -------------------------------------------------------------------------------------------------------


def test_training_on_threads_leaves_no_thread_alive(capsys: Any) -> None:
    before = set(threading.enumerate())
    assert rl.main(["--client", "local", "--rollouts", "3", "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert [one["lesson"] for one in report["lessons"]] == [one.name for one in LESSONS]
    last = report["lessons"][-1]
    assert last["trained"] >= 0.9 > 0.05 > last["untrained"]
    assert min(one["trained"] for one in report["lessons"]) >= 0.85
    assert [one["begun"] for one in report["rollouts"]] == [1, 1, 1]
    assert [status for name, status in report["jobs"].items() if "rollout" in name] == ["stopped"] * 3
    assert report["versions"] > 50
    assert said.err.count("passed") == len(LESSONS)
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(timeout=2)
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_a_failed_job_ends_the_others_and_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(lesson: int, *_: Any) -> Any:
        raise LookupError("no such world")

    monkeypatch.setattr("rl_jobs.play", broken)
    with LocalClient() as client, pytest.raises(LookupError, match="no such world"):
        rl.run(client, rl.arguments(["--client", "local"]), lambda line: None)


def test_the_step_limit_ends_the_example_with_status_1(capsys: Any) -> None:
    assert rl.main(["--client", "local", "--versions", "5"]) == 1
    assert "never passed" in capsys.readouterr().out


def test_wait_all_of_jobs_that_were_terminated_returns_at_once() -> None:
    """Terminate and wait, as the example does when its trainer has ended."""
    enough = threading.Event()
    with LocalClient() as client:
        jobs = [client.submit(JobRequest(f"wait-{n}", Entrypoint.from_callable(enough.wait))) for n in range(3)]
        for job in jobs:
            job.terminate()
        assert wait_all(jobs, timeout=5, raise_on_failure=False) == [JobStatus.STOPPED] * 3
        enough.set()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rollouts", "0"], "--rollouts must be 1 or more"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["--client", "local", "--kill-rollout"], "add --client machine"),
        (["--client", "nonsense"], "expected one of local, machine, fray://host:port"),
    ],
)
def test_invalid_options_print_one_line_and_exit_with_2(arguments: list[str], says: str, capsys: Any) -> None:
    try:
        status = rl.main(arguments)
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
