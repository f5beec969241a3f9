"""The coordinator of a run: who waits for what, and what each answer is, on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve

from fray.errors import InvalidRequest
from fray.rl.coordinator import Coordinator
from fray.rl.core.run_record import RunPlan
from fray.rl.core.tasks import TaskOrder
from fray.rl.core.validation import ValidationPlan
from fray.rl.core.versions import SyncMode, VersionName
from fray.rl.journal_file import claim_journal
from fray.rl.messages import RunStanding, SampleResult, TaskGrant, TaskResult
from fray.rl.nexrl.experiment_posts import POSTS_LIMIT, ExperimentPost, FetchedPosts, PostQueue

ROWS = [{"number": number} for number in range(4)]
VALIDATION_ROWS = [{"letter": letter} for letter in "ab"]
FIRST = VersionName(0, 0)


def coordinator(directory: Path | None = None, **options: Any) -> Coordinator:
    order = TaskOrder(rows=4, batch_rows=2, repeats=2, epochs=None)
    plan = RunPlan(order, batch_size=4, **{"lease_s": 60.0, **options})
    return Coordinator(plan, ROWS, directory, VALIDATION_ROWS)


def delivered(grant: TaskGrant, content: bytes = b"", version: VersionName = FIRST) -> TaskResult:
    return TaskResult(grant.lease, (SampleResult(((version, 3),), (1.0,), (grant.group_id,), content),))


async def test_a_worker_gets_what_it_asks_for_and_then_waits_for_the_next_weights(autojump_clock: Any) -> None:
    run = coordinator()
    grants = await run.take_tasks("w", 3) + await run.take_tasks("w", 3)
    assert [grant.row["number"] for grant in grants] == [0, 0, 1, 1, 2, 2][: len(grants)]
    with trio.move_on_after(100) as patience:
        await run.take_tasks("w", 3)
    assert patience.cancelled_caught
    assert len(grants) == 4


async def test_a_batch_is_there_when_its_last_sample_is(autojump_clock: Any) -> None:
    run = coordinator()
    grants = await run.take_tasks("w", 4)
    batches: list[Any] = []

    async def train() -> None:
        batches.append(await run.next_batch(0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(train)
        for number, grant in enumerate(grants):
            await trio.testing.wait_all_tasks_blocked()
            assert batches == []
            assert await run.put_results([delivered(grant, bytes([number]))]) == ["success"]
    assert batches[0].groups == ((b"\0", b"\1"), (b"\2", b"\3"))
    assert (await run.status()).waits_for == "update 1 is done with 4 samples"
    version, is_due, target = await run.finish_update(0, 1)
    assert (version, is_due, target) == (VersionName(0, 1), True, VersionName(0, 1))
    assert await run.finish_sync(version)
    assert not await run.finish_sync(version)
    # A process may learn of the servers' new weights after its next tasks.
    assert [grant.version for grant in [*grants, *await run.take_tasks("w", 9)]] == [0] * 4 + [1] * 4


async def test_the_status_says_what_the_slowest_episode_does(autojump_clock: Any) -> None:
    run = coordinator()
    (oldest,) = await run.take_tasks("w", 1)
    await trio.sleep(5)
    (newer,) = await run.take_tasks("other", 1)
    await run.note_slowest("other", newer.lease, "generating")
    text = f"the trainer waits: 0 of 2 groups; slowest: task {oldest.task_id}, 5 s, of w"
    assert (await run.status()).waits_for == text
    await run.note_slowest("w", oldest.lease, "generating")
    assert (await run.status()).waits_for == text.replace("of w", "generating, of w")


async def test_the_tasks_of_a_lost_worker_are_given_to_another_and_its_results_refused(autojump_clock: Any) -> None:
    run = coordinator()
    lost = await run.take_tasks("lost", 4)
    await run.lose_worker("lost")
    found = await run.take_tasks("other", 4)
    assert [grant.task_id for grant in found] == [grant.task_id for grant in lost]
    assert await run.put_results([delivered(grant) for grant in lost]) == ["fail"] * 4
    assert await run.put_results([delivered(grant) for grant in found]) == ["success"] * 4
    assert (await run.status()).repeated == {"worker_lost": 4}


async def test_a_worker_that_was_started_again_gives_back_what_it_had_before(autojump_clock: Any) -> None:
    run = coordinator()
    lost = await run.take_tasks("RolloutProcess-0-x:0:0", 2)
    others = await run.take_tasks("RolloutProcess-1-x:0:0", 2)
    await run.begin_worker("RolloutProcess-0-x:0:0")
    assert (await run.status()).repeated == {}
    await run.begin_worker("RolloutProcess-0-x:1:0")
    assert (await run.status()).repeated == {"worker_lost": 2}
    found = await run.take_tasks("RolloutProcess-0-x:1:0", 2)
    assert [grant.task_id for grant in found] == [grant.task_id for grant in lost]
    assert await run.put_results([delivered(grant) for grant in [*lost, *others]]) == ["fail"] * 2 + ["success"] * 2


async def test_a_lost_worker_that_lives_gets_no_further_tasks(autojump_clock: Any) -> None:
    run = coordinator()
    await run.take_tasks("lost", 1)
    await run.lose_worker("lost")
    assert await run.take_tasks("lost", 4) == []
    assert len(await run.take_tasks("other", 4)) == 4


async def test_a_worker_whose_answer_was_lost_gets_the_same_tasks_and_new_ones_when_their_leases_are_gone(
    autojump_clock: Any,
) -> None:
    run = coordinator()
    lost = await run.take_tasks("w", 2, 1)
    assert await run.take_tasks("w", 2, 1) == lost
    others = await run.take_tasks("w", 1, 2)
    assert others[0].lease not in [grant.lease for grant in lost]
    # The first one, which comes late by another way.
    assert await run.take_tasks("w", 2, 1) == []
    await run.finish_sync(await run.rewind(None, 0))
    again = await run.take_tasks("w", 1, 2)
    assert await run.put_results([delivered(grant, version=VersionName(1, 0)) for grant in again]) == ["success"]


async def test_a_request_for_tasks_that_waits_twice_is_answered_with_the_same_tasks(autojump_clock: Any) -> None:
    run = coordinator()
    held = await run.take_tasks("lost", 4)
    answers: list[Any] = []
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(lambda: _append(answers, run.take_tasks("w", 1, 1)))
        await trio.testing.wait_all_tasks_blocked()
        await run.lose_worker("lost")
    assert [[grant.task_id for grant in one] for one in answers] == [[held[0].task_id]] * 2
    assert len(await run.take_tasks("other", 4)) == 3


async def test_no_lease_of_a_state_that_was_left_is_one_of_a_coordinator_that_starts_later(
    autojump_clock: Any, tmp_path: Path
) -> None:
    run = coordinator(tmp_path)
    await run.finish_sync(await run.rewind(None, 0))
    (before,) = await run.take_tasks("w", 1)
    run = coordinator(tmp_path)
    assert await run.put_results([delivered(before)]) == ["fail"]
    grants = await run.take_tasks("w", 4)
    assert before.lease not in [grant.lease for grant in grants]


async def test_a_lease_expires_and_a_failure_is_counted_and_shown(autojump_clock: Any) -> None:
    run = coordinator(max_attempts=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.expire_leases)
        one, *_ = await run.take_tasks("w", 1)
        assert await run.put_results([TaskResult(one.lease, failure="KeyError", detail="no key")]) == ["fail"]
        assert (await run.status()).last_failure == "KeyError: no key"
        (again,) = await run.take_tasks("w", 1)
        assert (again.task_id, again.attempt) == (one.task_id, 1)
        await trio.sleep(62)
        status = await run.status()
        assert (status.dropped, status.repeated) == ({"timeout": 1}, {"KeyError": 1})
        nursery.cancel_scope.cancel()


async def test_after_the_last_update_workers_wait_and_get_tasks_when_the_run_goes_back(autojump_clock: Any) -> None:
    run = coordinator(steps=1)
    grants = await run.take_tasks("w", 4)
    await run.put_results([delivered(grant) for grant in grants])
    assert await run.next_batch(0) is not None
    await run.finish_update(0, 1)
    assert await run.next_batch(0) is None
    answers: list[Any] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: _append(answers, run.take_tasks("w", 4)))
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        # The trainer was lost while it saved that update.
        await run.finish_sync(await run.rewind(None, 0))
    assert [grant.task_id for grant in answers[0]] == [grant.task_id for grant in grants]


async def test_batches_of_which_nothing_is_learned_are_counted_and_remembered(
    autojump_clock: Any, tmp_path: Path
) -> None:
    run = coordinator(directory=tmp_path, mode=SyncMode.FULLY_ASYNC)
    version = FIRST
    for number in (1, 2):
        await run.put_results([delivered(grant, version=version) for grant in await run.take_tasks("w", 4)])
        assert await run.next_batch(0) is not None
        # Asked twice, as when the first answer was lost.
        for _ in range(2):
            version, *_ = await run.finish_update(0, number, "nothing_to_learn")
        await run.finish_sync(version)
    await run.put_results([delivered(grant, version=version) for grant in await run.take_tasks("w", 4)])
    await run.next_batch(0)
    await run.skip_update(0, 3, "not_finite")
    for one in (run, coordinator(directory=tmp_path, mode=SyncMode.FULLY_ASYNC)):
        status = await one.status()
        assert (status.version, status.trained) == (VersionName(0, 2), 8)
        assert status.skipped == {"nothing_to_learn": 2, "not_finite": 1}


async def test_rows_are_added_while_a_run_is_under_way_and_survive_its_coordinator_and_its_trainer(
    autojump_clock: Any, tmp_path: Path
) -> None:
    async def numbers(run: Coordinator) -> list[int]:
        return [grant.row["number"] for grant in await run.take_tasks("w", 4)]

    run = coordinator(directory=tmp_path, mode=SyncMode.FULLY_ASYNC)
    await run.take_tasks("w", 1)
    # Asked twice, as when the first answer was lost.
    for _ in range(2):
        await run.add_rows("a", [{"number": 10}], in_front=False)
        await run.add_rows("b", [{"number": 20}, {"number": 21}], in_front=True)
    assert await numbers(run) == [20, 20, 21, 21]
    run = coordinator(directory=tmp_path, mode=SyncMode.FULLY_ASYNC)
    assert await numbers(run) == [20, 20, 21, 21]
    # The trainer is lost, and begins again with the model.
    await run.finish_sync(await run.rewind(None, 0))
    assert await numbers(run) == [20, 20, 21, 21]
    assert (await numbers(run))[:2] == [10, 10]


async def test_no_row_is_added_to_a_run_that_does_no_further_update(autojump_clock: Any) -> None:
    run = coordinator(steps=1)
    await run.put_results([delivered(grant) for grant in await run.take_tasks("w", 4)])
    await run.next_batch(0)
    await run.finish_update(0, 1)
    with pytest.raises(InvalidRequest, match="no row can be added: no further update will be done"):
        await run.add_rows("a", [{"number": 10}], in_front=False)


async def test_a_lost_coordinator_continues_with_what_it_has_answered(autojump_clock: Any, tmp_path: Path) -> None:
    run = coordinator(directory=tmp_path)
    grants = await run.take_tasks("w", 4)
    await run.put_results([delivered(grant, grant.task_id.encode()) for grant in grants[:3]])
    run = coordinator(directory=tmp_path)
    assert await run.put_results([delivered(grants[3])]) == ["fail"]
    (again,) = await run.take_tasks("w", 4)
    assert again.task_id == grants[3].task_id
    assert again.lease != grants[3].lease
    await run.put_results([delivered(again, again.task_id.encode())])
    batch = await run.next_batch(0)
    run = coordinator(directory=tmp_path)
    assert batch is not None
    assert await run.next_batch(0) == batch
    assert (
        await run.finish_update(0, 1) == await run.finish_update(0, 1) == (VersionName(0, 1), True, VersionName(0, 1))
    )
    run = coordinator(directory=tmp_path)
    assert await run.finish_update(0, 1) == (VersionName(0, 1), True, VersionName(0, 1))
    assert (await run.status()).trained == 4
    await run.finish_sync(VersionName(0, 1))
    assert len(await run.take_tasks("w", 9)) == 4


async def test_what_a_request_has_loaded_that_waits_is_counted_once_after_a_checkpoint(
    autojump_clock: Any, tmp_path: Path
) -> None:
    # Seed 1075 of tests/rl/actor_simulation.py.
    run, saved = coordinator(tmp_path / "journal"), tmp_path / "saved"
    saved.mkdir()
    grants = await run.take_tasks("w", 4)
    with trio.move_on_after(1) as patience:
        await run.take_tasks("w", 1)
    assert patience.cancelled_caught
    await run.save_record(saved, {})
    await run.put_results([delivered(grants[0])])
    assert (await run.status()).issued == 8
    run = coordinator(tmp_path / "journal")
    assert len(await run.take_tasks("w", 9)) == 3
    status = await run.status()
    assert (status.issued, status.open) == (8, 8)


async def test_a_lost_trainer_continues_from_a_checkpoint_and_the_lost_one_is_refused(
    autojump_clock: Any, tmp_path: Path
) -> None:
    run = coordinator(directory=tmp_path / "journal")

    async def step(line: int, number: int, version: VersionName) -> None:
        grants = await run.take_tasks("w", 9)
        await run.put_results([delivered(grant, grant.task_id.encode(), version) for grant in grants])
        assert await run.next_batch(line) is not None
        made, *_ = await run.finish_update(line, number)
        assert made == VersionName(line, number)
        await run.finish_sync(made)

    await step(0, 1, FIRST)
    saved = tmp_path / "saved"
    saved.mkdir()
    await run.save_record(saved, {})
    await step(0, 2, VersionName(0, 1))
    assert await run.rewind(saved, after=0) == VersionName(1, 1)
    assert await run.rewind(saved, after=0) == VersionName(1, 1)
    for late in (run.next_batch(0), run.finish_update(0, 3), run.skip_update(0, 3, "nan")):
        with pytest.raises(InvalidRequest, match="trainer 0 has been replaced by trainer 1"):
            await late
    run = coordinator(directory=tmp_path / "journal")
    status = await run.status()
    assert (status.version, status.trained, status.waits_for) == (
        VersionName(1, 1),
        4,
        "version 1.1 waits for the servers",
    )
    await run.finish_sync(VersionName(1, 1))
    await step(1, 2, VersionName(1, 1))
    assert await run.rewind(None, after=1) == VersionName(2, 0)
    assert (await run.status()).trained == 0


async def test_a_run_that_stops_trains_the_batch_that_it_has_and_gets_no_other(autojump_clock: Any) -> None:
    run = coordinator()
    grants = await run.take_tasks("w", 4)
    await run.put_results([delivered(grant) for grant in grants])
    batch = await run.next_batch(0)
    await run.stop()
    assert await run.next_batch(0) == batch
    await run.finish_update(0, 1)
    assert await run.next_batch(0) is None


async def test_what_a_run_was_asked_for_survives_its_coordinator_and_not_the_start_of_the_run(tmp_path: Path) -> None:
    def started(start: str) -> Coordinator:
        claim_journal(tmp_path, start)
        order = TaskOrder(rows=4, batch_rows=2, repeats=2, epochs=None)
        return Coordinator(RunPlan(order, batch_size=4), ROWS, tmp_path, start=start)

    run = started("first")
    assert await run.standing() == RunStanding(FIRST, FIRST, None, is_stopping=False)
    await run.want_servers(3)
    await run.stop()
    again = started("first")
    assert await again.standing() == RunStanding(FIRST, FIRST, 3, is_stopping=True)
    assert await again.next_batch(0) is None
    assert await started("second").standing() == RunStanding(FIRST, FIRST, None, is_stopping=False)


async def test_no_task_is_given_out_while_servers_are_missing(autojump_clock: Any) -> None:
    run = coordinator()
    await run.set_routes([], "the run waits for servers: 0 of at least 1 answer")
    assert (await run.status()).waits_for == "the run waits for servers: 0 of at least 1 answer"
    grants: list[Any] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: _append(grants, run.take_tasks("w", 1)))
        await trio.testing.wait_all_tasks_blocked()
        assert grants == []
        await run.set_routes([])
    assert len(grants[0]) == 1


async def test_the_table_of_servers_is_sent_when_it_changes(autojump_clock: Any) -> None:
    run = coordinator()
    number, routes = await run.wait_for_routes(-1)
    assert routes == []
    async with trio.open_nursery() as nursery:
        answers: list[Any] = []
        nursery.start_soon(lambda: _append(answers, run.wait_for_routes(number)))
        await trio.testing.wait_all_tasks_blocked()
        assert answers == []
        await run.set_routes([])
    assert answers == [(number + 1, [])]


async def _append(answers: list[Any], answer: Any) -> None:
    answers.append(await answer)


async def test_a_validation_has_its_own_rows_and_continues_in_a_restarted_coordinator(
    autojump_clock: Any, tmp_path: Path
) -> None:
    validation = ValidationPlan(rows=2, every=1, before=True)
    run = coordinator(tmp_path, validation=validation, mode=SyncMode.FULLY_ASYNC)
    grants = await run.take_tasks("w", 3)
    assert [grant.row.get("letter") for grant in grants] == ["a", "b", None]
    assert [grant.is_validation for grant in grants] == [True, True, False]
    sample = SampleResult(((FIRST, 3),), (0.5,), ("g",), b"content", (("exact", 1.0),))
    assert await run.put_results([TaskResult(grants[0].lease, (sample,))]) == ["success"]

    run = coordinator(tmp_path, validation=validation, mode=SyncMode.FULLY_ASYNC)
    assert await run.put_results([TaskResult(grants[1].lease, (sample,))]) == ["fail"]
    (again, *others) = await run.take_tasks("w", 5)
    assert (again.task_id, again.row) == (grants[1].task_id, {"letter": "b"})
    async with trio.open_nursery() as nursery:
        found: list[Any] = []
        nursery.start_soon(lambda: _append(found, run.next_validation()))
        await run.put_results([delivered(grant) for grant in others])
        await trio.testing.wait_all_tasks_blocked()
        assert found == []
        assert await run.put_results([TaskResult(again.lease, (sample,))]) == ["success"]
    assert found[0].version == FIRST
    assert found[0].metrics == {"val/reward": 0.5, "val/exact": 1.0, "val/samples": 2.0, "val/dropped": 0.0}

    # Training has not waited, but servers keep the version, and so does the next coordinator.
    assert await run.next_batch(0) is not None
    assert await run.finish_update(0, 1) == (VersionName(0, 1), True, FIRST)
    run = coordinator(tmp_path, validation=validation, mode=SyncMode.FULLY_ASYNC)
    assert await run.next_validation() == found[0]
    await run.end_validation(FIRST)
    await run.end_validation(FIRST)
    assert await run.wait_for_target(FIRST) == VersionName(0, 1)
    assert (await run.status()).validated == 2


async def test_workers_stay_for_the_last_validation(autojump_clock: Any) -> None:
    run = coordinator(steps=1, validation=ValidationPlan(rows=2, every=1))
    await run.put_results([delivered(grant) for grant in await run.take_tasks("w", 4)])
    assert await run.next_batch(0) is not None
    version, *_ = await run.finish_update(0, 1)
    assert await run.next_batch(0) is None
    assert await run.finish_sync(version)
    grants = await run.take_tasks("w", 4)
    assert [grant.is_validation for grant in grants] == [True, True]
    await run.put_results([delivered(grant, version=version) for grant in grants])
    assert (await run.next_validation()).version == version
    with trio.move_on_after(100) as patience:
        await run.wait_for_last_validation()
    assert patience.cancelled_caught
    await run.end_validation(version)
    await run.wait_for_last_validation()


async def test_without_validation_data_there_is_none_to_wait_for(autojump_clock: Any) -> None:
    await coordinator().wait_for_last_validation()


async def test_a_run_that_is_asked_to_stop_does_not_wait_for_its_validations(autojump_clock: Any) -> None:
    run = coordinator(validation=ValidationPlan(rows=2, every=1, before=True))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.wait_for_last_validation)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        await run.stop()


async def test_what_workers_post_is_fetched_once_with_their_results_and_has_a_limit(autojump_clock: Any) -> None:
    run, fetched = coordinator(), list[tuple[int, FetchedPosts]]()
    first, second, third = await run.take_tasks("w", 3)

    async def follow() -> None:
        fetched.append(await run.wait_for_posts(0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await run.put_results([delivered(first)])
        await trio.testing.wait_all_tasks_blocked()
        assert not fetched
        queue = PostQueue()
        queue.post("wandb", {"step": 1})
        # Of an attempt that failed, too.
        await run.put_results([TaskResult(second.lease, failure="step_failed", posts=queue.fetch())])
    ((number, posts),) = fetched
    assert [one.values for one in posts.posts] == [{"step": 1}]
    # Their reader was lost: the next one, which does not know the number, gets them, until one says that it has them.
    assert await run.wait_for_posts(0) == (number, posts)
    assert await run.fetch_posts(number) == (number, FetchedPosts())
    assert await run.fetch_posts(0) == (0, FetchedPosts())
    many = FetchedPosts((ExperimentPost("wandb", {}),) * (2 * POSTS_LIMIT), dropped=5)
    await run.put_results([evolve(delivered(third), posts=many)])
    _, found = await run.fetch_posts(number)
    assert (len(found.posts), found.dropped) == (POSTS_LIMIT, POSTS_LIMIT + 5)
