"""The door of the scheduler, its order of effects, and its rows in the store."""

from __future__ import annotations

from typing import get_args

import pytest
from attrs import evolve

from fray.model.ids import attempt_id
from fray.model.specs import EndReason
from fray.net.codec import from_json, to_json
from fray.scheduler import effects
from fray.scheduler.effects import (
    CloseSession,
    DesiredAttemptsChanged,
    EventRecorded,
    HistoryRecorded,
    JobInfoChanged,
    NamesChanged,
    Reply,
)
from fray.scheduler.lifecycle import JobPhase, NodePhase, SessionPhase
from fray.scheduler.state.rows import TABLES
from fray.scheduler.state.state import State
from fray.scheduler.step import HANDLERS
from fray.scheduler.views import list_jobs
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(gpu="h100*2")
    return scheduler


def test_every_event_has_its_handler() -> None:
    assert set(HANDLERS) == set(get_args(effects.Event))


def test_effects_come_in_one_order_and_each_once(scheduler: Cluster) -> None:
    launched = scheduler.ask_launch(job("a"), job("b"))
    kinds = [type(effect) for effect in launched]
    assert kinds == [EventRecorded] * 4 + [DesiredAttemptsChanged, Reply, JobInfoChanged, JobInfoChanged]
    assert launched[4] == DesiredAttemptsChanged(node="n1", changed=("a:0:0", "b:0:0"))
    scheduler.run("a:0:0", "b:0:0")
    scheduler.process("a:0:0")
    scheduler.register("x", "token", "s-a:0:0")
    kinds = [type(effect) for effect in scheduler.see("a:0:0", ended()) if not isinstance(effect, EventRecorded)]
    order = [HistoryRecorded, DesiredAttemptsChanged, JobInfoChanged, NamesChanged, NamesChanged, CloseSession]
    assert kinds == order


def test_the_reply_to_a_launch_shows_what_the_step_made_of_it(scheduler: Cluster) -> None:
    (info,) = scheduler.launch(job("a"))
    assert [attempt.attempt_id for attempt in info.attempts] == [attempt_id("a", 0, 0)]


def test_rows_are_written_when_they_change_and_only_then(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    before = dict(scheduler.store)
    scheduler.run("a:0:0")
    changed = sorted(key for key, text in scheduler.store.items() if before.get(key) != text)
    assert changed == [("attempt", "a:0:0"), ("job", "a")]
    scheduler.run("a:0:0")
    assert scheduler.state.take_dirty() == ([], [])


def test_the_time_is_saved_with_whatever_is(scheduler: Cluster) -> None:
    scheduler.now = 77.0
    scheduler.launch(job("a"))
    assert '"now":77.0' in scheduler.store["meta", "meta"].replace(" ", "")


def test_a_state_restored_in_any_order_of_rows_is_the_same(scheduler: Cluster) -> None:
    scheduler.launch(job("a", members=2), job("b"))
    scheduler.run("a:0:0", "a:0:1", "b:0:0")
    scheduler.process("b:0:0")
    scheduler.register("x", "token", "s-b:0:0")
    scheduler.launch(job("c"), session="s-b:0:0")
    scheduler.see("a:0:1", ended())
    rows = [(table, key, from_json(TABLES[table], text)) for (table, key), text in scheduler.store.items()]
    forwards, backwards = State.restore(rows, 5.0), State.restore(reversed(rows), 5.0)
    for state in (forwards, backwards):
        assert check(state) == []
        assert state.now == 5.0
        assert [(table, key, to_json(row)) for table in TABLES for key, row in state.rows(table).items()] == [
            (table, key, to_json(row)) for table in TABLES for key, row in forwards.rows(table).items()
        ]
    assert list_jobs(forwards) == list_jobs(scheduler.state)
    assert forwards.desired_attempts("n1") == scheduler.state.desired_attempts("n1")
    assert forwards.owned_jobs("d") == scheduler.state.owned_jobs("d") == ("a", "b", "c")
    assert forwards.jobs["c"].root == "d"


def test_owned_of_a_process_is_what_it_launched(scheduler: Cluster) -> None:
    scheduler.launch(job("b"))
    scheduler.run("b:0:0")
    scheduler.process("b:0:0")
    scheduler.launch(job("c"), session="s-b:0:0")
    assert scheduler.state.owned_jobs("s-b:0:0") == ("c",)
    assert scheduler.state.owned_jobs("stranger") == ()


def test_a_restart_takes_the_epoch_and_its_own_loss_of_connections(scheduler: Cluster) -> None:
    scheduler.restart()
    assert scheduler.state.meta.epoch == 2
    assert scheduler.state.nodes["n1"].phase is not NodePhase.ALIVE
    assert scheduler.state.sessions["d"].phase is SessionPhase.LOST


def test_an_outcome_that_is_decided_twice_is_seen(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.see("a:0:0", ended())
    assert scheduler.decided.check(scheduler.state) == []
    for row, name in ((scheduler.state.jobs["a"], "a had"), (scheduler.state.attempts["a:0:0"], "a:0:0 had")):
        first = row.outcome
        assert first is not None
        for other in (None, evolve(first, cause=EndReason.STOPPED), evolve(first, value="another")):
            row.outcome = other
            assert any(text.startswith(name) for text in scheduler.decided.check(scheduler.state)), other
        row.outcome = first


def test_an_expired_or_missing_backoff_is_found(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=1, backoff_s=8.0))
    scheduler.run("a:0:0")
    scheduler.see("a:0:0", ended(EndReason.FAILURE))
    row = scheduler.state.jobs["a"]
    assert row.phase is JobPhase.HELD
    assert check(scheduler.state) == []
    until, row.held_until = row.held_until, scheduler.state.now
    assert "a: held for nothing" in check(scheduler.state)
    row.held_until, row.phase = until, JobPhase.RUNNING
    assert any("its back-off lasts until" in text for text in check(scheduler.state))
