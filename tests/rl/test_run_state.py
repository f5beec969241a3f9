"""Conversations of workers, trainer and servers with the state of a run."""

from __future__ import annotations

from typing import Any

import pytest

from fray.rl.core.failures import OnError
from fray.rl.core.leases import Lease
from fray.rl.core.run_record import RunPlan, StalePolicy
from fray.rl.core.run_state import NoTask, PutAnswer, RunState
from fray.rl.core.tasks import TaskOrder
from fray.rl.core.trajectory_store import ReadyRule, Sample
from fray.rl.core.validation import ValidationPlan
from fray.rl.core.versions import Segment, SyncMode, VersionName


def new_run(rows: int = 8, repeats: int = 2, batch_size: int = 4, batch_rows: int = 2, **plan: Any) -> RunState:
    order = TaskOrder(rows, batch_rows, repeats, **plan.pop("order", {}))
    return RunState.new(RunPlan(order, batch_size, **plan))


def take(state: RunState, worker: str = "w", now: float = 0.0) -> Lease:
    lease = state.take_task(worker, now)
    assert isinstance(lease, Lease), lease
    return lease


def put(
    state: RunState, lease: Lease, *segments: Segment, reward: float = 1.0, score: tuple[tuple[str, float], ...] = ()
) -> PutAnswer:
    made_by = segments or ((state.record.weights.rollout, 4),)
    samples = [Sample(lease.task, run, made_by, (reward + run,), score=score) for run in range(lease.task.samples)]
    return state.put(lease.number, samples, [(lease.task.group_id,)] * len(samples))


def roll_out_all(state: RunState) -> str:
    """Roll out everything that is given out; return the rows, then the reason why there is no more."""
    rows = []
    while isinstance(lease := state.take_task("w", 0.0), Lease):
        rows.append(f"p{lease.task.row}")
        put(state, lease, reward=float(lease.task.repeat))
    return " ".join([*rows, "-", lease.reason])


def update(state: RunState) -> list[str]:
    """Do one update and its sync; return the samples."""
    groups = state.next_batch()
    assert groups, state.wait_reason()
    version = state.finish_update()
    if state.record.weights.to_send is not None:
        assert state.sync(version)
    state.record.counts.check(state.open_samples)
    return [sample.sample_id for group in groups for sample in group.samples]


def test_golden_order_of_the_loader() -> None:
    state = new_run(rows=5, keep_batch_order=True)
    assert roll_out_all(state) == "p0 p0 p1 p1 - the next batch waits for the next weights"
    update(state)
    assert roll_out_all(state) == "p2 p2 p3 p3 - the next batch waits for the next weights"
    update(state)
    assert roll_out_all(state) == "p4 p4 - the next batch waits for the next weights"
    # The last batch is smaller.
    assert update(state) == ["0-4-0/0", "0-4-1/0"]
    assert state.take_task("w", 0.0) == NoTask("no further update will be done")
    assert state.is_done


def test_without_weights_to_sync_the_next_batch_follows_at_once() -> None:
    state = new_run(mode=SyncMode.BATCH_ASYNC, threshold=1, keep_batch_order=True)
    assert roll_out_all(state).startswith("p0 p0 p1 p1 -")
    assert state.next_batch()
    # Update 1 needs no sync: the servers may be one version behind.
    assert roll_out_all(state).startswith("p2 p2 p3 p3 -")
    state.finish_update()
    assert state.next_batch()
    assert state.take_task("w", 0.0) == NoTask("the trainer trains")
    state.finish_update()
    assert state.take_task("w", 0.0) == NoTask("the servers receive weights")
    assert state.wait_reason() == "version 0.2 waits for the servers"
    assert state.sync(VersionName(0, 2))
    assert roll_out_all(state).startswith("p4 p4 p5 p5 -")


def test_rollouts_run_ahead_as_far_as_their_tokens_may_be_old() -> None:
    state = new_run(rows=40, mode=SyncMode.FULLY_ASYNC, threshold=1)
    assert roll_out_all(state) == "p0 p0 p1 p1 p2 p2 p3 p3 - 8 samples are rolled out or not trained yet"
    update(state)
    assert roll_out_all(state) == "p4 p4 p5 p5 - 8 samples are rolled out or not trained yet"


