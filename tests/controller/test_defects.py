"""An event at which the controller fails is refused: nothing has changed, the others are handled, the loop lives."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from attrs import evolve

import fray.scheduler.step as step_module
from fray.controller.connections.validation import USER_LIMIT, check_user
from fray.controller.context import ControllerContext
from fray.controller.loop import TICK_RETRY_S, Loop
from fray.controller.store import Store
from fray.controller.workspaces.bundles import BundleStore
from fray.errors import InternalError, InvalidRequest, StoreError
from fray.model.messages.client import ActorEndpoint, Launch, Register, Role
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.policy.policy import Policy
from fray.model.reservations import ReservationSpec
from fray.model.resources import Demand
from fray.model.specs import EntryKind, ObservedAttempt, Phase
from fray.net.codec import to_json
from fray.scheduler import effects as events
from fray.scheduler.effects import ControllerStarted, Effect, Event, EventRefused, LaunchRequested, Reply, SessionOpened
from fray.scheduler.state.state import State
from fray.scheduler.step import HANDLERS
from fray.testing.invariants.check import check
from tests.support.controller import spec, stage
from tests.support.scheduler import capacity

WAIT_S = 30.0
"""Seconds after which the job that waits has a timer that is due."""


class Controller:
    """A loop over a store; its effects are kept."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 1000.0
        bundles = BundleStore(store.chunks, lambda: set(), None)
        self.context = ControllerContext(State(now=1000.0), store, "c", 1, b"s", bundles)
        self.loop = Loop(self.context, lambda: self.now)
        self.effects: list[Effect] = []
        self.loop.start(ControllerStarted(epoch=1), lambda events, effects: self.effects.extend(effects))
        self.tell(
            SessionOpened(session="d", role=Role.DRIVER, namespace="ns", user="ada"),
            events.NodeJoined(hello=hello("n1")),
            events.NodeReported(node="n1", incarnation="i1", report=ObservedState(full=True, observed=())),
            launch(1, "one"),
            launch(2, "two", demand=Demand(cpu_milli=64_000), wait_limit_s=WAIT_S),
            events.ReservationRequested(session="d", ref=3, spec=reservation("held-1")),
        )
        assert self.state.jobs.keys() == {"one-1", "two-1"}

    @property
    def state(self) -> State:
        return self.context.state

    def tell(self, *happened: Event) -> list[Effect]:
        """Process events in one turn; return its effects."""
        self.effects.clear()
        for event in happened:
            self.loop.post(event)
        self.loop.run_turn()
        return list(self.effects)

    def rows(self) -> dict[tuple[str, str], str]:
        """Return all rows but the counters."""
        tables = self.state.tables()
        return {(name, key): to_json(row) for name in tables if name != "meta" for key, row in tables[name].items()}


def hello(name: str) -> NodeHello:
    return NodeHello(node=name, incarnation="i1", boot_id="b", capacity=capacity(), lease_s=600.0)


def launch(ref: int, name: str, **more: Any) -> LaunchRequested:
    return LaunchRequested(session="d", ref=ref, launch=Launch(jobs=(spec(name, namespace="ns", **more),)))


def reservation(name: str) -> ReservationSpec:
    return ReservationSpec(
        reservation_id=name, name=name.partition("-")[0], namespace="ns", demand=Demand(cpu_milli=500)
    )


