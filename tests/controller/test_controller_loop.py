"""The loop saves first; a new controller continues where the old one ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from fray.controller.context import ControllerContext
from fray.controller.loop import BATCH_LIMIT_UNITS, TICK_WAITS_FOR_EVENTS, Loop, anchored_clock, work_of
from fray.controller.store import Store
from fray.controller.workspaces.bundles import BundleStore
from fray.errors import ChannelFull, StoreError
from fray.model.messages.client import (
    ActorEndpoint,
    EndSession,
    Launch,
    ListJobs,
    Names,
    Register,
    Role,
    Watch,
    WatchJobs,
)
from fray.model.messages.node import DesiredState, ObservedState
from fray.model.specs import EndReason, JobState, ObservedAttempt, Outcome, Phase
from fray.net.codec import Kind, blob_id, encode_message
from fray.net.transport import Credential
from fray.scheduler.effects import (
    ControllerStarted,
    Effect,
    Event,
    LaunchRequested,
    NodeReported,
    Refusal,
    Reply,
    SessionLost,
    SessionOpened,
    TerminateRequested,
)
from fray.scheduler.lifecycle import SessionPhase
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.scheduler.views import job_info
from tests.support.controller import spec, stage


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Witnessed(Store):
    """A store in memory that says what it was asked to save, and may fail."""

    diary: list[str]
    broken: bool

    @classmethod
    def memory(cls) -> Witnessed:
        store = super().memory()
        assert isinstance(store, Witnessed)
        store.diary, store.broken = [], False
        return store

    def save(self, upserts: Any = (), deletes: Any = (), events: Any = (), meta: Any = None, history: Any = ()) -> None:
        if self.broken:
            raise StoreError("the disk is full")
        upserts = list(upserts)
        self.diary.append(f"save {sorted({table for table, _, _ in upserts})}")
        super().save(upserts, deletes, events, meta)


@pytest.fixture
def store() -> Witnessed:
    return Witnessed.memory()


class Desk:
    """A loop without a gateway; effects go into the store's diary."""

    def __init__(self, store: Witnessed, clock: Clock | None = None, **options: Any) -> None:
        self.clock = clock or Clock()
        bundles = BundleStore(store.chunks, lambda: set(), None)
        self.context = ControllerContext(
            State(now=self.clock()), store, cluster_id="c", epoch=1, secret=b"s", bundles=bundles
        )
        self.loop = Loop(self.context, self.clock, **options)
        self.batches: list[int] = []
        self.effects: list[Effect] = []
        self.diary = store.diary

    def begin(self) -> Desk:
        self.loop.start(ControllerStarted(epoch=1), self.carry_out)
        self.diary.clear()
        self.batches.clear()
        return self

    def carry_out(self, events: Sequence[Event], effects: Sequence[Effect]) -> None:
        self.batches.append(len(events))
        self.effects += effects
        self.diary.append(f"tell {sorted({type(effect).__name__ for effect in effects})}")

    def driver(self, session: str = "d") -> None:
        self.loop.post(SessionOpened(session=session, role=Role.DRIVER, namespace="ns"))

    def launch(self, ref: int = 1, session: str = "d", name: str = "work") -> None:
        self.loop.submit(LaunchRequested(session=session, ref=ref, launch=Launch(jobs=(spec(name),))))


def test_a_batch_is_saved_once_before_its_effects(store: Witnessed) -> None:
    desk = Desk(store).begin()
    desk.driver()
    desk.launch(1, name="one")
    desk.launch(2, name="two")
    desk.loop.run_turn()
    assert desk.diary == ["save ['job', 'meta', 'session']", "tell ['EventRecorded', 'JobInfoChanged', 'Reply']"]
    assert [event.what for event in store.events("one-1")] == ["launched"]


def test_what_changes_nothing_is_not_saved(store: Witnessed) -> None:
    desk = Desk(store).begin()
    desk.loop.post(SessionLost(session="unknown"))
    desk.loop.run_turn()
    assert desk.diary == ["tell []"]


def test_if_the_save_fails_there_are_no_effects_and_the_error_is_raised(store: Witnessed) -> None:
    desk = Desk(store).begin()
    desk.driver()
    desk.launch()
    store.broken = True
    with pytest.raises(StoreError, match="disk is full"):
        desk.loop.run_turn()
    assert desk.diary == []


def test_a_batch_has_a_limit_and_the_rest_waits(store: Witnessed) -> None:
    desk = Desk(store).begin()
    for number in range(BATCH_LIMIT_UNITS + 5):
        desk.driver(f"d{number}")
    desk.loop.run_turn()
    desk.loop.run_turn()
    assert desk.batches == [BATCH_LIMIT_UNITS, 5]


