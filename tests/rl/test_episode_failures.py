"""Failures of episodes end a run when it cannot progress, or as its policy says."""

from __future__ import annotations

import pytest

from fray.rl.core.failures import OnError
from fray.rl.core.run_record import RunPlan
from fray.rl.core.run_state import RunState
from fray.rl.core.tasks import TaskOrder
from fray.rl.core.trajectory_store import Sample
from fray.rl.core.versions import VersionName


def state(on_error: OnError = OnError.STOP_ON_CRITICAL, epochs: int | None = None) -> RunState:
    order = TaskOrder(rows=4, batch_rows=2, repeats=2, epochs=epochs)
    return RunState.new(RunPlan(order, batch_size=4, max_attempts=2, on_error=on_error))


def fail(run: RunState, count: int) -> None:
    for _ in range(count):
        lease = run.take_task("w", 0.0)
        run.fail(lease.number, "KeyError")  # type: ignore[union-attr]


def accept(run: RunState) -> None:
    lease = run.take_task("w", 0.0)
    sample = Sample(lease.task, 0, ((VersionName(0, 0), 1),), (1.0,))  # type: ignore[union-attr]
    run.put(lease.number, [sample], [(lease.task.group_id,)])  # type: ignore[union-attr]


def test_a_run_ends_when_as_many_as_its_first_batch_failed() -> None:
    run = state()
    fail(run, 3)
    assert run.failures.stop_reason == ""
    fail(run, 1)
    assert run.failures.stop_reason == "every episode fails: 4 samples in a row failed since the start"


def test_later_it_ends_when_a_batch_failed_in_all_its_attempts() -> None:
    run = state()
    fail(run, 3)
    accept(run)
    fail(run, 7)
    assert run.failures.stop_reason == ""
    fail(run, 1)
    assert run.failures.stop_reason == "every episode fails: 8 samples in a row failed since a sample was last accepted"


def test_data_that_ends_lets_the_run_end() -> None:
    run = state(epochs=1)
    fail(run, 16)
    assert run.failures.stop_reason == ""
    assert run.record.counts.dropped == {"KeyError": 8}
    assert run.failures.reasons == {"KeyError": 16}


@pytest.mark.parametrize("epochs", [None, 1])
def test_stop_on_error_ends_at_the_first_episode_that_is_out_of_attempts(epochs: int | None) -> None:
    run = state(OnError.STOP_ON_ERROR, epochs)
    fail(run, 1)
    assert run.failures.stop_reason == ""
    fail(run, 1)
    assert run.failures.stop_reason == "task 0-0-0 is out of attempts: attempt 2 failed (KeyError)"


def test_continue_never_ends_a_run() -> None:
    run = state(OnError.CONTINUE)
    fail(run, 100)
    assert run.failures.stop_reason == ""


def test_a_lost_worker_is_no_failure_of_its_episodes() -> None:
    run = state()
    for _ in range(8):
        run.take_task("w", 0.0)
        run.lose_worker("w")
    assert (run.failures.total, run.failures.stop_reason) == (0, "")
