"""Jobs of others that are in the way of a user: numbers and amounts in place of names."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from fray.controller.connections.access import AccessScope
from fray.controller.connections.hide_others import HiddenNames, hide_others
from fray.model.access.roles import AccessRole, Identity
from fray.model.messages.client import Explain, FindJob, GetEvents, JobChanged, NodeInfo, Nodes
from fray.model.messages.maintenance import WhatIf
from fray.model.messages.usage import GetQueue, GetUsage
from fray.model.resources import Demand
from fray.model.specs import EntryKind
from tests.support.controller import Client, Stage, spec, stage

GB = 1024**3


async def crowded(cluster: Stage) -> tuple[Client, Client, Client]:
    """An admin, and Ada, whose job waits for Bob's two on the only node."""
    admin = await cluster.client(host="admin", user="root", namespace="lab")
    await cluster.node(cpu=8)
    ada = await cluster.client(host="ada", credential=await cluster.person("ada", "user", admin))
    bob = await cluster.client(host="bob", credential=await cluster.person("bob", "user", admin))
    demand = Demand(cpu_milli=3000, memory_bytes=GB)
    await bob.launch(spec("secret", demand=demand), spec("hidden", demand=demand))
    await ada.launch(spec("mine", demand=Demand(cpu_milli=5000)))
    await bob.launch(spec("later", demand=Demand(cpu_milli=6000)))
    await trio.sleep(1)
    return admin, ada, bob


async def test_an_explanation_names_no_jobs_of_others(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin, ada, _ = await crowded(cluster)
        shown = (await ada.ask(Explain(job="mine-1"))).text
        assert "secret" not in shown
        assert "hidden" not in shown
        assert "n1 has 2 of 8 CPUs free (held by 2 jobs of other users)" in shown
        assert "it would start if one of 2 jobs of other users ended" in shown
        assert "expected start: unknown: 2 jobs of other users have no time limit" in shown
        assert shown.splitlines()[-1] == "2 jobs of other users hold 6 CPUs, 2 GB memory"
        # Operators and the like see the names.
        assert "(held by secret-1, hidden-1)" in (await admin.ask(Explain(job="mine-1"))).text


async def test_the_record_of_a_job_and_its_notices_name_no_others(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin, ada, _ = await crowded(cluster)
        (info,) = (await ada.ask(FindJob(name="mine"))).jobs
        changed, _ = await ada.next_notice(JobChanged, lambda notice: "held by" in notice.job.reason)
        for reason in (info.reason, changed.job.reason):
            assert "(held by 2 jobs of other users)" in reason
        events = (await ada.ask(GetEvents(job="mine-1"))).events
        assert not [one for one in events if "secret" in one.text or "hidden" in one.text]
        assert "held by secret-1, hidden-1" in (await admin.ask(FindJob(name="mine", namespace="*"))).jobs[0].reason


async def test_a_forecast_names_no_jobs_of_others(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin, ada, _ = await crowded(cluster)
        asked = WhatIf(job=spec("other", demand=Demand(cpu_milli=5000), entry=EntryKind.BINARY, argv=("true",)))
        forecast = await ada.ask(asked)
        assert "one of 2 jobs of other users" in forecast.text
        assert forecast.unblocked_by == ()
        assert set((await admin.ask(asked)).unblocked_by) == {"secret-1", "hidden-1"}


async def test_usage_and_queue_name_no_other_users(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin, ada, _ = await crowded(cluster)
        usage = await ada.ask(GetUsage(samples=True))
        assert [one.user for one in usage.users] == ["ada", "1 other user"]
        others = usage.users[1]
        assert others.used["cpu"] == 6
        assert others.waiting == 1
        assert {one.user for one in usage.namespaces} <= {"ada"}
        assert all(set(one.shares) <= {"ada", ""} for one in usage.samples)
        assert "bob" not in repr(usage)
        assert "bob" not in repr(await ada.ask(GetQueue()))
        assert {"ada", "bob"} <= {one.user for one in (await admin.ask(GetUsage())).users}


async def scope_of_ada(cluster: Stage) -> AccessScope:
    """Ada's, with one job; Bob has two."""
    admin = await cluster.client(host="admin", user="root")
    bob = await cluster.client(host="bob", credential=await cluster.person("bob", "user", admin))
    ada = await cluster.client(host="ada", credential=await cluster.person("ada", "user", admin))
    await bob.launch(spec("a"), spec("b"))
    await ada.launch(spec("own"))
    people: Any = cluster.controller.gateway._context.people
    return AccessScope(cluster.controller.state, people, Identity(AccessRole.USER, "ada"), "", None)


async def test_a_node_names_no_holders_of_other_users(autojump_clock: Any) -> None:
    async with stage() as cluster:
        scope = await scope_of_ada(cluster)
        node = NodeInfo(
            name="n1",
            alive=True,
            cpu_milli=1,
            cpu_milli_free=1,
            memory_bytes=1,
            memory_bytes_free=1,
            granted={"gpu-0": "a-1:0:0", "gpu-1": "own-1:0:0"},
        )
        (seen,) = hide_others(cluster.controller.state, scope, Nodes(nodes=(node,))).nodes
        assert seen.granted == {"gpu-0": "a job of another user", "gpu-1": "own-1:0:0"}


# Texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("held by a-1", "held by a job of another user"),
        ("held by a-1, own-1, b-1", "held by a job of another user, own-1, a job of another user"),
        ("if a-1 or b-1 or own-1 ended", "if one of 2 jobs of other users or own-1 ended"),
        ("a-1, b-1 and 3 more", "2 jobs of other users and 3 more"),
        ("ended by a-1.", "ended by a job of another user."),
        ("a-1:0:3 on n1", "a job of another user:0:3 on n1"),
        ("a-12 and xa-1 ended", "a-12 and xa-1 ended"),
        ("", ""),
    ],
)
async def test_names_in_texts_become_numbers(text: str, shown: str, autojump_clock: Any) -> None:
    async with stage() as cluster:
        scope = await scope_of_ada(cluster)
        assert HiddenNames(cluster.controller.state, scope).text(text) == shown
