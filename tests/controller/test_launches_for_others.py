"""Jobs that one user launches for another: only where the policy grants it, and then all counts for that other user."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from fray.errors import InvalidRequest, Unauthorized
from fray.model.messages.client import Launch, Role, Terminate
from fray.model.messages.people import AuditRecords, GetLaunchUsers, LaunchUsers, ReadAudit, RemoveUser
from fray.model.policy.parser import read_policy
from fray.model.policy.policy import Policy, TenantPolicy
from fray.model.policy.priority import Band
from fray.scheduler.effects import PolicyChanged
from tests.controller.test_people import admin_of, job_client
from tests.support.controller import Client, Node, Stage, spec, stage

GRANT = TenantPolicy(launches_for=("*",))
POLICY = Policy(
    users={
        "service": GRANT,
        "ada": TenantPolicy(weight=3.0, bands=(Band.BATCH,)),
        "some": TenantPolicy(launches_for=("ada",)),
    }
)


def launch_for(user: str, name: str = "engine", **more: Any) -> Launch:
    return Launch(jobs=(spec(name, user=user, **more),), on_behalf_of=user)


async def service_of(cluster: Stage, user: str = "service", node: Node | None = None) -> Client:
    """A job of the service's user, as the service is one."""
    node = node or await cluster.node(cpu=8)
    driver = await cluster.client(credential=await cluster.person(user, "user"), host=user)
    await driver.launch(spec(user))
    return await job_client(cluster, await node.wait_desired(f"{user}-1:0:0"))


async def test_a_job_that_is_launched_for_a_user_is_that_users_in_all_that_counts(autojump_clock: Any) -> None:
    async with stage(policy=POLICY) as cluster:
        admin = await admin_of(cluster)
        ada = await cluster.client(credential=await cluster.person("ada", "user", admin), host="ada")
        service = await service_of(cluster)
        info = (await service.ask(launch_for("ada"), [b"payload"])).jobs[0]
        assert info.user == "ada"
        state = cluster.controller.state
        # Not the band of the service's job, which ada may not have.
        assert state.jobs["service-1"].band is Band.INTERACTIVE
        assert state.jobs["engine-1"].band is Band.BATCH
        assert {user: account.share > 0 for user, account in state.shares.users.items()} == {
            "ada": True,
            "service": True,
        }
        # It is hers to see, and hers to stop.
        assert (await ada.ask(Terminate(jobs=("engine-1",), reason="enough"))).jobs == ("engine-1",)
        audit = await admin.ask(ReadAudit())
        assert isinstance(audit, AuditRecords)
        assert [(each.user, each.role, each.target) for each in audit.records if each.action == "Launch"] == [
            ("service", "user", "service-1"),
            ("service", "job", "engine-1 for ada"),
        ]
        with pytest.raises(InvalidRequest, match="user 'ada' may not have priority='production'"):
            await service.ask(launch_for("ada", "fast", band=Band.PRODUCTION), [b"payload"])


async def test_who_has_no_grant_cannot_launch_for_others(autojump_clock: Any) -> None:
    async with stage(policy=POLICY) as cluster:
        admin = await admin_of(cluster)
        for user, role in (("ada", "user"), ("bob", "admin"), ("some", "user")):
            await cluster.person(user, role, admin)
        service = await service_of(cluster, "eve")
        with pytest.raises(Unauthorized, match=r"user 'eve' may not launch jobs for 'ada'.*launches_for = \['ada'\]"):
            await service.ask(launch_for("ada"), [b"payload"])
        assert "engine-1" not in cluster.controller.state.jobs
        audit = (await admin.ask(ReadAudit())).records
        assert any(each.target == "engine-1 for ada" and each.outcome.startswith("refused") for each in audit)
        # A user may launch for itself by this way, too.
        assert (await service.ask(launch_for("eve"), [b"payload"])).jobs[0].user == "eve"


async def test_a_grant_of_names_is_for_these_and_only_for_users_of_the_cluster(autojump_clock: Any) -> None:
    async with stage(policy=POLICY) as cluster:
        admin = await admin_of(cluster)
        for user in ("ada", "bob"):
            await cluster.person(user, "user", admin)
        some = await service_of(cluster, "some")
        assert await some.ask(GetLaunchUsers()) == LaunchUsers(has_users=True, weights={"ada": 3.0, "some": 1.0})
        with pytest.raises(Unauthorized, match="may not launch jobs for 'bob'"):
            await some.ask(launch_for("bob"), [b"payload"])
        await some.ask(launch_for("ada"), [b"payload"])
        await admin.ask(RemoveUser(user="ada"))
        assert await some.ask(GetLaunchUsers()) == LaunchUsers(has_users=True, weights={"some": 1.0})
        with pytest.raises(Unauthorized, match="may not launch jobs for 'ada'"):
            await some.ask(launch_for("ada", "next"), [b"payload"])


async def test_a_job_that_was_launched_for_a_user_has_no_grant_of_who_launched_it(autojump_clock: Any) -> None:
    async with stage(policy=POLICY) as cluster:
        admin = await admin_of(cluster)
        for user in ("ada", "bob"):
            await cluster.person(user, "user", admin)
        node = await cluster.node(cpu=8)
        service = await service_of(cluster, node=node)
        await service.ask(launch_for("ada"), [b"payload"])
        engine = await job_client(cluster, await node.wait_desired("engine-1:0:0"))
        assert await engine.ask(GetLaunchUsers()) == LaunchUsers(has_users=True, weights={"ada": 3.0})
        with pytest.raises(Unauthorized, match="user 'ada' may not launch jobs for 'bob'"):
            await engine.ask(launch_for("bob", "next"), [b"payload"])


async def test_where_no_one_has_a_key_the_users_are_those_of_the_policy(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await cluster.client(role=Role.TOOL, host="admin", user="root")
        assert await admin.ask(GetLaunchUsers()) == LaunchUsers(has_users=False, weights={})
        cluster.controller.loop.post(
            PolicyChanged(policy=Policy(users={"*": TenantPolicy(weight=2.0), **POLICY.users}))
        )
        expected = LaunchUsers(has_users=True, weights={"ada": 3.0, "service": 1.0, "some": 1.0})
        while await admin.ask(GetLaunchUsers()) != expected:  # noqa: ASYNC110 - it sends no notification
            await trio.sleep(0.1)


def test_a_grant_to_all_users_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"launches_for is granted to one user: write it below \[users.NAME\]"):
        read_policy({"users": {"*": {"launches_for": ["*"]}}})
    with pytest.raises(InvalidRequest, match='must be a list of users: write \\["ada", "bob"\\]'):
        read_policy({"users": {"service": {"launches_for": "*"}}})
    found = read_policy({"users": {"*": {"weight": 2}, "service": {"launches_for": ["*"]}}})
    assert found.user("service").launches_for == ("*",)
    assert found.user("ada").launches_for == ()
