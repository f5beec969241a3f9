"""Provider ``tpu`` through Google's real client library, against a server on loopback that speaks its service."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, fields

from fray.controller.providers import tpu as tpu_module
from fray.controller.providers.base import Join, MachineRequest, ProviderError
from fray.controller.providers.tpu import TpuProvider
from fray.controller.providers.tpu_options import TpuOptions, node_file, read_options, startup_script
from fray.controller.providers.tpu_states import NODE_STATES, QUEUE_STATES, SeenNode, SeenQueued, kind_of, seen_unit
from fray.errors import InvalidRequest
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
    read_group,
)
from fray.testing.tpu_cloud import TpuCloud, Zone
from fray.testing.tpu_server import serve_tpus

ZONE, OTHER = "us-west4-a", "us-west4-b"
SECRET = "the-secret-half"
JOIN = Join("fray://10.0.0.5:7421", f"join:unit:4:99:{SECRET}")
NEEDED = {"project": "lab", "runtime_version": "v2-alpha-tpuv5-lite", "install": "true"}
V5E = GroupConfig(name="v5e", provider="tpu", tpu="v5litepod-16", zones=(ZONE,), options=NEEDED)


@define
class Place:
    """A cloud, the provider in front of it, and a group of its own."""

    cloud: TpuCloud
    provider: TpuProvider
    group: GroupConfig

    def request(self, name: str, zone: str = ZONE, spot: bool = False, **group: Any) -> MachineRequest:
        return MachineRequest(name, evolve(self.group, spot=spot, **group), zone, spot, JOIN)

    async def create(self, name: str, zone: str = ZONE, spot: bool = False, **group: Any) -> None:
        await self.provider.create(self.request(name, zone, spot, **group))

    async def seen(self) -> dict[str, SeenMachine]:
        return {machine.name: machine for machine in await self.provider.list()}

    async def states(self) -> dict[str, tuple[str, int]]:
        return {name: (str(one.state), one.hosts) for name, one in (await self.seen()).items()}


@asynccontextmanager
async def place(cloud: TpuCloud | None = None, cluster: str = "c1", **options: Any) -> AsyncIterator[Place]:
    cloud = cloud or TpuCloud()
    with serve_tpus(cloud) as endpoint:
        group = evolve(V5E, zones=tuple(cloud.zones), options={**NEEDED, "endpoint": endpoint, **options})
        provider = TpuProvider(cluster, [group], call_s=5.0)
        with trio.fail_after(20):
            yield Place(cloud, provider, group)
        await provider.aclose()


async def refused(call: Any) -> ProviderError:
    with pytest.raises(ProviderError) as info:
        await call
    return info.value


# TPU VMs -------------------------------------------------------------------------------------------------------------


async def test_a_slice_is_asked_for_and_seen_until_it_is_deleted() -> None:
    async with place() as here:
        await here.create("v5e-1")
        assert await here.states() == {"v5e-1": ("creating", 0)}
        here.cloud.advance(60)
        assert await here.seen() == {"v5e-1": SeenMachine("v5e-1", "v5e", ZONE, MachineState.RUNNING, 4)}
        await here.provider.delete("v5e-1", ZONE, "v5e")
        assert await here.states() == {"v5e-1": ("deleting", 4)}
        here.cloud.advance(30)
        assert await here.states() == {}


async def test_everything_the_operator_says_is_in_what_google_is_asked_for() -> None:
    options = {
        "network": "projects/lab/global/networks/tpus",
        "subnetwork": "projects/lab/regions/us-west4/subnetworks/tpus",
        "external_ips": True,
        "service_account": "fray@lab.iam.example",
        "tags": ["fray"],
        "labels": {"team": "rl"},
        "metadata": {"enable-oslogin": "TRUE"},
    }
    async with place(**options) as here:
        await here.create("v5e-1", spot=True)
        node = here.cloud.nodes[f"projects/lab/locations/{ZONE}/nodes/v5e-1"].what
        assert (node.accelerator_type, node.runtime_version) == ("v5litepod-16", "v2-alpha-tpuv5-lite")
        assert (node.network_config.network, node.network_config.subnetwork) == (
            options["network"],
            options["subnetwork"],
        )
        assert node.network_config.enable_external_ips
        assert (node.service_account.email, list(node.service_account.scope)) == (
            "fray@lab.iam.example",
            ["https://www.googleapis.com/auth/cloud-platform"],
        )
        assert list(node.tags) == ["fray"]
        assert dict(node.labels) == {
            "team": "rl",
            "fray-cluster": "c1",
            "fray-group": "v5e",
            "fray-machine": "v5e-1",
        }
        assert (node.scheduling_config.spot, node.scheduling_config.preemptible) == (True, False)
        assert set(node.metadata) == {"enable-oslogin", "startup-script", "fray-node", "fray-join-token"}


@pytest.mark.parametrize(
    ("spot", "options", "expected"),
    [
        (False, {}, (False, False, False)),
        (True, {}, (True, False, False)),
        (True, {"preemptible": True}, (False, True, False)),
        (False, {"reservation": "ours"}, (False, False, True)),
    ],
)
async def test_what_a_machine_may_cost_and_who_may_take_it_away(
    spot: bool, options: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    async with place() as here:
        options = {**here.group.options, **options}
        await here.create("v5e-1", spot=spot, options=options)
        (kept,) = here.cloud.nodes.values()
        config = kept.what.scheduling_config
        assert (config.spot, config.preemptible, config.reserved) == expected


async def test_asking_again_for_the_same_unit_changes_nothing() -> None:
    async with place() as here:
        await here.create("v5e-1")
        await here.create("v5e-1")
        here.cloud.advance(60)
        await here.create("v5e-1")
        assert await here.states() == {"v5e-1": ("running", 4)}


async def test_deleting_what_is_not_there_is_fine() -> None:
    async with place() as here:
        await here.provider.delete("never", ZONE, "v5e")
        await here.create("v5e-1")
        await here.provider.delete("v5e-1", ZONE, "v5e")
        here.cloud.advance(30)
        await here.provider.delete("v5e-1", ZONE, "v5e")


async def test_machines_of_other_clusters_and_unlabelled_ones_are_ignored() -> None:
    async with place() as here, place(here.cloud, "c2") as other:
        await here.create("v5e-1")
        await other.create("v5e-2")
        kept = here.cloud.nodes[f"projects/lab/locations/{ZONE}/nodes/v5e-1"]
        foreign = type(kept.what)(kept.what)
        foreign.name = foreign.name.replace("v5e-1", "by-hand")
        foreign.labels.clear()
        here.cloud.nodes[foreign.name] = evolve(kept, history=[(0.0, foreign)])
        assert list(await here.seen()) == ["v5e-1"]
        assert list(await other.seen()) == ["v5e-2"]


async def test_a_long_list_is_read_to_its_end() -> None:
    async with place(TpuCloud(page=3)) as here:
        for index in range(8):
            await here.create(f"v5e-{index}")
        assert len(await here.seen()) == 8
        assert here.cloud.calls.count("ListNodes") == 3


async def test_a_list_that_google_cannot_make_whole_is_no_list() -> None:
    async with place() as here:
        await here.create("v5e-1")
        here.cloud.unreachable.add(ZONE)
        error = await refused(here.provider.list())
        assert (error.kind, "cannot list queued resources in" in str(error)) == (ErrorKind.TRANSIENT, True)


async def test_zones_are_listed_together_and_a_unit_is_deleted_in_its_own() -> None:
    async with place(TpuCloud(zones={ZONE: Zone(), OTHER: Zone()})) as here:
        await here.create("a", ZONE)
        await here.create("b", OTHER)
        assert {one.name: one.zone for one in await here.provider.list()} == {"a": ZONE, "b": OTHER}
        await here.provider.delete("b", OTHER, "v5e")
        assert await here.states() == {"a": ("creating", 0), "b": ("deleting", 0)}


async def test_a_list_may_lag_behind() -> None:
    async with place(TpuCloud(list_lag_s=20)) as here:
        await here.create("v5e-1")
        assert await here.states() == {}
        here.cloud.advance(20)
        assert await here.states() == {"v5e-1": ("creating", 0)}
        here.cloud.advance(60)
        await here.provider.delete("v5e-1", ZONE, "v5e")
        here.cloud.advance(31)
        assert await here.states() == {"v5e-1": ("deleting", 4)}
        here.cloud.advance(20)
        assert await here.states() == {}


async def test_a_half_created_slice_is_seen_as_half() -> None:
    async with place() as here:
        here.cloud.limit_next_hosts(3)
        await here.create("v5e-1")
        here.cloud.advance(60)
        assert await here.states() == {"v5e-1": ("running", 3)}


async def test_a_preempted_slice_is_dead_and_can_be_deleted() -> None:
    async with place() as here:
        await here.create("v5e-1", spot=True)
        here.cloud.advance(60)
        here.cloud.preempt("v5e-1")
        assert (await here.seen())["v5e-1"].state is MachineState.PREEMPTED
        await here.provider.delete("v5e-1", ZONE, "v5e")
        here.cloud.advance(30)
        assert await here.states() == {}


@pytest.mark.parametrize(
    ("state", "spot", "seen"),
    [
        ("REPAIRING", False, "running"),
        ("STOPPED", False, "failed"),
        ("TERMINATED", False, "failed"),
        ("TERMINATED", True, "preempted"),
        ("UNKNOWN", False, "failed"),
    ],
)
async def test_a_slice_that_changes_is_reported_with_googles_message(state: str, spot: bool, seen: str) -> None:
    async with place() as here:
        await here.create("v5e-1", spot=spot)
        here.cloud.advance(60)
        here.cloud.set_state("v5e-1", state, "a chip is too hot")
        machine = (await here.seen())["v5e-1"]
        assert (str(machine.state), machine.message) == (seen, f"{state.lower()}: a chip is too hot")


# What Google refuses -------------------------------------------------------------------------------------------------


async def test_a_zone_without_capacity_says_so_after_it_has_accepted() -> None:
    async with place(TpuCloud(zones={ZONE: Zone(capacity=16)})) as here:
        await here.create("v5e-1")
        await here.create("v5e-2")
        here.cloud.advance(30)
        machine = (await here.seen())["v5e-2"]
        assert (machine.state, machine.error) == (MachineState.FAILED, ErrorKind.STOCKOUT)
        assert "There is no more capacity in the zone" in machine.message
        assert (await here.seen())["v5e-2"] == machine
        await here.provider.delete("v5e-2", ZONE, "v5e")
        here.cloud.advance(30)
        assert await here.states() == {"v5e-1": ("running", 4)}


async def test_a_quota_error_is_reported_at_once() -> None:
    async with place(TpuCloud(zones={ZONE: Zone(quota=16)})) as here:
        await here.create("v5e-1")
        error = await refused(here.create("v5e-2"))
        assert error.kind is ErrorKind.QUOTA
        assert str(error).startswith("Google says RESOURCE_EXHAUSTED: Quota limit 'TPUV5s")
        assert list(await here.states()) == ["v5e-1"]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        ("RESOURCE_EXHAUSTED", 'There is no more capacity in the zone "us-west4-a"; you can try …', "stockout"),
        ("RESOURCE_EXHAUSTED", "Quota limit 'TPUV4sPreemptible' has been exceeded. Limit: 8 in zone x.", "quota"),
        ("RESOURCE_EXHAUSTED", "Insufficient regional quota to satisfy request", "quota"),
        (
            "RESOURCE_EXHAUSTED",
            "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'",
            "transient",
        ),
        ("RESOURCE_EXHAUSTED", "out of everything", "stockout"),
        ("UNAVAILABLE", "The service is currently unavailable.", "transient"),
        ("UNAVAILABLE", "There is no more capacity in the zone", "stockout"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "transient"),
        ("ABORTED", "The operation was aborted.", "transient"),
        ("INTERNAL", "Internal error encountered", "transient"),
        ("UNKNOWN", "", "transient"),
        ("FAILED_PRECONDITION", "The resource is being changed", "transient"),
        ("FAILED_PRECONDITION", "Constraint constraints/compute.vmExternalIpAccess violated", "invalid"),
        ("PERMISSION_DENIED", "Cloud TPU API has not been used in project 7 before or it is disabled", "permission"),
        ("UNAUTHENTICATED", "Request had invalid authentication credentials", "permission"),
        ("INVALID_ARGUMENT", "runtime version not found", "invalid"),
        ("NOT_FOUND", "network not found", "invalid"),
        ("OUT_OF_RANGE", "no", "invalid"),
        ("UNIMPLEMENTED", "no", "invalid"),
    ],
)
async def test_each_refusal_has_its_kind(status: str, message: str, kind: str) -> None:
    assert kind_of(status, message) == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [("UNAVAILABLE", "transient"), ("PERMISSION_DENIED", "permission"), ("INVALID_ARGUMENT", "invalid")],
)
async def test_a_refusal_comes_through_the_wire_with_its_words(status: str, kind: str) -> None:
    async with place() as here:
        for method, call in (
            ("CreateNode", lambda: here.create("v5e-1")),
            ("ListNodes", here.provider.list),
            ("DeleteQueuedResource", lambda: here.provider.delete("v5e-1", ZONE, "v5e")),
        ):
            here.cloud.fail_next(method, status, "not today,\n  thank you")
            error = await refused(call())
            assert (error.kind, str(error)) == (kind, f"Google says {status}: not today, thank you")


async def test_only_the_scheduler_retries() -> None:
    async with place() as here:
        here.cloud.fail_next("ListNodes", "UNAVAILABLE", "no")
        await refused(here.provider.list())
        assert here.cloud.calls.count("ListNodes") == 1
        await here.provider.list()


async def test_a_zone_or_a_type_that_is_none_is_said_by_google() -> None:
    async with place() as here:
        error = await refused(here.create("v5e-1", "us-north9-z"))
        assert (error.kind, "locations/us-north9-z" in str(error)) == (ErrorKind.PERMISSION, True)
        error = await refused(here.create("not a name"))
        assert (error.kind, "invalid name of a TPU VM" in str(error)) == (ErrorKind.INVALID, True)


async def test_a_google_that_is_not_there_is_waited_for_no_longer_than_the_limit() -> None:
    group = evolve(V5E, options={**NEEDED, "endpoint": "127.0.0.1:9"})
    provider = TpuProvider("c1", [group], call_s=0.2)
    with trio.fail_after(10):
        assert (await refused(provider.list())).kind is ErrorKind.TRANSIENT
    await provider.aclose()


async def test_a_call_that_google_does_not_answer_delays_no_other_and_can_be_cancelled() -> None:
    async with place() as here:
        await here.provider.list()
        with here.cloud.lock, trio.move_on_after(0.05) as scope:
            await here.provider.list()
        assert scope.cancelled_caught
        assert await here.states() == {}


# Queued resources ----------------------------------------------------------------------------------------------------


async def test_a_queued_slice_waits_for_capacity_and_comes() -> None:
    async with place(TpuCloud(zones={ZONE: Zone(capacity=0)}), queued=True) as here:
        await here.create("v5e-1", spot=True, boot_timeout_s=3600.0)
        (kept,) = here.cloud.queued.values()
        assert "spot" in kept.what
        assert kept.what.queueing_policy.valid_until_duration.total_seconds() == 3600
        assert (await here.seen())["v5e-1"].message == "queued resource accepted"
        here.cloud.advance(10)
        assert (await here.seen())["v5e-1"] == SeenMachine(
            "v5e-1", "v5e", ZONE, MachineState.CREATING, 0, "queued resource waiting for resources"
        )
        here.cloud.zones[ZONE].capacity = 16
        here.cloud.advance(10)
        assert await here.states() == {"v5e-1": ("creating", 0)}
        here.cloud.advance(60)
        assert await here.states() == {"v5e-1": ("running", 4)}
        (node,) = here.cloud.nodes.values()
        assert node.what.labels["fray-machine"] == "v5e-1"


async def test_a_queued_slice_that_never_comes_has_failed_when_google_gives_it_up() -> None:
    async with place(TpuCloud(zones={ZONE: Zone(capacity=0)}), queued=True) as here:
        await here.create("v5e-1", boot_timeout_s=120.0)
        here.cloud.advance(119)
        assert await here.states() == {"v5e-1": ("creating", 0)}
        here.cloud.advance(1)
        machine = (await here.seen())["v5e-1"]
        assert (machine.state, machine.error) == (MachineState.FAILED, ErrorKind.STOCKOUT)
        assert machine.message.startswith("queued resource failed: The queued resource could not be fulfilled")
        await here.provider.delete("v5e-1", ZONE, "v5e")
        here.cloud.advance(30)
        assert await here.states() == {}


@pytest.mark.parametrize("seconds", [0, 10, 40, 70])
async def test_a_queued_slice_is_deleted_with_its_node_in_whatever_state_it_is(seconds: float) -> None:
    async with place(queued=True) as here:
        await here.create("v5e-1")
        here.cloud.advance(seconds)
        await here.provider.delete("v5e-1", ZONE, "v5e")
        assert {state for state, _ in (await here.states()).values()} == {"deleting"}
        here.cloud.advance(30)
        assert await here.states() == {}
        assert not here.cloud.nodes


async def test_a_queued_slice_that_is_preempted_is_dead_when_its_machines_are_gone_and_not_before() -> None:
    async with place(queued=True) as here:
        await here.create("v5e-1", spot=True)
        here.cloud.advance(70)
        assert await here.states() == {"v5e-1": ("running", 4)}
        here.cloud.preempt("v5e-1")
        machine = (await here.seen())["v5e-1"]
        assert (machine.state, machine.message) == (MachineState.DELETING, "queued resource suspending: by service")
        here.cloud.advance(30)
        assert (await here.seen())["v5e-1"].state is MachineState.PREEMPTED


async def test_a_group_that_is_no_longer_queued_still_deletes_what_was() -> None:
    async with place(queued=True) as here:
        await here.create("v5e-1")
        here.provider.update_groups([evolve(here.group, options={**here.group.options, "queued": False})])
        await here.provider.delete("v5e-1", ZONE, "v5e")
        here.cloud.advance(30)
        assert await here.states() == {}


async def test_a_group_that_is_gone_is_found_by_its_zone_while_that_is_known() -> None:
    async with place() as here:
        await here.create("v5e-1")
        here.provider.update_groups([])
        assert list(await here.seen()) == ["v5e-1"]
        await here.provider.delete("v5e-1", ZONE, "v5e")
        error = await refused(here.provider.delete("x", "europe-west4-b", "gone"))
        assert "restore the group 'gone' in the policy" in str(error)


def test_every_state_of_googles_has_one_in_the_scheduler() -> None:
    from google.cloud import tpu_v2

    assert set(NODE_STATES) == {state.name for state in tpu_v2.Node.State}
    assert set(QUEUE_STATES) == {state.name for state in tpu_v2.QueuedResourceState.State}


def test_a_unit_is_dead_only_when_no_machine_of_it_can_live() -> None:
    """Whatever is listed of the two halves: PREEMPTED and FAILED only if the node is gone, or Google says so of it."""
    dead = (MachineState.PREEMPTED, MachineState.FAILED)
    for queue in QUEUE_STATES:
        for node in NODE_STATES:
            seen = seen_unit(
                SeenNode(name="u", group="g", zone="z", state=node, hosts=4),
                SeenQueued(name="u", group="g", zone="z", state=queue),
            )
            if seen.state in dead:
                assert NODE_STATES[node] in dead or queue in ("FAILED", "SUSPENDED")


# Configuration of the hosts ------------------------------------------------------------------------------------------


def request(**group: Any) -> MachineRequest:
    return MachineRequest("v5e-1", evolve(V5E, **group), ZONE, False, JOIN)


def test_the_configuration_of_a_host_has_all_but_its_number() -> None:
    parsed = tomllib.loads(node_file(request(attributes={"rack": 'a "quoted" one'})))
    assert parsed == {
        "controller": "fray://10.0.0.5:7421",
        "name": "v5e-1-@WORKER@",
        "state_dir": "/var/lib/fray/v5e-1",
        "cache_dir": "/var/lib/fray/cache",
        "join_token_file": "/run/fray/join",
        "insecure": True,
        "attributes": {
            "rack": 'a "quoted" one',
            "group": "v5e",
            "machine": "v5e-1",
            "slice": "v5e-1",
            "zone": ZONE,
            "region": "us-west4",
            "tpu_type": "v5litepod-16",
            "tpu_worker": "@WORKER@",
            "preemptible": "false",
        },
    }


STUBS = {
    "curl": """\