def launch_of(jobs: int, ref: int) -> LaunchRequested:
    names = [f"work-{ref}-{number}" for number in range(jobs)]
    return LaunchRequested(session="d", ref=ref, launch=Launch(jobs=tuple(spec(name) for name in names)))


def report_of(attempts: int, removed: int = 0) -> NodeReported:
    observed = [ObservedAttempt(attempt_id=f"a{number}:0:0", phase=Phase.RUNNING) for number in range(attempts)]
    gone = tuple(f"g{number}:0:0" for number in range(removed))
    report = ObservedState(full=False, observed=tuple(observed), removed=gone)
    return NodeReported(node="n", incarnation="i", report=report)


def terminate(jobs: int) -> TerminateRequested:
    return TerminateRequested(session="d", ref=0, jobs=tuple(f"j{number}" for number in range(jobs)), reason="")


@given(
    st.lists(
        st.one_of(
            st.integers(1, 150).map(lambda jobs: launch_of(jobs, ref=1)),
            st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda counts: report_of(*counts)),
            st.integers(0, 60).map(terminate),
            st.just(SessionLost(session="d")),
        ),
        max_size=30,
    )
)
def test_a_batch_has_no_more_work_than_the_limit_unless_one_event_alone_has(events: list[Event]) -> None:
    desk = Desk(Witnessed.memory())
    taken: list[list[Event]] = []
    for event in events:
        desk.loop.post(event)
    while batch := desk.loop._take_batch():
        taken.append(batch)
    assert [event for batch in taken for event in batch] == events
    assert all(len(batch) == 1 or sum(map(work_of, batch)) <= BATCH_LIMIT_UNITS for batch in taken)
    for batch, after in pairwise(taken):  # no batch is smaller than necessary
        assert sum(map(work_of, [*batch, after[0]])) > BATCH_LIMIT_UNITS


def test_jobs_that_are_launched_together_are_stepped_in_several_turns_and_all_accepted(store: Witnessed) -> None:
    desk = Desk(store).begin()
    desk.driver()
    for ref in range(6):
        desk.loop.submit(launch_of(90, ref))
    while desk.loop._inbox:
        desk.loop.run_turn()
    assert desk.batches == [2, 1, 1, 1, 1, 1]
    assert [effect.ref for effect in desk.effects if isinstance(effect, Reply)] == list(range(6))
    assert len(desk.context.state.jobs) == 540


def with_a_lost_driver(store: Witnessed, clock: Clock) -> Desk:
    desk = Desk(store, clock).begin()
    desk.driver()
    desk.loop.run_turn()
    desk.loop.post(SessionLost(session="d"))
    desk.loop.run_turn()
    return desk


def test_a_due_timer_waits_for_what_was_pending_and_not_for_what_came_later(store: Witnessed) -> None:
    clock = Clock()
    desk = with_a_lost_driver(store, clock)
    clock.now += 3600.0  # the driver was given up long ago, but its return is among the pending events
    for number in range(BATCH_LIMIT_UNITS):
        desk.driver(f"other-{number}")
    desk.driver()
    for _ in range(2):
        desk.loop.run_turn()
    assert desk.context.state.sessions["d"].phase is SessionPhase.OPEN


def test_a_due_timer_does_not_wait_for_ever_behind_events(store: Witnessed) -> None:
    clock = Clock()
    desk = with_a_lost_driver(store, clock)
    clock.now += 3600.0
    turns = 0
    while "d" in desk.context.state.sessions and desk.context.state.sessions["d"].phase is not SessionPhase.ENDED:
        for number in range(2 * BATCH_LIMIT_UNITS):
            desk.driver(f"other-{turns}-{number}")
        desk.loop.run_turn()
        turns += 1
    assert turns <= TICK_WAITS_FOR_EVENTS // BATCH_LIMIT_UNITS + 2


def test_a_request_over_the_limit_is_refused_but_an_observation_is_not(store: Witnessed) -> None:
    desk = Desk(store, inbox_limit_events=2).begin()
    desk.driver()
    desk.launch(1)
    with pytest.raises(ChannelFull, match=r"controller overloaded: 2 requests pending .limit 2.; retry later"):
        desk.launch(2)
    desk.loop.post(SessionLost(session="d"))
    desk.loop.run_turn()
    desk.launch(3)
    desk.loop.run_turn()
    assert [effect.ref for effect in desk.effects if isinstance(effect, Reply | Refusal)] == [1, 3]