ENDPOINT = ActorEndpoint(actor_id="a1", name="counter", namespace="ns", incarnation="d", job_id="", addresses=())
EXAMPLES: Mapping[type, Event] = {
    type(event): event
    for event in (
        events.PolicyChanged(policy=Policy()),
        SessionOpened(session="e", role=Role.DRIVER, namespace="ns"),
        events.SessionLost(session="d"),
        events.SessionClosed(session="d"),
        launch(9, "three"),
        events.TerminateRequested(session="d", ref=9, jobs=("one-1",), reason="stop"),
        events.NodeJoined(hello=hello("n2")),
        events.NodeReported(
            node="n1",
            incarnation="i1",
            report=ObservedState(full=False, observed=(ObservedAttempt(attempt_id="one-1:0:0", phase=Phase.RUNNING),)),
        ),
        events.NodeSilent(node="n1", incarnation="i1"),
        events.NodeDied(node="n1", incarnation="i1", reason="gone"),
        events.NodeLeaving(node="n1", incarnation="i1", finish_s=5.0, reason="shutdown"),
        events.NodeProbed(node="n1", incarnation="i1"),
        events.CordonRequested(session="d", ref=9, nodes=("n1",), drain=True),
        events.UncordonRequested(session="d", ref=9, nodes=("n1",)),
        events.AttemptAnnotated(node="n1", incarnation="i1", attempt_id="one-1:0:0", kind="note"),
        events.NameRegistered(session="d", ref=9, register=Register(endpoint=ENDPOINT)),
        events.NameUnregistered(session="d", ref=9, actor_id="a1"),
        events.CheckpointTaken(session="d", ref=9, number=1, location="x"),
        events.RequeueRequested(session="d", ref=9, generations={"one-1": 0}, reason=""),
        events.WaitReported(session="d", ref=9, waiting=True),
        events.MachineAnswered(name="u1"),
        events.MachinesListed(provider="process"),
        events.GroupScaled(session="d", ref=9, group="g", min=1),
        events.ReservationRequested(session="d", ref=9, spec=reservation("more-1")),
        events.ReservationRenewed(session="d", ref=9, reservation_id="held-1", ttl_s=60.0),
        events.ReservationReleased(session="d", ref=9, reservation_id="held-1"),
        events.Tick(),
    )
}


def test_there_is_an_example_of_every_event() -> None:
    assert {*EXAMPLES, ControllerStarted} == {*HANDLERS} == {*get_args(Event)}


class Defect(Exception):
    pass


def before(handler: Callable[..., None]) -> Callable[..., None]:
    def broken(state: State, event: Any, out: Any) -> None:
        raise Defect

    return broken


def after(handler: Callable[..., None]) -> Callable[..., None]:
    def broken(state: State, event: Any, out: Any) -> None:
        handler(state, event, out)
        raise Defect

    return broken


@pytest.fixture
def controller() -> Controller:
    return Controller(Store.memory())


@pytest.mark.parametrize("depth", ["before", "after", "placement", "records", "save", "touched"])
@pytest.mark.parametrize("event", EXAMPLES.values(), ids=lambda event: type(event).__name__)
def test_an_event_that_fails_changes_nothing_and_the_next_one_works(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, event: Event, depth: str
) -> None:
    rows, kind = controller.rows(), type(event)
    settings = controller.state.settings()
    right = HANDLERS[kind]
    with monkeypatch.context() as patch:
        if depth in ("before", "after"):
            patch.setitem(HANDLERS, kind, {"before": before, "after": after}[depth](right))
        elif depth == "save":
            # What it has written cannot be stored.
            def unstorable(state: State, event: Any, out: Any) -> None:
                right(state, event, out)
                state.touch("usage", "user:j\udcf6rg")

            patch.setitem(HANDLERS, kind, unstorable)
        elif depth == "touched":
            # In the middle of its changes: at the third row that is marked, or at the end.
            left = [3]
            touch = State.touch

            def fail_third(state: State, table: str, key: str) -> None:
                touch(state, table, key)
                left[0] -= 1
                if left[0] == 0:
                    raise Defect

            def handle(state: State, event: Any, out: Any) -> None:
                left[0] = 3
                with monkeypatch.context() as inner:
                    inner.setattr(State, "touch", fail_third)
                    right(state, event, out)
                raise Defect

            patch.setitem(HANDLERS, kind, handle)
        else:
            # Of this event's step alone, although the rules are those of every step.
            rules = "RULES_FOR_CAPACITY" if depth == "placement" else "RULES_FOR_RECORDS"
            current: list[Event] = []

            def note(state: State, event: Any, out: Any) -> None:
                current.append(event)
                right(state, event, out)

            def fail(state: State, out: Any) -> None:
                if current and current.pop() is not None:
                    raise Defect

            patch.setitem(HANDLERS, kind, note)
            known = getattr(step_module, rules)
            patch.setattr(step_module, rules, [*known, (lambda state, out: True, fail)])
        if isinstance(event, events.Tick):
            controller.now += WAIT_S
            effects = controller.tell()
        else:
            effects = controller.tell(event)
    refused = [effect for effect in effects if isinstance(effect, EventRefused)]
    assert [type(each.event) for each in refused] == [kind]
    assert isinstance(refused[0].error, InternalError)
    assert [effect for effect in effects if not isinstance(effect, EventRefused)] == []
    assert controller.rows() == rows
    assert controller.state.settings() == settings
    assert check(controller.state) == []
    # The same event, handled by what is right.
    if isinstance(event, events.Tick):
        controller.now += TICK_RETRY_S
    effects = controller.tell(event, launch(77, "next"))
    assert not [effect for effect in effects if isinstance(effect, EventRefused)]
    assert check(controller.state) == []
    if not isinstance(event, events.SessionClosed):
        assert "next-1" in controller.state.jobs


