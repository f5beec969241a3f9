"""Reservations of the past: one record of each end, seen by those who may, also when the scheduler has forgotten it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fray.controller.connections import history_requests
from fray.controller.history import tables as history_tables
from fray.controller.store import Store
from fray.errors import InvalidRequest, NoSuchJob, Unauthorized
from fray.model.messages.client import CreateReservation, GetEvents, ReleaseReservation, RenewReservation, Role
from fray.model.messages.history import FindEvents, GetReservationHistory, RecordedReservation
from fray.model.reservations import ReservationSpec
from fray.model.resources import Demand
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.controller import Client, stage


def record(number: int, **more: Any) -> RecordedReservation:
    made = RecordedReservation(
        reservation_id=f"r-{number}",
        name="r",
        namespace="ns",
        user="ada",
        band="batch",
        cpu_milli=1000,
        memory_bytes=0,
        min_units=1,
        max_units=2,
        nodes=("n1", "n2"),
        created_at=0.0,
        ended_at=float(number),
        reason="released",
    )
    return evolve(made, **more)


def everything(store: Store, since: float) -> list[RecordedReservation]:
    page, after = store.history.reservations(0, since)
    found = [*page]
    while after:
        page, after = store.history.reservations(after, since)
        found += page
    return found


async def history(client: Client, since: float = 0.0) -> dict[str, RecordedReservation]:
    found: dict[str, RecordedReservation] = {}
    cursor = ""
    while True:
        page = await client.ask(GetReservationHistory(since=since, cursor=cursor))
        found |= {one.reservation_id: one for one in page.reservations}
        cursor = page.cursor
        if not cursor:
            return found


def wanted(name: str, units: int = 1, **more: Any) -> CreateReservation:
    spec = ReservationSpec(
        reservation_id=f"{name}-1",
        name=name,
        demand=Demand(cpu_milli=1000),
        min_units=units,
        max_units=units,
        detached=True,
        **more,
    )
    return CreateReservation(spec=spec)


def test_records_are_there_again_in_a_store_that_was_made_without_the_table(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store._db.execute("DROP TABLE past_reservations")
    store.close()
    store = Store(tmp_path / "store")
    # An id can be given again once the first reservation of it is forgotten.
    store.save(history=[record(1), record(2), record(1, ended_at=3.0, reason="expired")])
    store.close()
    store = Store(tmp_path / "store")
    assert everything(store, 0.0) == [record(1), record(2), record(1, ended_at=3.0, reason="expired")]
    assert everything(store, 1.5) == everything(store, 0.0)[1:]
    assert store.history.reservation("r-1") == record(1, ended_at=3.0, reason="expired")
    assert store.history.reservation("r-7") is None
    store.close()


def test_the_oldest_reservations_make_room() -> None:
    store = Store.memory()
    store.history.limit = 1_500
    store.save(history=[record(number) for number in range(2_000)])
    assert [one.reservation_id for one in everything(store, 0.0)] == [f"r-{number}" for number in range(500, 2_000)]
    store.save(history=[record(number) for number in range(2_000, 3_000)])
    assert [one.reservation_id for one in everything(store, 0.0)] == [f"r-{number}" for number in range(1_500, 3_000)]


async def test_each_reservation_is_on_record_with_its_machines_and_its_end(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_requests, "LIVING", 1)
    monkeypatch.setattr(history_tables, "WINDOW", 1)
    async with stage() as cluster:
        await cluster.node("n1", cpu=1)
        await cluster.node("n2", cpu=1)
        client = await cluster.client("d", user="ada", namespace="ns")
        for name, units in (("first", 2), ("waits", 2), ("later", 1)):
            await client.ask(wanted(name, units, user="ada"))
        living = await history(client)
        assert [(one.units_given, one.nodes, one.ended_at) for one in living.values()] == [
            (2, ("n1", "n2"), None),
            (0, (), None),
            (0, (), None),
        ]
        await client.ask(ReleaseReservation(reservation_id="first-1", reason="no more needed"))
        await client.ask(ReleaseReservation(reservation_id="later-1"))
        await cluster.crash()
        await cluster.start()
        found = await history(client)
        assert set(found) == {"first-1", "waits-1", "later-1"}
        first, waits, later = found["first-1"], found["waits-1"], found["later-1"]
        assert (first.user, first.name, first.namespace, first.created_by) == ("ada", "first", "ns", "d")
        assert (first.nodes, first.reason, first.ended_by) == (
            ("n1", "n2"),
            "no more needed",
            "driver d of ada",
        )
        assert first.created_at <= (first.held_at or 0.0) <= (first.ended_at or 0.0)
        assert (waits.ended_at, waits.nodes) == (None, ("n1", "n2"))
        assert (later.held_at, later.nodes, later.reason) == (None, (), "released")
        assert await history(client, since=4e9) == {"waits-1": waits}
        with pytest.raises(InvalidRequest, match="send that of the page before"):
            await client.ask(GetReservationHistory(cursor="17"))


async def test_a_forgotten_reservation_is_seen_by_its_user_and_by_operators(autojump_clock: Any) -> None:
    # One ended reservation stays in the scheduler's state.
    async with stage(rules=SchedulerConfig(finished_limit=1)) as cluster:
        await cluster.node(cpu=8)
        admin = await cluster.client(host="admin", user="root")
        ada = await cluster.client(host="ada", credential=await cluster.person("ada", "user", admin))
        bob = await cluster.client(host="bob", credential=await cluster.person("bob", "user", admin))
        for name in ("one", "two"):
            await ada.ask(wanted(name, namespace="adas"))
            await ada.ask(ReleaseReservation(reservation_id=f"{name}-1", reason="done"))
        assert list(cluster.controller.state.reservations) == ["two-1"]
        assert set(await history(ada)) == set(await history(admin)) == {"one-1", "two-1"}
        assert await history(bob) == {}
        for client in (ada, admin):
            events = (await client.ask(GetEvents(job="one-1"))).events
            assert [one.what for one in events] == ["created", "held", "closing", "ended"]
        with pytest.raises(Unauthorized, match="reservation 'one-1'"):
            await bob.ask(GetEvents(job="one-1"))
        with pytest.raises(NoSuchJob):
            await bob.ask(GetEvents(job="three-1"))
        assert {one.job for one in (await ada.ask(FindEvents())).events} >= {"one-1", "two-1"}
        assert "one-1" not in {one.job for one in (await bob.ask(FindEvents())).events}
        assert {one.job for one in (await admin.ask(FindEvents(user="ada"))).events} == {"one-1", "two-1"}


async def test_who_made_and_who_extended_a_reservation_is_in_its_events(autojump_clock: Any) -> None:
    async with stage() as cluster:
        await cluster.node()
        driver = await cluster.client("d", user="ada", namespace="ns")
        await driver.ask(wanted("night", user="ada"))
        # Its driver keeps it from expiring, which is not worth a line.
        await driver.ask(RenewReservation(reservation_id="night-1"))
        await driver.ask(RenewReservation(reservation_id="night-1", ttl_s=7200.0))
        tool = await cluster.client(role=Role.TOOL, host="tool", user="bob")
        await tool.ask(RenewReservation(reservation_id="night-1"))
        events = (await tool.ask(GetEvents(job="night-1"))).events
        assert [(one.what, one.text) for one in events if one.what in ("created", "renewed")] == [
            ("created", "by d of ada: 1 to 1 units of 1 CPU"),
            ("renewed", "for 7200 s by driver d of ada"),
            ("renewed", "for 7200 s by bob"),
        ]