def test_the_schedulers_time_never_decreases_and_is_saved(store: Witnessed) -> None:
    clock = Clock(1000.0)
    desk = Desk(store, clock).begin()
    clock.now = 500.0
    desk.driver()
    desk.launch()
    desk.loop.run_turn()
    assert desk.loop.now == 1000.0
    assert store.load().meta["now"] == 1000.0
    clock.now = 1001.5
    desk.driver("other")
    desk.loop.run_turn()
    assert desk.context.state.now == 1001.5
    assert store.load().meta["now"] == 1001.5


def test_a_deadline_that_has_passed_is_kept_although_events_never_cease(store: Witnessed) -> None:
    clock = Clock()
    desk = Desk(store, clock).begin()
    desk.driver()
    desk.launch()
    desk.loop.post(SessionLost(session="d"))
    desk.loop.run_turn()
    clock.now += 31
    desk.driver("busy")
    desk.loop.run_turn()
    assert job_info(desk.context.state, "work-1").cause is EndReason.OWNER_ENDED


async def test_time_alone_wakes_the_loop(store: Witnessed, autojump_clock: Any) -> None:
    desk = Desk(store)
    desk.loop = Loop(desk.context, lambda: 1000 + trio.current_time())
    desk.begin()
    desk.driver()
    desk.launch()
    desk.loop.post(SessionLost(session="d"))
    with trio.move_on_after(29.9):
        await desk.loop.run()
    assert not desk.context.state.has_job_ended("work-1")
    with trio.move_on_after(0.2):
        await desk.loop.run()
    assert desk.context.state.has_job_ended("work-1")


async def test_the_loop_ends_with_the_error_of_a_save(store: Witnessed, autojump_clock: Any) -> None:
    desk = Desk(store).begin()
    desk.driver()
    desk.launch()
    store.broken = True
    with trio.fail_after(5), pytest.raises(StoreError, match="disk is full"):
        await desk.loop.run()


async def test_a_clock_that_is_set_back_does_not_touch_the_default_clock(autojump_clock: Any) -> None:
    clock = anchored_clock()
    before = clock()
    await trio.sleep(10)
    assert clock() - before == pytest.approx(10)


async def test_time_in_which_the_controller_was_stopped_is_nobodys_silence(
    store: Witnessed, autojump_clock: Any
) -> None:
    desk = Desk(store)
    desk.loop = Loop(desk.context, lambda: 1000 + trio.current_time())
    desk.begin()
    desk.driver()
    desk.launch()
    desk.loop.post(SessionLost(session="d"))
    with trio.move_on_after(8):
        await desk.loop.run()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.loop.run)
        await trio.sleep(1)
        autojump_clock.jump(3600)
        await trio.sleep(30 - 8 - 5 - 0.1)  # all but the slice of 5 s in which it happened
        assert not desk.context.state.has_job_ended("work-1")
        await trio.sleep(6)
        assert desk.context.state.has_job_ended("work-1")
        nursery.cancel_scope.cancel()