def test_a_worker_taken_for_dead_delivers_in_vain() -> None:
    state = new_run()
    lease = take(state, "w1")
    state.lose_worker("w1")
    again = take(state, "w2")
    assert again.task == lease.task
    assert put(state, lease) is PutAnswer.FAIL
    assert put(state, again) is PutAnswer.SUCCESS
    assert put(state, again) is PutAnswer.FAIL
    assert state.record.counts.repeated == {"worker_lost": 1}


def test_an_expired_lease_is_an_attempt_and_the_last_one_drops_the_task() -> None:
    state = new_run(rows=2, max_attempts=2, lease_s=10.0)
    first = take(state, now=0.0)
    state.expire(9.9)
    assert state.has_lease(first.number)
    state.expire(10.0)
    assert take(state, now=10.0).task == first.task
    state.expire(20.0)
    assert state.record.counts.dropped == {"timeout": 1}
    assert roll_out_all(state).startswith("p0 p1 p1 -")
    # Its group is smaller; the batch is not late.
    assert update(state) == ["0-0-1/0", "0-1-0/0", "0-1-1/0"]


def test_an_episode_that_ends_each_of_its_workers_is_dropped() -> None:
    state = new_run(max_losses=3)
    task = take(state, "w0").task
    state.lose_worker("w0")
    for number in (1, 2):
        assert take(state, f"w{number}").task == task
        state.lose_worker(f"w{number}")
    assert state.record.counts.dropped == {"worker_lost": 1}


def test_a_batch_whose_samples_were_all_dropped_is_skipped() -> None:
    state = new_run(rows=4, keep_batch_order=True, max_attempts=1)
    for _ in range(4):
        state.fail(take(state).number, "error")
    assert state.next_batch() is None
    assert state.record.skipped == {"all_samples_dropped": 1}
    assert roll_out_all(state).startswith("p2 p2 p3 p3 -")


def test_samples_of_old_weights_are_rolled_out_again_with_the_current_ones() -> None:
    state = new_run(rows=40, mode=SyncMode.FULLY_ASYNC, threshold=1)
    late = take(state)
    roll_out_all(state)
    update(state)
    roll_out_all(state)
    update(state)
    assert put(state, late, (VersionName(0, 0), 4)) is PutAnswer.RE_ROLLOUT
    # It is the next to be given out, and has used up no attempt.
    assert take(state).task == late.task
    assert not state.record.attempts


@pytest.mark.parametrize(
    ("policy", "trained"),
    [(StalePolicy.REQUEUE, "again"), (StalePolicy.DROP, "dropped"), (StalePolicy.KEEP, "trained")],
)
def test_a_group_that_became_too_old_in_the_pool(policy: StalePolicy, trained: str) -> None:
    state = new_run(rows=40, repeats=1, batch_size=2, mode=SyncMode.FULLY_ASYNC, threshold=1, stale=policy)
    slow, *others = [take(state) for _ in range(4)]
    for lease in others[:2]:
        put(state, lease)
    update(state)
    put(state, slow)  # of version 0, as the other one that is left
    put(state, others[2])
    update(state) if policy is not StalePolicy.KEEP else None
    roll_out_all(state)
    batch = update(state)
    assert (slow.task.task_id + "/0" in batch) == (trained == "trained") or trained != "trained"
    state.record.counts.check(state.open_samples)


def test_a_lost_version_is_refused_whatever_the_policy() -> None:
    state = new_run(rows=40, mode=SyncMode.FULLY_ASYNC, threshold=4, stale=StalePolicy.KEEP)
    for _ in range(4):
        put(state, take(state))
    checkpoint = state.snapshot()
    update(state)
    resumed = RunState.rewind(checkpoint, 1)
    assert resumed.take_task("w", 0.0) == NoTask("the servers receive weights")
    assert resumed.sync(VersionName(1, 0))
    assert put(resumed, take(resumed), (VersionName(0, 1), 4)) is PutAnswer.RE_ROLLOUT


