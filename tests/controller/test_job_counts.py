"""Numbers of jobs and reservations for monitoring: what lives, what was placed and what has ended."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from fray.controller.metrics import job_counts
from fray.controller.metrics.job_counts import BOUNDS_S, JobCounts
from fray.model.messages.client import CreateReservation
from fray.model.messages.usage import ClusterCounts, GetCounts
from fray.model.reservations import ReservationSpec
from fray.model.resources import Demand
from fray.model.specs import JobState
from fray.scheduler.state.state import State
from tests.support.controller import Client, spec, stage


async def counted(client: Client) -> ClusterCounts:
    found = await client.ask(GetCounts())
    assert isinstance(found, ClusterCounts)
    return found


async def test_jobs_are_counted_where_they_are_and_how_they_ended(autojump_clock: Any) -> None:
    async with stage() as cluster:
        node = await cluster.node(cpu=1)
        client = await cluster.client()
        await client.launch(spec("first", namespace="prod", user="ada"), spec("second", namespace="prod", user="ada"))
        await client.job("first-1", lambda info: info.state is JobState.RUNNING)
        await trio.sleep(100)
        found = await counted(client)
        assert found.users == {"ada": {"running": 1, "pending": 1}}
        assert found.namespaces == {"prod": {"running": 1, "pending": 1}}
        assert found.wait_counts == (1, *[0] * len(BOUNDS_S))
        assert 100 <= found.longest_wait_s < 101
        node.succeed("first-1:0:0")
        await client.job("second-1", lambda info: info.state is JobState.RUNNING)
        found = await counted(client)
        assert found.users == {"ada": {"running": 1}}
        assert (found.ended_jobs, found.ended_attempts) == ({"succeeded": 1}, {"succeeded": 1})
        # The second one has waited for the first.
        assert found.wait_counts[BOUNDS_S.index(300.0)] == 1
        assert 100 <= found.waited_s < 101
        assert found.longest_wait_s == 0
        # Living jobs are counted by the rows, and what has happened since the controller's start.
        await cluster.crash()
        await cluster.start()
        await client.until(lambda: len(client.welcomes) == 2)
        found = await counted(client)
        assert found.users == {"ada": {"running": 1}}
        assert (found.ended_jobs, sum(found.wait_counts)) == ({}, 0)


async def test_reservations_and_their_units_are_counted(autojump_clock: Any) -> None:
    async with stage() as cluster:
        await cluster.node(cpu=2)
        client = await cluster.client()

        def wanted(name: str, units: int) -> CreateReservation:
            demand = Demand(cpu_milli=1000)
            made = ReservationSpec(
                reservation_id=f"{name}-1", name=name, demand=demand, min_units=units, max_units=units
            )
            return CreateReservation(spec=made)

        await client.ask(wanted("held", 2))
        await client.ask(wanted("waits", 1))
        found = await counted(client)
        assert found.reservations == {"held": 1, "waiting": 1}
        assert found.reserved_units == {"minimum": 3, "held": 2}


async def test_a_user_sees_the_jobs_of_others_as_one_number(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await cluster.client(host="admin", user="root")
        ada = await cluster.client(host="ada", credential=await cluster.person("ada", "user", admin))
        bob = await cluster.client(host="bob", credential=await cluster.person("bob", "user", admin))
        await ada.launch(spec("own"))
        await bob.launch(spec("a"), spec("b"))
        found = await counted(ada)
        assert found.users == {"ada": {"pending": 1}, "": {"pending": 2}}
        assert "bob" not in repr(found)
        assert (await counted(admin)).users == {"ada": {"pending": 1}, "bob": {"pending": 2}}


def test_names_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_counts, "NAMES_LIMIT", 2)
    state = State()
    state.living_jobs.update(
        {("ada", "a", JobState.RUNNING): 5, ("bob", "a", JobState.PENDING): 1, ("cy", "b", JobState.RUNNING): 2}
    )
    found = JobCounts(state).counts(0.0)
    assert found.users == {"ada": {"running": 5}, "cy": {"running": 2}, "": {"pending": 1}}
    assert found.namespaces == {"a": {"running": 5, "pending": 1}, "b": {"running": 2}}