def test_log_records_name_the_job_in_their_text(store: Witnessed, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(store).begin()
    desk.driver()
    with caplog.at_level("INFO", "fray.controller.loop"):
        desk.launch()
        desk.loop.run_turn()
    (record,) = (record for record in caplog.records if getattr(record, "event", "") == "launched")
    assert record.getMessage() == "work-1: launched: by d"
    assert record.job == "work-1"  # type: ignore[attr-defined]


def test_half_a_character_in_a_message_of_user_code_is_harmless(store: Witnessed) -> None:
    desk = Desk(store).begin()
    desk.driver()
    desk.launch()
    desk.loop.submit(TerminateRequested(session="d", ref=2, jobs=("work-1",), reason="no file \udcff"))
    desk.loop.run_turn()
    assert "no file \\udcff" in store.events("work-1")[-1].text
    assert desk.context.state.has_job_ended("work-1")


# A whole controller


@pytest.fixture(params=["disk", "memory"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        yield Store.memory()
        return
    store = Store(tmp_path / "store")
    yield store
    store.close()


async def test_a_controller_that_cannot_save_ends_and_no_client_has_got_the_job(autojump_clock: Any) -> None:
    store = Witnessed.memory()
    with pytest.raises(StoreError, match="disk is full"):
        async with stage(store) as cluster:
            driver = await cluster.client()
            store.broken = True
            await driver.ask(Launch(jobs=(spec(),)), [b"payload"])
    store.broken = False
    assert not [row for row in store.load().rows if row[0] == "job"]


async def test_after_a_crash_everything_is_there_and_running_jobs_never_notice(
    lasting: Store, autojump_clock: Any
) -> None:
    async with stage(lasting) as cluster:
        driver, node = await cluster.client(namespace="ns"), await cluster.node(cpu=2)
        budget = {"max_retries_failure": 2}
        await driver.launch(spec("running", **budget))
        await driver.launch(spec("other"))
        await driver.launch(spec("waiting", payload=b"later"), payload=b"later")
        await driver.job("other-1", lambda info: info.state is JobState.RUNNING)
        node.end("running-1:0:0", Outcome(cause=EndReason.FAILURE, message="once"))
        desired = await node.wait_desired("running-1:1:0")
        endpoint = ActorEndpoint(actor_id="a1", name="counter", job_id="", namespace="ns", addresses=("tcp:x:1",))
        await driver.ask(Register(endpoint=endpoint))
        await driver.ask(Watch(key="name:ns/counter"))
        first = cluster.controller
        starts = list(node.held)

        await cluster.crash()
        await driver.until(lambda: driver.suspensions)
        assert await cluster.start() is not first

        second = cluster.controller
        assert (second.epoch, second.cluster_id) == (first.epoch + 1, first.cluster_id)
        await driver.until(lambda: len(driver.welcomes) == 2)
        assert driver.welcomes[1].epoch == 2
        assert driver.welcomes[1].namespace == "ns"
        assert driver.welcomes[1].session_known
        jobs = {job.name: job.state for job in (await driver.ask(ListJobs())).jobs}
        names = await driver.ask(Watch(key="name:ns/counter"))
        assert jobs == {"running": JobState.RUNNING, "other": JobState.RUNNING, "waiting": JobState.PENDING}
        assert names.endpoints[0].incarnation == driver.greeting().session  # type: ignore[attr-defined]

        await driver.ask(WatchJobs(jobs=("running-1", "other-1", "waiting-1")))
        wanted, _ = await node.next_notice(DesiredState, lambda wanted: wanted.epoch == 2)
        assert wanted.full
        assert list(node.held) == starts
        again = next(one for one in wanted.desired if one.attempt_id == desired.attempt_id)
        assert again.key == desired.key
        node.end("running-1:1:0", Outcome(cause=EndReason.FAILURE, message="twice"))
        await node.wait_desired("running-1:2:0")
        node.end("running-1:2:0", Outcome(cause=EndReason.FAILURE, message="thrice"))
        info, _ = await driver.job_ended("running-1")
        assert (info.state, info.error_message) == (
            JobState.FAILED,
            "thrice (it was retried 2 times after failure; the first was needed after failure: once)",
        )
        node.succeed("other-1:0:0")
        await driver.job_ended("other-1")
        await node.wait_desired("waiting-1:0:0")
        assert node.payloads[blob_id(b"later")] == b"later"


async def test_a_request_under_way_at_the_crash_takes_effect_once(lasting: Store, autojump_clock: Any) -> None:
    async with stage(lasting) as cluster:
        driver = await cluster.client()
        cluster.network.set_delay("driver", "controller", 1.0)
        replies: list[Any] = []

        async def launch() -> None:
            replies.append(await driver.launch(spec()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(launch)
            await trio.sleep(1.5)  # it has arrived and is saved; the answer is on its way
            assert not cluster.controller.state.has_job_ended("work-1")
            await cluster.crash()
            await cluster.start()
        assert [job.job_id for job in replies[0]] == ["work-1"]
        assert len((await driver.ask(ListJobs())).jobs) == 1


async def test_what_ended_while_the_controller_was_away_is_reported_by_the_next_one(
    lasting: Store, autojump_clock: Any
) -> None:
    async with stage(lasting) as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await driver.job("work-1", lambda info: info.state is JobState.RUNNING)
        await cluster.crash()
        await node.until(lambda: node.suspensions)
        node.succeed("work-1:0:0", b"meanwhile")
        await trio.sleep(20)
        await cluster.start()
        reply, blobs = await driver.ask_blobs(WatchJobs(jobs=("work-1",)))
        if not reply.jobs[0].state.finished:
            _, blobs = await driver.job_ended("work-1")
        assert blobs == [b"meanwhile"]
        await node.until(lambda: not node.desired)


async def test_the_end_of_the_controller_is_nobodys_goodbye(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        for _ in range(5):
            await cluster.crash()
            await cluster.start()
            await driver.until(lambda: driver.channel and driver.channel.connected)
            await node.until(lambda: node.channel and node.channel.connected)
        assert cluster.controller.epoch == 6
        await trio.sleep(100)
        assert (await driver.ask(ListJobs())).jobs[0].state is JobState.RUNNING


async def test_presence_is_counted_again_after_a_restart(autojump_clock: Any) -> None:
    async with stage(rules=SchedulerConfig(suspect_s=30, lease_s=600)) as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await cluster.crash()
        await trio.sleep(5000)
        await cluster.start()
        await driver.until(lambda: len(driver.welcomes) == 2)
        await node.until(lambda: len(node.welcomes) == 2)
        await trio.sleep(700)
        assert list(node.desired) == ["work-1:0:0"]


async def test_the_scheduler_takes_no_step_when_a_node_forgets_an_attempt_that_has_ended(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        reports: list[ObservedState] = []
        cluster.controller.loop.observe(
            (NodeReported,),
            lambda events, _: reports.extend(each.report for each in events if isinstance(each, NodeReported)),
        )
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        node.succeed("work-1:0:0")
        await node.until(lambda: not node.held)
        await trio.testing.wait_all_tasks_blocked()
        assert [[one.phase for one in each.observed] for each in reports if not each.full] == [
            [Phase.RUNNING],
            [Phase.ENDED],
        ]
        # An attempt that is not desired keeps everything off its machine until it is gone; so that report is a step.
        node.held["work-9:0:0"] = ObservedAttempt(attempt_id="work-9:0:0", phase=Phase.RUNNING)
        node.report("work-9:0:0")
        await trio.testing.wait_all_tasks_blocked()
        assert cluster.controller.state.nodes[node.name].stray_attempts == ("work-9:0:0",)
        node.report(gone=["work-9:0:0"])
        await trio.testing.wait_all_tasks_blocked()
        assert cluster.controller.state.nodes[node.name].stray_attempts == ()
        # Both reports in one message: the second arrives before the scheduler has had the first.
        assert node.channel is not None
        stray = ObservedState(full=False, observed=(node.held["work-9:0:0"],))
        node.channel.send_later(Kind.NOTICE, 0, encode_message(stray))
        node.report(gone=["work-9:0:0"])
        await trio.testing.wait_all_tasks_blocked()
        assert stray in reports
        assert cluster.controller.state.nodes[node.name].stray_attempts == ()
        # A device that another process holds is news, whatever else the report says.
        busy = ObservedState(full=False, removed=("work-1:0:0",), busy={"gpu-0": "another process"})
        node.channel.notice(busy, ())
        await trio.testing.wait_all_tasks_blocked()
        assert cluster.controller.state.nodes[node.name].busy == busy.busy


async def test_the_scheduler_learns_of_an_attempt_that_its_node_has_lost(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec(max_retries_preemption=0, max_retries_machine_loss=0))
        await node.wait_desired("work-1:0:0")
        await driver.job("work-1", lambda info: info.state is JobState.RUNNING)
        node.report(gone=["work-1:0:0"])
        info, _ = await driver.job_ended("work-1")
        assert info.cause is EndReason.KILLED


async def test_an_attempts_key_is_good_with_the_next_controller_too(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        desired = await node.wait_desired("work-1:0:0")
        await cluster.crash()
        await cluster.start()
        job = await cluster.client(
            role=Role.JOB,
            attempt_id=desired.attempt_id,
            credential=Credential(f"attempt:{desired.attempt_id}", desired.key),
        )
        assert await job.ask(Watch(key="name:x/y")) == Names(key="name:x/y", endpoints=())


async def test_blobs_that_nothing_refers_to_are_swept_at_the_start(lasting: Store, autojump_clock: Any) -> None:
    async with stage(lasting) as cluster:
        driver = await cluster.client()
        await driver.launch(spec())
        await cluster.crash()
        lasting.put_blob(b"orphan")
        lasting.save()
        await cluster.start()
        assert lasting.blobs() == {blob_id(b"payload")}


async def test_a_row_that_cannot_be_read_is_a_damaged_store_and_nothing_is_written(autojump_clock: Any) -> None:
    for table, key, value in (("job", "x", "garbage"), ("no-such-table", "x", {"a": 1})):
        store = Witnessed.memory()
        store.save([(table, key, value)])
        store.diary.clear()
        with pytest.raises(StoreError, match=f"damaged: row 'x' of '{table}' cannot be read"):
            async with stage(store):
                pass
        assert store.diary == []


async def test_a_driver_may_leave_right_after_a_restart(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await cluster.crash()
        await cluster.start()
        await driver.ask(EndSession())
        await node.until(lambda: not node.desired)