def test_a_group_that_has_begun_is_finished_before_rows_that_were_added_in_front() -> None:
    state = new_run(rows=8, repeats=2, batch_size=2)
    first = take(state)
    state.add_row(8, in_front=True)
    second = take(state)
    assert second.task.group_id == first.task.group_id
    assert isinstance(state.take_task("w", 0.0), NoTask)


def test_one_episode_may_roll_out_a_whole_group() -> None:
    state = new_run(rows=4, repeats=4, order={"whole_groups": True})
    lease = take(state)
    assert lease.task.samples == 4
    with pytest.raises(ValueError, match="1 samples and 1 keys for a task of 4 samples"):
        state.put(lease.number, [Sample(lease.task, 0, (), (1.0,))], [("g",)])
    assert put(state, lease) is PutAnswer.SUCCESS
    assert update(state) == [f"0-0-0/{run}" for run in range(4)]


def test_groups_with_equal_rewards_are_replaced_and_not_for_ever() -> None:
    state = new_run(rows=40, batch_size=4, drop_equal_rewards=True, max_replaced_groups=2)
    for _ in range(4):
        put(state, take(state), reward=0.0)
    assert state.record.counts.dropped == {"equal_rewards": 4}
    for _ in range(4):
        put(state, take(state), reward=0.0)
    assert len(update(state)) == 4


def test_a_validation_uses_one_version_and_its_rows_never_reach_the_trainer() -> None:
    validation = ValidationPlan(rows=2, every=1, samples=2)
    state = new_run(rows=40, mode=SyncMode.FULLY_ASYNC, threshold=4, validation=validation)
    roll_out_all(state)
    update(state)
    leases = [take(state, worker) for worker in ("w1", "w1", "w1", "w2")]
    assert [(lease.task.row, lease.task.repeat) for lease in leases] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    roll_out_all(state)
    assert state.next_batch()
    state.finish_update()
    assert (state.record.weights.to_send, state.record.weights.target) == (None, VersionName(0, 1))
    for number, lease in enumerate(leases[:3]):
        assert put(state, lease, reward=number, score=(("exact", 1.0 - number),)) is PutAnswer.SUCCESS
    state.end_validation(VersionName(0, 1))
    assert state.complete_validation is None
    state.lose_worker("w2")
    assert put(state, leases[3]) is PutAnswer.FAIL
    assert put(state, take(state), reward=3, score=(("late", 1.0),)) is PutAnswer.SUCCESS
    round_ = state.complete_validation
    assert round_ is not None
    assert round_.version == VersionName(0, 1)
    assert round_.metrics() == {
        "val/reward": 1.5,
        "val/exact": 0.0,
        "val/late": 1.0,
        "val/samples": 4.0,
        "val/dropped": 0.0,
    }
    state.end_validation(VersionName(0, 1))
    assert state.record.weights.to_send == VersionName(0, 2)
    assert state.record.counts.validated == 4
    state.record.counts.check(state.open_samples)


def test_a_validation_is_made_by_no_other_version() -> None:
    state = new_run(validation=ValidationPlan(rows=1, before=True))
    lease = take(state)
    other = Sample(lease.task, 0, ((VersionName(0, 0), 1), (VersionName(0, 1), 1)), (1.0,))
    assert state.put(lease.number, [other], [("g",)]) is PutAnswer.RE_ROLLOUT
    again = take(state)
    assert (again.task, again.number != lease.number) == (lease.task, True)
    assert put(state, again) is PutAnswer.SUCCESS
    round_ = state.complete_validation
    assert round_ is not None
    assert round_.metrics()["val/samples"] == 1


def test_a_validation_whose_tasks_fail_ends_without_them() -> None:
    state = new_run(validation=ValidationPlan(rows=2, before=True, samples=2, whole_groups=True), max_losses=1)
    state.fail(take(state).number, "KeyError")
    state.fail(take(state).number, "KeyError")
    state.fail(take(state).number, "KeyError")
    take(state, "w9")
    state.lose_worker("w9")
    round_ = state.complete_validation
    assert round_ is not None
    assert round_.metrics() == {"val/samples": 0.0, "val/dropped": 4.0}
    assert state.record.counts.dropped == {"KeyError": 2, "worker_lost": 2}
    state.record.counts.check(state.open_samples)