def test_a_bad_event_refuses_none_of_the_others_of_its_batch(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = HANDLERS[LaunchRequested]

    def broken(state: State, event: LaunchRequested, out: Any) -> None:
        right(state, event, out)
        if "bad" in event.launch.jobs[0].name:
            raise Defect("half done")

    monkeypatch.setitem(HANDLERS, LaunchRequested, broken)
    with caplog.at_level(logging.ERROR):
        effects = controller.tell(launch(11, "a"), launch(12, "bad"), launch(13, "b"), launch(14, "bad2"))
    replies = [effect.ref for effect in effects if isinstance(effect, Reply)]
    refusals = [effect for effect in effects if isinstance(effect, EventRefused)]
    assert replies == [11, 13]
    assert [each.event.ref for each in refusals] == [12, 14]  # type: ignore[union-attr]
    assert str(refusals[0].error) == (
        "the controller could not handle this request (LaunchRequested: Defect('half done')); nothing was changed. "
        "This is a defect of Fray: the controller's log has the traceback"
    )
    assert {"a-1", "b-1"} <= controller.state.jobs.keys()
    assert not {"bad-1", "bad2-1"} & controller.state.jobs.keys()
    # One record for each, with the traceback.
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert all("LaunchRequested refused" in record.message for record in caplog.records)
    # What was accepted is on disk: the next controller has it.
    assert {key for table, key, _ in controller.store.load().rows if table == "job"} == controller.state.jobs.keys()


def test_a_name_that_cannot_be_stored_refuses_its_launch_alone(controller: Controller) -> None:
    """The checks of requests are passed by here: the save itself fails, for all events of its batch."""
    bad = launch(12, "bad")
    bad = evolve(bad, launch=Launch(jobs=(evolve(bad.launch.jobs[0], user="j\udcf6rg"),)))
    effects = controller.tell(launch(11, "a"), bad, launch(13, "b"))
    assert [effect.ref for effect in effects if isinstance(effect, Reply)] == [11, 13]
    refused = [effect for effect in effects if isinstance(effect, EventRefused)]
    assert [each.event for each in refused] == [bad]
    assert "UnicodeEncodeError" in str(refused[0].error)


def test_a_tick_that_fails_is_tried_again_later_and_not_at_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HANDLERS, events.Tick, before(HANDLERS[events.Tick]))
    controller.now += WAIT_S
    assert [type(effect) for effect in controller.tell()] == [EventRefused]
    monkeypatch.undo()
    assert controller.tell() == []
    controller.now += TICK_RETRY_S
    assert controller.tell() != []
    assert controller.state.jobs["two-1"].ended  # it has waited too long


def test_effects_that_cannot_be_carried_out_do_not_end_the_loop(store_path: Path) -> None:
    controller = Controller(Store(store_path))

    def fail(events: Any, effects: Any) -> None:
        raise Defect

    controller.loop._carry_out = fail
    controller.tell(launch(11, "a"))
    assert "a-1" in controller.state.jobs
    controller.store.close()


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# The store fails: the controller ends, and the next one has what was announced (P7)


