"""Users, keys, namespaces and the audit log, over a network in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.controller import certificate_authority
from fray.controller.accepted_tokens import CHECK_S, AcceptedTokens, rotate_token
from fray.controller.audit_log import FILES, STRANGERS_PER_MINUTE, AuditLog
from fray.controller.certificate_authority import CertificateAuthority
from fray.controller.store import Store
from fray.errors import InvalidRequest, NoSuchJob, Unauthorized
from fray.model.access.user_keys import InvitationText, derive_verifier, read_invitation
from fray.model.messages.client import CreateReservation, ListJobs, Role, Terminate, WatchJobs
from fray.model.messages.machine_groups import ScaleGroup
from fray.model.messages.maintenance import CordonNodes, UncordonNodes
from fray.model.messages.people import (
    AddUser,
    AuditRecord,
    ListKeys,
    ListNamespaces,
    ListUsers,
    ReadAudit,
    RemoveUser,
    RevokeKeys,
    ShareNamespace,
)
from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.policy import Policy
from fray.model.reservations import ReservationSpec
from fray.model.resources import Demand
from fray.model.specs import DesiredAttempt
from fray.net.cluster_token import read_token_file
from fray.net.process_identity import account_name
from fray.net.transport import Credential
from fray.scheduler.effects import PolicyChanged
from tests.support.controller import TOKEN, Client, Stage, spec, stage


async def admin_of(cluster: Stage) -> Client:
    return await cluster.client(role=Role.TOOL, host="admin", user="root")


async def job_client(cluster: Stage, desired: DesiredAttempt) -> Client:
    credential = Credential(f"attempt:{desired.attempt_id}", desired.key)
    return await cluster.client(role=Role.JOB, attempt_id=desired.attempt_id, credential=credential)


async def invite(admin: Client, user: str = "ada", role: str = "user", **more: float) -> InvitationText:
    return read_invitation((await admin.ask(AddUser(user=user, role=role, **more))).text)


# Keys


async def test_an_invitation_makes_one_key_also_if_its_answer_is_lost(autojump_clock: Any) -> None:
    async with stage() as cluster:
        invitation = await invite(await admin_of(cluster))
        first = await cluster.redeem(invitation, "one secret")
        again = await cluster.redeem(invitation, "one secret")
        assert (first.key_id, first.user, first.role) == (again.key_id, "ada", "user")
        with pytest.raises(Unauthorized, match="the invitation was already used, on laptop at"):
            await cluster.redeem(invitation, "another secret")


async def test_a_key_says_who_its_user_is_whatever_the_client_says(autojump_clock: Any) -> None:
    async with stage() as cluster:
        node = await cluster.node()
        driver = await cluster.client(credential=await cluster.person("ada", "user"), user="root")
        assert driver.welcomes[0].user == "ada"
        (info,) = await driver.launch(spec(user="root"))
        assert info.user == "ada"
        desired = await node.wait_desired("work-1:0:0")
        assert desired.spec.user == "ada"
        job = await cluster.client(
            role=Role.JOB,
            attempt_id=desired.attempt_id,
            credential=Credential(f"attempt:{desired.attempt_id}", desired.key),
        )
        (child,) = await job.launch(spec("child", user="root"))
        assert child.user == "ada"


async def test_a_reservation_is_the_users_whatever_its_request_says(autojump_clock: Any) -> None:
    async with stage() as cluster:
        ada = await cluster.client(credential=await cluster.person("ada", "user"), user="root", namespace="adas")
        demand = Demand(cpu_milli=1000)
        wanted = ReservationSpec(reservation_id="held-1", name="held", namespace="adas", demand=demand, user="root")
        await ada.ask(CreateReservation(spec=wanted))
        assert cluster.controller.state.reservations["held-1"].spec.user == "ada"


async def test_a_cluster_token_speaks_for_the_user_that_is_stated(autojump_clock: Any) -> None:
    async with stage() as cluster:
        await cluster.node()
        driver = await cluster.client(user="bob")
        assert driver.welcomes[0].user == ""
        (info,) = await driver.launch(spec(user="carl"))
        assert info.user == "carl"


async def test_keys_expire_and_a_connection_with_one_is_refused_at_its_next_request(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        invitation = await invite(admin, key_life_s=60.0)
        grant = await cluster.redeem(invitation, "secret")
        assert grant.life_s == 60.0
        credential = Credential(grant.key_id, derive_verifier("secret", invitation.key_id))
        driver = await cluster.client(credential=credential)
        await driver.ask(ListJobs())
        await trio.sleep(61)
        with pytest.raises(Unauthorized, match="this key has expired"):
            await driver.ask(ListJobs())
        with pytest.raises(Unauthorized):
            await cluster.client(credential=credential)
        assert (await admin.ask(ListKeys())).keys == ()


async def test_an_invitation_expires(autojump_clock: Any) -> None:
    async with stage() as cluster:
        invitation = await invite(await admin_of(cluster), life_s=10.0)
        await trio.sleep(11)
        with pytest.raises(Unauthorized):
            await cluster.redeem(invitation, "secret")


async def test_a_revoked_key_ends_its_connections_and_opens_none(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        credential = await cluster.person("ada", "user", admin)
        driver = await cluster.client(credential=credential)
        (key,) = (await admin.ask(ListKeys(user="ada"))).keys
        assert (key.key_id, key.label, key.open_invitation) == (credential.key_id, "laptop", False)
        assert [gone.key_id for gone in (await admin.ask(RevokeKeys(keys=(key.key_id,)))).keys] == [key.key_id]
        await driver.until(lambda: driver.ended)
        assert "its key was revoked" in str(driver.ended)
        with pytest.raises(Unauthorized):
            await cluster.client(credential=credential)
        with pytest.raises(InvalidRequest, match="there is no valid key"):
            await admin.ask(RevokeKeys(keys=(key.key_id,)))


async def test_a_user_that_is_removed_has_no_key_and_no_namespace(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        credential = await cluster.person("ada", "user", admin)
        driver = await cluster.client(credential=credential, namespace="lab")
        await admin.ask(RemoveUser(user="ada"))
        await driver.until(lambda: driver.ended)
        assert (await admin.ask(ListUsers())).users == ()
        assert (await admin.ask(ListNamespaces())).namespaces == ()
        with pytest.raises(InvalidRequest, match="there is no user 'ada'"):
            await admin.ask(RemoveUser(user="ada"))


async def test_users_see_and_revoke_their_own_keys_only(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        ada, bob = await cluster.person("ada", "user", admin), await cluster.person("bob", "user", admin)
        client = await cluster.client(credential=ada)
        assert [key.user for key in (await client.ask(ListKeys())).keys] == ["ada"]
        assert [key.user for key in (await client.ask(ListKeys(user="bob"))).keys] == ["ada"]
        for request in (RevokeKeys(keys=(bob.key_id,)), RevokeKeys(user="bob")):
            with pytest.raises(Unauthorized, match="one of these keys is not of user 'ada'"):
                await client.ask(request)
        assert len((await client.ask(RevokeKeys(keys=(ada.key_id,)))).keys) == 1


async def test_everything_about_people_survives_a_restart_and_the_store_has_no_secret(autojump_clock: Any) -> None:
    store = Store.memory()
    async with stage(store) as cluster:
        admin = await admin_of(cluster)
        credential = await cluster.person("ada", "user", admin)
        driver = await cluster.client(credential=credential, namespace="lab")
        await driver.ask(ShareNamespace(namespace="lab", users=("bob",)))
        meta = json.dumps(store.load().meta)
        assert "secret of ada" not in meta
        await cluster.crash()
        await cluster.start()
        again = await cluster.client(credential=credential, namespace="lab")
        (info,) = (await again.ask(ListNamespaces())).namespaces
        assert (info.owner, info.shared_with) == ("ada", ("bob",))


async def test_another_person_may_not_continue_a_session(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        ada, bob = await cluster.person("ada", "user", admin), await cluster.person("bob", "user", admin)
        first = await cluster.client("session-1", credential=ada)
        await first.ask(ListJobs())
        first.scope.cancel()
        with pytest.raises(Unauthorized):
            await cluster.client("session-1", credential=bob, host="other")


@pytest.mark.parametrize("text", ["", "fray-invite:", "fray-invite:a", "join:a:1:2:b", "fray-invite:a b:c", "x" * 5000])
def test_what_is_not_an_invitation_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(InvalidRequest, match="not an invitation") as caught:
        read_invitation(text)
    assert len(text) < 20 or text not in str(caught.value)


def test_an_invitation_carries_the_fingerprint_of_the_authority() -> None:
    invitation = InvitationText("id", "secret", ("ab" * 32, "cd" * 32))
    assert read_invitation(invitation.text + "\n") == invitation


# Namespaces


async def test_a_namespace_is_its_first_users_until_it_is_shared(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        ada, bob = await cluster.person("ada", "user", admin), await cluster.person("bob", "user", admin)
        driver = await cluster.client(credential=ada, namespace="lab")
        await driver.launch(spec())
        with pytest.raises(Unauthorized, match="namespace 'lab' is not of user 'bob'"):
            await cluster.client(credential=bob, namespace="lab")
        other = await cluster.client(credential=bob)
        with pytest.raises(Unauthorized, match="fray namespace share NAMESPACE --with bob"):
            await other.ask(WatchJobs(jobs=("work-1",)))
        with pytest.raises(Unauthorized):
            await other.launch(spec("intruder", namespace="lab"))
        with pytest.raises(Unauthorized):
            await other.ask(ShareNamespace(namespace="lab", users=("bob",)))
        assert (await other.ask(Terminate(name="work", namespace="*"))).jobs == ()
        await driver.ask(ShareNamespace(namespace="lab", users=("bob",)))
        assert (await other.ask(WatchJobs(jobs=("work-1",)))).jobs[0].user == "ada"
        assert [job.name for job in (await other.ask(ListJobs(namespace="lab"))).jobs] == ["work"]
        await (await cluster.client(credential=bob, namespace="lab")).launch(spec("mine"))
        await driver.ask(ShareNamespace(namespace="lab", users=("bob",), on=False))
        with pytest.raises(Unauthorized):
            await other.ask(WatchJobs(jobs=("work-1",)))


async def test_a_namespace_in_which_others_have_something_is_not_free(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        ada = await cluster.person("ada", "user", admin)
        holder = await cluster.client(namespace="production", user="svc")
        await holder.launch(spec(user="svc"))
        with pytest.raises(Unauthorized, match="namespace 'production'"):
            await cluster.client(credential=ada, namespace="production")


async def test_a_limit_of_a_list_counts_what_the_client_may_see(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        ada, bob = await cluster.person("ada", "user", admin), await cluster.person("bob", "user", admin)
        mine = await cluster.client(credential=ada)
        await mine.launch(spec("mine"))
        await (await cluster.client(credential=bob)).launch(*(spec(f"other{n}") for n in range(5)))
        assert [job.name for job in (await mine.ask(ListJobs(namespace="*", limit=2))).jobs] == ["mine"]


async def test_a_job_reaches_what_it_launched_and_its_own_namespace_and_nothing_else(autojump_clock: Any) -> None:
    async with stage() as cluster:
        node = await cluster.node()
        await (await cluster.client(user="eve")).launch(spec("other"))
        await (await cluster.client()).launch(spec())
        desired = await node.wait_desired("work-1:0:0")
        job = await cluster.client(
            role=Role.JOB,
            attempt_id=desired.attempt_id,
            credential=Credential(f"attempt:{desired.attempt_id}", desired.key),
        )
        await job.launch(spec("away", namespace="away", detached=True))
        assert {info.name for info in (await job.ask(ListJobs(namespace="*"))).jobs} == {"work", "away"}
        for job_id in ("work-1", "away-1"):
            await job.ask(WatchJobs(jobs=(job_id,)))
        for request in (WatchJobs(jobs=("other-1",)), Terminate(jobs=("other-1",)), CordonNodes(nodes=("n1",))):
            with pytest.raises(Unauthorized):
                await job.ask(request)
        with pytest.raises(NoSuchJob):
            await job.ask(WatchJobs(jobs=("unknown-1",)))
        with pytest.raises(Unauthorized):
            await job.launch(spec("intruder", namespace="lab"))
        assert (await job.ask(Terminate(jobs=("away-1",)))).jobs == ("away-1",)


# Audit


async def test_the_audit_log_says_who_did_what_with_what_outcome(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    async with stage(store) as cluster:
        admin = await admin_of(cluster)
        ada = await cluster.person("ada", "user", admin)
        await cluster.node()
        driver = await cluster.client(credential=ada, namespace="lab")
        await driver.launch(spec(env_vars={"PASSWORD": "hunter2"}))
        with pytest.raises(Unauthorized):
            await driver.ask(CordonNodes(nodes=("n1",), reason="mine\x1b[31m"))
        await driver.ask(Terminate(jobs=("work-1",), reason="done with it"))
        with pytest.raises(Unauthorized):
            await cluster.client(credential=Credential("user:nope", "wrong"))
        records = (await admin.ask(ReadAudit())).records
    seen = [(one.user, one.role, one.action, one.target, one.outcome.partition(":")[0]) for one in records]
    assert seen == [
        ("root", "admin", "AddUser", "ada as user", "done"),
        ("", "", "KeyGrant", "", "done"),
        ("ada", "user", "Launch", "work-1", "done"),
        ("ada", "user", "CordonNodes", "n1: mine\\u001b[31m", "refused"),
        ("ada", "user", "Terminate", "work-1: done with it", "done"),
        ("", "", "connect", "", "refused"),
    ]
    launch = records[2]
    assert (launch.namespace, launch.key) == ("lab", ada.key_id)
    assert launch.remote
    text = (tmp_path / "store" / "audit.jsonl").read_text()
    assert "hunter2" not in text
    assert "secret of ada" not in text
    assert "\x1b" not in text
    assert (tmp_path / "store" / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["action"] for line in text.splitlines()][:2] == ["AddUser", "KeyGrant"]


async def test_the_audit_log_has_maintenance_by_users_and_changes_on_the_controllers_machine(
    tmp_path: Path, autojump_clock: Any
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    first = certificate_authority.create(tmp_path, 0.0).pins[0]
    authority = CertificateAuthority(lambda _: certificate_authority.load(tmp_path, 0.0), clock=lambda: 0.0)
    tokens = AcceptedTokens(lambda: read_token_file(str(tmp_path / "token"))[0])
    policy = Policy(groups=(GroupConfig(name="gpus", provider="process", max=0),))
    async with stage(token=tokens, authority=authority, policy=policy) as cluster:
        admin = await admin_of(cluster)
        olga = await cluster.client(credential=await cluster.person("olga", "operator", admin), role=Role.TOOL)
        ada = await cluster.person("ada", "user", admin)
        await cluster.node()
        await olga.ask(CordonNodes(nodes=("n1",), reason="new disk"))
        await olga.ask(UncordonNodes(nodes=("n1",)))
        await olga.ask(CordonNodes(nodes=("n1",), reason="new board", drain=True))
        await olga.ask(ScaleGroup(group="gpus", max=3))
        with pytest.raises(Unauthorized):
            await olga.ask(RevokeKeys(user="ada"))
        await admin.ask(RevokeKeys(keys=(ada.key_id,)))
        await admin.ask(RevokeKeys(user="ada"))
        cluster.controller.loop.post(PolicyChanged(policy=policy))
        rotate_token(tmp_path / "token", cluster.rng)
        second = certificate_authority.rotate(tmp_path, 1.0).pins[0]
        await trio.sleep(2 * CHECK_S)
        certificate_authority.forget_previous(tmp_path)
        await trio.sleep(2 * CHECK_S)
        records = (await admin.ask(ReadAudit())).records
    here = (account_name(), "local")
    seen = [(one.user, one.role, one.action, one.target, one.outcome.partition(":")[0]) for one in records]
    # The token and the authority are looked at by two tasks, so the order of these lines is not fixed.
    assert sorted(seen[-4:-1]) == [
        (*here, "ca", f"replaced by {second}; the previous one is accepted, too", "done"),
        (*here, "policy", "reloaded on SIGHUP", "done"),
        (*here, "token", "replaced; the previous one is accepted, too", "done"),
    ]
    assert seen[-1] == (*here, "ca", "the previous one is accepted no longer", "done")
    assert first != second
    assert [line for line in seen[:-4] if line[2] not in ("AddUser", "KeyGrant")] == [
        ("olga", "operator", "CordonNodes", "n1: new disk", "done"),
        ("olga", "operator", "UncordonNodes", "n1", "done"),
        ("olga", "operator", "CordonNodes", "n1 (drain): new board", "done"),
        ("olga", "operator", "ScaleGroup", "gpus: min=None max=3", "done"),
        ("olga", "operator", "RevokeKeys", "user=ada", "refused"),
        ("root", "admin", "RevokeKeys", ada.key_id, "done"),
        ("root", "admin", "RevokeKeys", "user=ada", "done"),
    ]
    assert all(one.at and one.remote and one.key for one in records[:-4])


def _record(at: float, **more: str) -> AuditRecord:
    return AuditRecord(at=at, role="user", action="Launch", **{"user": "ada", "outcome": "done", **more})


async def test_the_audit_log_is_rotated_by_size_and_has_a_limit(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, limit_bytes=1000)
    for number in range(200):
        log.write(_record(float(number), target=f"job-{number}"))
    log.close()
    sizes = [entry.stat().st_size for entry in os.scandir(tmp_path)]
    assert len(sizes) == FILES
    assert max(sizes) <= 1000
    found = await log.read(ReadAudit(limit=10_000), 200.0)
    assert [one.at for one in found] == [float(at) for at in range(200 - len(found), 200)]
    assert [one.target for one in await log.read(ReadAudit(since_s=2.5), 200.0)] == ["job-198", "job-199"]
    assert [one.target for one in await log.read(ReadAudit(limit=1), 200.0)] == ["job-199"]


async def test_strangers_cannot_fill_the_audit_log(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.write(_record(0.0))
    for number in range(10_000):
        log.write_stranger(_record(1.0 + number / 1000, user="", remote=f"tcp:10.0.{number // 250}.{number % 250}:1"))
    log.write_stranger(_record(100.0, user="", remote="tcp:10.1.0.0:1"))
    log.close()
    found = await log.read(ReadAudit(limit=10_000), 100.0)
    assert len(found) == 1 + STRANGERS_PER_MINUTE + 2
    assert found[-2].outcome == f"refused: {10_000 - STRANGERS_PER_MINUTE} more attempts in a minute"


async def test_refusals_of_one_machine_are_one_line_a_minute_for_each_key(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for number in range(100):
        for key in ("", "user:ada"):
            log.write_stranger(_record(number / 10, outcome="refused: x", remote=f"tcp:h:{number}", key=key), key)
    log.write_stranger(_record(61.0, outcome="refused: x", remote="tcp:h:9"))
    # That of the other key is written by the reader, since nothing comes after it.
    found = await log.read(ReadAudit(), 70.0)
    assert [(one.at, one.key, one.outcome) for one in found] == [
        (0.0, "", "refused: x"),
        (0.0, "user:ada", "refused: x"),
        (61.0, "", "refused: x (99 more in that minute)"),
        (61.0, "", "refused: x"),
        (70.0, "user:ada", "refused: x (99 more in that minute)"),
    ]


async def test_dialers_that_are_refused_are_in_the_audit_log(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await admin_of(cluster)
        ada, bob = await cluster.person("ada", "user", admin), await cluster.person("bob", "user", admin)
        eve = await invite(admin, "eve", key_life_s=1.0)
        own = await cluster.redeem(eve, "secret of eve")
        await admin.ask(RevokeKeys(user="bob"))
        await trio.sleep(2)
        tried = {
            "tool": Credential("cluster", "guess"),
            "one": Credential(ada.key_id, "guess"),
            "two": bob,
            "three": Credential(own.key_id, derive_verifier("secret of eve", eve.key_id)),
            "four": Credential("user:unknown", "guess"),
            "five": Credential("attempt:work-1:0:0", "guess"),
            "six": Credential("machine:gpu:0:n9", "guess"),
            "seven": Credential("", ""),
        }
        for host, credential in tried.items():
            for _ in range(3):
                with pytest.raises(Unauthorized):
                    await cluster.client(host=host, credential=credential)
        cluster.controller.gateway.keys.on_account_refused("unix:pid=12", 1001)
        found = (await admin.ask(ReadAudit())).records
        assert [(one.remote, one.key, one.target, one.outcome) for one in found if one.action == "connect"] == [
            ("memory:tool", "cluster", "", "refused: wrong proof"),
            ("memory:one", ada.key_id, "key of ada", "refused: wrong proof"),
            ("memory:two", bob.key_id, "", "refused: unknown or revoked key"),
            ("memory:three", own.key_id, "key of eve", "refused: the key has expired"),
            ("memory:four", "user:unknown", "", "refused: unknown or revoked key"),
            ("memory:five", "attempt:work-1:0:0", "", "refused: the attempt has ended, or is unknown"),
            ("memory:six", "machine:gpu:0:n9", "", "refused: wrong proof"),
            ("memory:seven", "", "", "refused: no key"),
            ("unix:pid=12", "", "", "refused: uid 1001 is another account of this machine"),
        ]


async def test_a_torn_line_of_the_audit_log_is_left_out(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.write(_record(1.0))
    log.close()
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"at": 2.0, "us\n')
    assert [one.at for one in await log.read(ReadAudit(), 3.0)] == [1.0]