def test_the_run_is_finished_when_its_last_version_is_validated() -> None:
    state = new_run(steps=1, mode=SyncMode.BATCH_ASYNC, validation=ValidationPlan(rows=1, every=1))
    roll_out_all(state)
    assert state.next_batch()
    # Without the validation, the servers of this mode would keep version 0 here.
    assert state.finish_update() == state.record.weights.to_send == VersionName(0, 1)
    assert (state.is_done, state.is_finished) == (True, False)
    assert state.wait_reason() == "the validation of version 0.1 waits for the servers"
    assert isinstance(state.take_task("w", 0.0), NoTask)
    assert state.sync(VersionName(0, 1))
    assert state.wait_reason() == "the validation of version 0.1: 0 of 1 tasks"
    assert put(state, take(state)) is PutAnswer.SUCCESS
    state.end_validation(VersionName(0, 1))
    assert state.is_finished
    assert state.take_task("w", 0.0) == NoTask("no further update will be done")


def test_a_validation_that_the_trainer_did_not_survive_begins_again_with_the_version_it_continues_from() -> None:
    state = new_run(validation=ValidationPlan(rows=1, every=1))
    roll_out_all(state)
    update(state)
    checkpoint = state.snapshot()
    lease = take(state)
    state = RunState.rewind(checkpoint, 1)
    assert state.record.validation is None
    assert put(state, lease) is PutAnswer.FAIL
    assert state.sync(VersionName(1, 1))
    assert put(state, take(state)) is PutAnswer.SUCCESS
    round_ = state.complete_validation
    assert round_ is not None
    assert round_.version == VersionName(1, 1)
    state.record.counts.check(state.open_samples)


def test_a_run_may_continue_without_the_validation_it_had() -> None:
    state = new_run(validation=ValidationPlan(rows=1, before=True))
    record = state.snapshot()
    record.continue_with(new_run().record.plan)
    state = RunState.rewind(record, 1)
    assert state.sync(VersionName(1, 0))
    assert state.record.validation is None
    roll_out_all(state)
    state.record.counts.check(state.open_samples)


def test_what_was_accepted_survives_the_process_and_what_was_leased_is_given_out_first() -> None:
    state = new_run(rows=40, mode=SyncMode.FULLY_ASYNC, threshold=4)
    checkpoint = state.snapshot()
    leases = [take(state) for _ in range(6)]
    for lease in leases[:3]:
        put(state, lease)
    recovered = RunState.recover(checkpoint, state.entries, 1)
    assert [sample.task for sample in recovered.record.store.samples] == [lease.task for lease in leases[:3]]
    assert put(recovered, leases[3]) is PutAnswer.FAIL
    assert [take(recovered).task for _ in range(3)] == [lease.task for lease in leases[3:]]


def test_one_line_says_what_the_trainer_waits_for() -> None:
    state = new_run()
    assert state.wait_reason() == "the trainer waits: 0 of 2 groups"
    take(state, "w7")
    assert state.wait_reason() == "the trainer waits: 0 of 2 groups; slowest: task 0-0-0 of w7"
    roll_out_all(state)
    state.lose_worker("w7")
    roll_out_all(state)
    assert state.next_batch()
    assert state.wait_reason() == "update 1 is done with 4 samples"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"batch_size": 3}, "invalid batch_size 3: expected a multiple of the group_size 2"),
        (
            {"stale": StalePolicy.KEEP},
            "invalid stale policy 'keep' with sync mode 'sync': expected 'requeue' or 'drop'",
        ),
        ({"batch_size": 8, "keep_batch_order": True}, "invalid batch_size 8: a loaded batch has 4 samples"),
        ({"batch_size": 8, "keep_batch_order": True, "rule": ReadyRule.BOTH}, "a loaded batch has 4 samples"),
        ({"threshold": -1}, "threshold"),
        ({"rows": 0}, "rows"),
        ({"order": {"epochs": 0}}, "invalid epochs 0: expected at least 1, or None"),
    ],
)
def test_plans_that_cannot_work_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_run(**plan)