def test_a_store_that_is_busy_or_full_ends_the_loop_with_nothing_announced(store_path: Path) -> None:
    controller = Controller(Store(store_path))
    known = controller.rows()
    controller.store._db.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(store_path / "fray.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="database is locked"):
        controller.tell(launch(11, "a"))
    assert controller.effects == []
    other.execute("ROLLBACK")
    other.close()
    controller.store.close()
    again = Store(store_path)
    assert {(table, key) for table, key, _ in again.load().rows if table != "meta"} == {*known}
    # A full disk: the database may not grow.
    pages = again._db.execute("PRAGMA page_count").fetchone()[0]
    again._db.execute(f"PRAGMA max_page_count = {pages}")
    big = [("job", f"j{number}", events.SessionLost(session="x" * 4000)) for number in range(500)]
    with pytest.raises(StoreError, match="disk is full"):
        again.save(big)
    again.close()
    last = Store(store_path)
    assert {(table, key) for table, key, _ in last.load().rows if table != "meta"} == {*known}
    last.close()


# The whole controller


async def test_a_lone_surrogate_is_refused_at_the_door_and_the_driver_stays(autojump_clock: Any) -> None:
    async with stage() as here:
        driver = await here.client()
        for bad in ({"user": "j\udcf6rg"}, {"argv": ("a\ud800",)}, {"env_vars": {"A": "\udfff"}}):
            with pytest.raises(InvalidRequest, match=r"Unicode|surrogate") as caught:
                await driver.ask(Launch(jobs=(spec("work", **bad),)), [b"payload"])
            assert next(iter(bad)) in str(caught.value)
        program = {"entry": EntryKind.BINARY, "argv": ("echo", "x\0y")}
        for bad in (program, {"env_vars": {"A": "x\0y"}}, {"sys_path": ("/a\0b",)}, {"cwd": "/a\0b"}):
            with pytest.raises(InvalidRequest, match="an argument, a variable or a path has a NUL character"):
                await driver.ask(Launch(jobs=(spec("work", **bad),)), [b"payload"])
        with pytest.raises(InvalidRequest, match="cannot be the name of a variable"):
            await driver.ask(Launch(jobs=(spec("work", env_vars={"A\0B": "x"}),)), [b"payload"])
        with pytest.raises(InvalidRequest, match="64 bits"):
            await driver.ask(Launch(jobs=(spec("work", memory_limit_bytes=10**400),)), [b"payload"])
        with pytest.raises(InvalidRequest, match="amount"):
            await driver.ask(Launch(jobs=(spec("work", memory_limit_bytes=2**62),)), [b"payload"])
        with pytest.raises(InvalidRequest, match="printable"):
            await driver.ask(Launch(jobs=(spec("work", user="a\x1b[31m"),)), [b"payload"])
        reply = await driver.ask(Launch(jobs=(spec("work", user="jörg 😀"),)), [b"payload"])
        assert reply.jobs[0].job_id == "work-1"


async def test_a_request_that_fails_is_answered_with_the_error(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage() as here:
        driver = await here.client()
        right = HANDLERS[LaunchRequested]
        monkeypatch.setitem(HANDLERS, LaunchRequested, after(right))
        with pytest.raises(InternalError, match="nothing was changed"):
            await driver.ask(Launch(jobs=(spec("work"),)), [b"payload"])
        assert here.controller.state.jobs == {}
        monkeypatch.setitem(HANDLERS, LaunchRequested, right)
        # The payload of the refused launch was dropped with it, and comes with the next.
        reply = await driver.ask(Launch(jobs=(spec("work"),)), [b"payload"])
        assert reply.jobs[0].job_id == "work-1"


def test_users_have_at_most_256_printable_characters() -> None:
    assert check_user("ü" * USER_LIMIT)
    assert check_user("") == ""
    for bad in ("ü" * (USER_LIMIT + 1), "a\nb", "a\x9bb", "a\0"):
        with pytest.raises(InvalidRequest, match="expected at most 256 printable characters"):
            check_user(bad)
