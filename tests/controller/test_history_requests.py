"""The past as clients see it: attempts, machines that are gone, and events, in pages and by role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from fray.controller.connections import history_requests
from fray.controller.history import tables as history_tables
from fray.controller.options import parse
from fray.controller.store import Store
from fray.errors import InvalidRequest
from fray.model.messages.history import AttemptRecord, FindEvents, GetAttempts, GetNodeHistory, NodeRecord
from fray.model.resources import Demand
from tests.support.controller import Client, spec, stage, succeeded


def attempt(number: int, recorded_at: float = 0.0, **more: Any) -> AttemptRecord:
    return AttemptRecord(
        attempt_id=f"j{number}:0:0",
        job_id=f"j{number}",
        name=f"j{number}",
        user=more.pop("user", "ada"),
        namespace="ns",
        band="batch",
        node=more.pop("node", "n1"),
        machine="cpu",
        cpu_milli=1000,
        memory_bytes=0,
        placed_at=0.0,
        ended_at=recorded_at,
        cause="succeeded",
        recorded_at=recorded_at,
    )


async def all_attempts(client: Client, **wanted: Any) -> list[AttemptRecord]:
    found: list[AttemptRecord] = []
    cursor = ""
    while True:
        page = await client.ask(GetAttempts(cursor=cursor, **wanted))
        found += page.attempts
        cursor = page.cursor
        if not cursor:
            return found


# The tables


def everything(store: Store, since: float) -> list[AttemptRecord]:
    """Return the records on all pages."""
    page, after = store.history.attempts(0, since)
    found = [*page]
    while after:
        page, after = store.history.attempts(after, since)
        found += page
    return found


def test_records_are_there_again_as_they_were(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    machine = NodeRecord(
        node="n1",
        incarnation="i",
        kind="cpu",
        cpu_milli=1,
        memory_bytes=2,
        attributes={"zone": "a"},
        gone_at=3.0,
        reason="half \udcff",
    )
    store.save(history=[attempt(1, 5.0), machine])
    store.close()
    store = Store(tmp_path / "store")
    assert store.history.attempts(0, 0.0) == ((attempt(1, 5.0),), 0)
    (found,) = store.history.nodes()
    assert (found.attributes, found.reason) == ({"zone": "a"}, "half \\udcff")
    store.close()


def test_a_store_that_was_made_without_the_tables_gets_them(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store._db.execute("DROP TABLE past_attempts")
    store._db.execute("DROP TABLE past_nodes")
    store.close()
    store = Store(tmp_path / "store", history_limit=7)
    assert (store.history.attempts(0, 0.0), store.history.nodes(), store.history.limit) == (((), 0), (), 7)
    store.close()


def test_the_number_of_records_is_an_option_of_the_controller() -> None:
    assert parse([]).history_limit == history_tables.HISTORY_LIMIT
    assert parse(["--keep-history", "1000"]).history_limit == 1000
    with pytest.raises(InvalidRequest, match="--keep-history 0 must be 1 to"):
        parse(["--keep-history", "0"])


def test_the_first_end_of_a_machine_counts() -> None:
    store = Store.memory()
    first = NodeRecord(node="n1", incarnation="i", kind="cpu", cpu_milli=1, memory_bytes=2, gone_at=3.0, reason="died")
    later = NodeRecord(node="n1", incarnation="i", kind="cpu", cpu_milli=1, memory_bytes=2, gone_at=9.0, reason="old")
    store.save(history=[first])
    store.save(history=[later])
    assert store.history.nodes() == (first,)


@pytest.mark.parametrize("since", [0.0, 1.0, 2499.5, 2500.0, 2998.5, 2999.0, 5000.0])
def test_pages_have_every_record_since_a_time_once(since: float) -> None:
    store = Store.memory()
    store.save(history=[attempt(number, float(number)) for number in range(3000)])
    found = everything(store, since)
    assert [one.recorded_at for one in found] == [float(number) for number in range(3000) if number >= since]


def test_the_oldest_records_make_room() -> None:
    store = Store.memory()
    store.history.limit = 1500
    for number in range(30):
        store.save(history=[attempt(number * 100 + each, float(number)) for each in range(100)])
    found = everything(store, 0.0)
    assert [one.attempt_id for one in found] == [f"j{number}:0:0" for number in range(1500, 3000)]


def test_records_are_chosen_by_their_columns() -> None:
    store = Store.memory()
    store.save(history=[attempt(1, node="n1"), attempt(2, node="n2"), attempt(3, node="n2", user="bob")])
    (found, _) = store.history.attempts(0, 0.0, node="n2", user="ada")
    assert [one.attempt_id for one in found] == ["j2:0:0"]


# Requests


async def test_attempts_are_there_after_a_restart_once_and_with_those_that_live(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_requests, "LIVING", 1)
    monkeypatch.setattr(history_tables, "WINDOW", 1)
    async with stage() as cluster:
        client = await cluster.client(user="ada")
        nodes = [await cluster.node(f"n{number}", cpu=1) for number in range(4)]
        await client.launch(*(spec(name) for name in ("one", "two", "three", "four")))
        running = {}
        for node in nodes:
            (running[node],) = await node.until(lambda node=node: tuple(node.desired))  # type: ignore[misc]
        for node in nodes[:2]:
            node.end(running[node], *succeeded())
            await client.job_ended(running[node].partition(":")[0])
        await cluster.crash()
        await cluster.start()
        found = await all_attempts(client)
        assert sorted(one.attempt_id for one in found) == sorted(running.values())
        ended = {one.attempt_id for one in found if one.ended_at is not None}
        assert ended == {running[node] for node in nodes[:2]}
        assert [one.attempt_id for one in await all_attempts(client, node="n3")] == [running[nodes[3]]]
        with pytest.raises(InvalidRequest, match="send that of the page before"):
            await client.ask(GetAttempts(cursor="17"))


async def test_users_see_their_own_attempts_and_events_and_operators_all(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await cluster.client(host="admin", user="root")
        node = await cluster.node(cpu=8)
        ada = await cluster.client(host="ada", credential=await cluster.person("ada", "user", admin))
        bob = await cluster.client(host="bob", credential=await cluster.person("bob", "user", admin))
        await ada.launch(spec("mine"))
        await bob.launch(spec("secret", demand=Demand(cpu_milli=2000)))
        node.end((await node.wait_desired("secret-1:0:0")).attempt_id, *succeeded())
        await bob.job_ended("secret-1")
        assert {one.attempt_id for one in await all_attempts(ada)} == {"mine-1:0:0"}
        assert {one.attempt_id for one in await all_attempts(admin)} == {"mine-1:0:0", "secret-1:0:0"}
        assert [one.attempt_id for one in await all_attempts(admin, user="bob")] == ["secret-1:0:0"]
        assert [one.attempt_id for one in await all_attempts(admin, job="secret")] == ["secret-1:0:0"]
        seen = (await ada.ask(FindEvents())).events
        assert {one.job for one in seen} == {"", "mine-1"}
        assert {one.job for one in (await admin.ask(FindEvents(user="bob"))).events} == {"secret-1"}


async def test_events_that_name_a_machine_are_found_and_not_those_of_its_neighbours(autojump_clock: Any) -> None:
    async with stage() as cluster:
        client = await cluster.client()
        await cluster.node("gpu-1")
        await cluster.node("gpu-10")
        await client.launch(spec("work"))
        found = (await client.ask(FindEvents(node="gpu-1"))).events
        assert found[0].what == "node joined"
        assert all("gpu-10" not in one.text for one in found)
        assert (await client.ask(FindEvents(since=found[0].time + 3600))).events == ()


async def test_a_machine_that_left_is_on_record(autojump_clock: Any) -> None:
    async with stage() as cluster:
        client = await cluster.client()
        node = await cluster.node("n1", cpu=3)
        node.say_goodbye()
        with trio.fail_after(60):
            while not (found := (await client.ask(GetNodeHistory())).nodes):  # noqa: ASYNC110
                await trio.sleep(0.1)
        assert [(one.node, one.cpu_milli) for one in found] == [("n1", 3000)]
        assert found[0].gone_at >= found[0].joined_at > 0
        assert (await client.ask(GetNodeHistory(node="n2"))).nodes == ()