def test_a_failure_that_every_attempt_would_have_drops_the_task_at_once() -> None:
    state = new_run(rows=2, repeats=1, batch_size=2, max_attempts=3, validation=ValidationPlan(rows=1, before=True))
    state.fail(take(state).number, "PromptTooLong", is_final=True)
    assert state.complete_validation is not None
    state.fail(take(state).number, "PromptTooLong", is_final=True)
    put(state, take(state))
    assert state.record.counts.dropped == {"PromptTooLong": 2}
    assert len(update(state)) == 1


def test_a_final_failure_is_no_error_that_ends_a_run_unless_every_episode_has_it() -> None:
    options: dict[str, Any] = {"max_attempts": 1, "on_error": OnError.STOP_ON_ERROR}
    state = new_run(rows=4, repeats=1, batch_size=2, **options)
    state.fail(take(state).number, "PromptTooLong", is_final=True)
    assert not state.failures.stop_reason
    put(state, take(state))
    state.fail(take(state).number, "KeyError")
    assert "is out of attempts: attempt 1 failed (KeyError)" in state.failures.stop_reason
    state = new_run(rows=4, repeats=1, batch_size=2, order={"epochs": None}, **options)
    for _ in range(2):
        state.fail(take(state).number, "PromptTooLong", is_final=True)
    assert "every episode fails: 2 samples in a row" in state.failures.stop_reason


def test_a_task_that_is_rolled_out_again_costs_nothing() -> None:
    state = new_run(rows=1, repeats=1, batch_size=1, batch_rows=1, max_attempts=1)
    for _ in range(3):
        lease = take(state)
        state.roll_out_again(lease.number, "re-rollout")
        state.roll_out_again(lease.number, "re-rollout")
    counts = state.record.counts
    assert (counts.repeated["re-rollout"], counts.dropped) == (3, {})
    counts.check(state.open_samples)


def keyed_run(**plan: Any) -> RunState:
    """Return a run of single samples of rows, which are grouped by twos, four in a batch."""
    return new_run(repeats=1, batch_rows=4, keyed_group_size=2, **plan)


def put_for(state: RunState, lease: Lease, user: str, reward: float = 1.0) -> PutAnswer:
    return state.put(lease.number, [Sample(lease.task, 0, ((state.record.weights.rollout, 4),), (reward,))], [(user,)])


def test_groups_by_keys_have_samples_of_several_rows() -> None:
    state = keyed_run(keep_batch_order=True)
    for user in "abba":
        assert put_for(state, take(state), user) is PutAnswer.SUCCESS
    groups = state.next_batch()
    assert groups is not None
    assert [(group.key, [sample.task.row for sample in group.samples]) for group in groups] == [
        (("a",), [0, 3]),
        (("b",), [1, 2]),
    ]


def test_samples_of_incomplete_groups_take_no_room_of_the_next_tasks() -> None:
    state = keyed_run()
    for user in "abcd":
        put_for(state, take(state), user)
    assert state.next_batch() is None
    assert state.wait_reason() == "the trainer waits: 0 of 2 groups, and 4 samples of incomplete ones"
    leases = [take(state) for _ in range(4)]
    assert isinstance(state.take_task("w", 0.0), NoTask)
    for lease, user in zip(leases, "dcba", strict=True):
        put_for(state, lease, user)
    assert len(update(state)) == 4
    # The others were made by weights that are too old now: they are rolled out again when the batch is made.
    assert state.next_batch() is None
    assert state.record.counts.repeated == {"stale": 4}


def test_groups_that_never_become_complete_are_dropped_and_do_not_fill_the_memory() -> None:
    state = keyed_run(order={"epochs": None})
    for number in range(200):
        put_for(state, take(state), f"only {number}")
        assert state.next_batch() is None
        state.record.counts.check(state.open_samples)
    assert state.record.counts.dropped == {"group_incomplete": 68 * 2}