case "${@: -1}" in
  */agent-worker-number) echo 2;;
  */fray-join-token) printf %s "$TOKEN";;
  */fray-node) cat "$FRAY_ROOT/fray-node";;
  *) exit 22;;
esac""",
    "systemctl": "exit 1",
    "systemd-run": 'printf "%s\\n" "$@" > "$FRAY_ROOT/started"; env > "$FRAY_ROOT/environ"',
}
"""Stand-in for the environment of the start-up script on a TPU VM."""


def test_the_startup_script_starts_a_node_and_shows_the_token_to_no_other_user(tmp_path: Path) -> None:
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    (tmp_path / "fray-node").write_text(node_file(request()))
    options = read_options(evolve(V5E, options={**NEEDED, "install": 'touch "$FRAY_ROOT/installed"'}))
    script = tmp_path / "script"
    script.write_text(startup_script(4, options))
    environ = {"PATH": f"{stubs}:{os.environ['PATH']}", "FRAY_ROOT": str(tmp_path)}
    (stubs / "curl").write_text((stubs / "curl").read_text().replace("$TOKEN", JOIN.token))
    done = subprocess.run(["bash", "-x", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "installed").exists()
    token, node = tmp_path / "run/fray/join", tmp_path / "run/fray/node.toml"
    assert token.read_text() == JOIN.token
    assert [stat.S_IMODE(file.stat().st_mode) for file in (token, node)] == [0o600, 0o600]
    parsed = tomllib.loads(node.read_text())
    assert (parsed["name"], parsed["attributes"]["tpu_worker"]) == ("v5e-1-2", "2")
    started = (tmp_path / "started").read_text()
    assert "--setenv=FRAY_JOB_UIDS=none" in started.splitlines()
    assert started.splitlines()[-4:] == [f"{tmp_path}/opt/fray/bin/fray-node", "--config", str(node), "--log-json"]
    for shown in (done.stdout, done.stderr, started, (tmp_path / "environ").read_text(), script.read_text()):
        assert SECRET not in shown


def test_a_machine_of_one_host_needs_no_number(tmp_path: Path) -> None:
    assert "worker=0\n" in startup_script(1, read_options(V5E))
    assert "worker=$(ask agent-worker-number)\n" in startup_script(2, read_options(V5E))


async def test_the_token_is_neither_logged_nor_reported_whatever_google_answers(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library logs whole requests when it is asked to (GOOGLE_SDK_PYTHON_LOGGING_SCOPE)."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "google.cloud.tpu_v2")
    wire = logging.getLogger("google.cloud.tpu_v2.services.tpu.transports.grpc")
    monkeypatch.setattr(wire, "handlers", [caplog.handler])
    monkeypatch.setattr(wire, "level", logging.NOTSET)
    async with place() as here:
        here.cloud.fail_next("CreateNode", "INVALID_ARGUMENT", f"what is {JOIN.token} in metadata?")
        error = await refused(here.create("v5e-1"))
        assert "what is join:unit:4:99:[join token] in metadata?" in str(error)
        await here.create("v5e-1")
        await here.seen()
        assert SECRET not in caplog.text + str(error) + repr(error) + repr(here.provider) + repr(here.request("x"))
        assert not [record for record in caplog.records if SECRET in str(record.__dict__)]


# Options and docs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "options", "said"),
    [
        ({}, {"project": ""}, r"\[group.options\] needs project"),
        ({}, {"runtime_version": ""}, "needs runtime_version"),
        ({}, {"install": ""}, "needs install"),
        ({}, {"runtime": "x"}, "unknown option 'runtime'; did you mean runtime_version"),
        ({}, {"zzz": "x"}, "unknown option 'zzz'; there are project, runtime_version"),
        ({}, {"queued": "yes"}, "queued='yes' must be true or false"),
        ({}, {"tags": ["a", 1]}, r"tags=\['a', 1\] must be a list of strings"),
        ({}, {"labels": {"a": 1}}, "must be a table of strings"),
        ({}, {"labels": {"Team": "rl"}}, "label Team='rl': up to 63 lower-case"),
        ({}, {"labels": {"fray-x": "y"}}, "are reserved"),
        ({}, {"metadata": {"startup-script": "x"}}, "metadata 'startup-script' is reserved"),
        ({"spot": True}, {"reservation": "r"}, "cannot come from a reservation"),
        ({}, {"preemptible": True}, "is for spot groups that are not queued"),
        ({"spot": True}, {"preemptible": True, "queued": True}, "is for spot groups that are not queued"),
        ({}, {"endpoint": "10.0.0.1:80"}, "is not on this machine"),
        ({"tpu": ""}, {}, "no TPU type"),
        ({"zones": ("",)}, {}, "no zones"),
    ],
)
def test_an_option_that_cannot_be_is_said_before_anything_is_asked(
    group: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        TpuProvider("c1", [evolve(V5E, options={**NEEDED, **options}, **group)])


def test_the_policy_in_the_docs_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs/tpu.md").read_text()
    parsed = tomllib.loads(page.split("```toml\n")[1].split("```")[0])
    (group,) = map(read_group, parsed["group"])
    assert (group.hosts, read_options(group).project) == (4, "my-lab")
    for option in fields(TpuOptions):
        assert option.name == "endpoint" or f"`{option.name}`" in page


def test_a_policy_that_is_wrong_changes_nothing_when_it_is_read_again() -> None:
    provider = TpuProvider("c1", [V5E])
    with pytest.raises(InvalidRequest):
        provider.update_groups([evolve(V5E, name="other", zones=(OTHER,)), evolve(V5E, options={})])
    assert provider.groups == [V5E]


def test_groups_of_other_providers_are_none_of_its_business() -> None:
    TpuProvider("c1", [GroupConfig(name="here", provider="process")])


def test_without_googles_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_module, "is_installed", lambda: False)
    with pytest.raises(InvalidRequest, match=r"pip install 'fray\[tpu\]'"):
        TpuProvider("c1", [V5E])


def test_googles_library_is_imported_only_where_it_is_called() -> None:
    code = (
        "import sys; from fray.controller.providers.tpu import TpuProvider; import fray.controller.main; "
        "assert not {'grpc', 'google.cloud.tpu_v2', 'google.api_core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
