"""Ports of jobs: assigned by the scheduler, never twice; claimed by nodes; checked before use."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from typing import Any

import pytest

import fray
from fray import blocking
from fray.controller.connections.relay import open_port_relay
from fray.errors import FrayError, InvalidRequest
from fray.model.gangs import port_names
from fray.model.ids import SessionId, attempt_id
from fray.model.messages.tunnels import OpenTunnel
from fray.model.resources import Demand, PortRange
from fray.model.specs import EndReason, JobSpec, JobState, Outcome
from fray.node.ports import claim_ports, find_ports, parse_ports, ports_in_use
from fray.scheduler.explain.explain import explain
from fray.scheduler.jobs.retries import PORT_RETRY_LIMIT
from fray.scheduler.pool.ports import AVOID_S
from tests.support.scheduler import Cluster, demand, job

SMALL = fray.ResourceConfig.with_cpu(cpu=0.1, memory="1MB")
TAKEN = Outcome(cause=EndReason.PORT_TAKEN, message="another process listens there")


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=8, ports=4)
    return scheduler


def serving(name: str, *ports: str, members: int = 1, need: Demand | None = None) -> JobSpec:
    spec = job(name, need or demand(1), ports=ports or ("http",), members=members)
    return job(name, demand(1, ports=len(port_names(spec))), ports=spec.ports, members=members)


def ports(scheduler: Cluster, name: str, generation: int = 0) -> dict[str, int]:
    return scheduler.state.attempts[attempt_id(name, generation, 0)].ports


# Assigned by the scheduler --------------------------------------------------------------------------------------------


def test_a_job_gets_the_ports_it_requested_on_its_node_and_in_its_record(scheduler: Cluster) -> None:
    scheduler.launch(serving("web", "http", "grpc"))
    assert ports(scheduler, "web") == {"http": 20_000, "grpc": 20_001}
    assert scheduler.state.desired_attempts("n1")[0].ports == {"http": 20_000, "grpc": 20_001}
    info = scheduler.info("web")
    assert info.members[0].addresses == info.ports == {"http": "host-n1:20000", "grpc": "host-n1:20001"}


def test_ports_are_assigned_once_and_a_job_waits_for_more_than_are_free(scheduler: Cluster) -> None:
    scheduler.launch(serving("a", "x", "y"), serving("b"), serving("c", "x", "y"))
    assert scheduler.states("a", "b", "c") == [JobState.PENDING] * 3
    assert sorted([*ports(scheduler, "a").values(), *ports(scheduler, "b").values()]) == [20_000, 20_001, 20_002]
    assert "n1 has 1 of the ports 20000-20003 free" in scheduler.info("c").reason
    scheduler.see("a:0:0", Outcome(cause=EndReason.SUCCEEDED))
    assert set(ports(scheduler, "c").values()) == {20_003, 20_000}


def test_a_released_port_is_assigned_last_also_after_a_restart_of_the_controller(scheduler: Cluster) -> None:
    scheduler.launch(serving("a"))
    scheduler.see("a:0:0", Outcome(cause=EndReason.SUCCEEDED))
    scheduler.launch(serving("b"))
    assert ports(scheduler, "b") == {"http": 20_001}
    scheduler.see("b:0:0", Outcome(cause=EndReason.SUCCEEDED))
    scheduler.restart()
    scheduler.node("n1")
    scheduler.report("n1", [], full=True)
    scheduler.launch(serving("c"))
    assert ports(scheduler, "c") == {"http": 20_002}


def test_explain_reports_a_machine_without_ports() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=8)
    scheduler.launch(serving("web"))
    assert scheduler.states("web") == [JobState.PENDING]
    assert "n1 offers no ports" in explain(scheduler.state, "web", scheduler.now)


def test_a_port_in_use_costs_no_retry_and_is_avoided_for_a_while(scheduler: Cluster) -> None:
    scheduler.launch(serving("web"))
    scheduler.see("web:0:0", TAKEN)
    assert scheduler.states("web") == [JobState.PENDING]
    assert "restarts in 0.1 s, after port_taken" in scheduler.info("web").reason
    scheduler.tick()
    assert ports(scheduler, "web", 1) == {"http": 20_001}
    assert "0 of 0 after failure, 0 of 0 after preemption" in explain(scheduler.state, "web", scheduler.now)
    scheduler.launch(serving("b"), serving("c"))
    assert [ports(scheduler, name)["http"] for name in "bc"] == [20_002, 20_003]
    scheduler.launch(serving("last"))
    assert ports(scheduler, "last") == {"http": 20_000}, "an avoided port is better than none"
    scheduler.restart()
    assert scheduler.state.pool.machines["n1"].ports.avoided == {20_000: AVOID_S}


def test_a_job_fails_after_the_limit_of_ports_in_use(scheduler: Cluster) -> None:
    scheduler.launch(serving("web"))
    for generation in range(PORT_RETRY_LIMIT + 1):
        scheduler.see(f"web:{generation}:0", TAKEN)
        if generation < PORT_RETRY_LIMIT:
            scheduler.tick()
    assert scheduler.info("web").cause is EndReason.PORT_TAKEN


def test_all_members_of_a_gang_get_the_same_addresses_and_a_restart_gets_new_ones() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for name in ("n1", "n2"):
        scheduler.node(name, cpu=8, ports=16)
    spec = serving("gang", "http", members=3)
    scheduler.launch(job("gang", demand(4, ports=2), ports=("http",), members=3, max_retries_failure=1))
    desired = sorted(
        [*scheduler.state.desired_attempts("n1"), *scheduler.state.desired_attempts("n2")],
        key=lambda each: each.attempt_id,
    )
    assert [each.members for each in desired] == [desired[0].members] * 3
    assert port_names(spec) == ("http", "coordinator")
    assert [peer.host for peer in desired[0].members] == ["host-n1", "host-n1", "host-n2"]
    assert all(each.members[member].ports == each.ports for member, each in enumerate(desired))
    first = desired[0].members[0].address("coordinator")
    for each in desired:
        scheduler.see(each.attempt_id, Outcome(cause=EndReason.FAILURE))
    again = scheduler.state.desired_attempt("gang:1:0")
    assert again is not None
    assert again.members[0].address("coordinator") != first


def test_ranks_of_a_tpu_gang_follow_the_numbers_of_its_hosts() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for name, slice_, worker in (("a", "s2", "0"), ("b", "s1", "1"), ("c", "s2", "1"), ("d", "s1", "0")):
        scheduler.node(name, tpu="v4-16*4", ports=8, slice=slice_, tpu_worker=worker)
    tpu = Demand(1000, device_kind="tpu", device_variant="v4-16", device_count=4, ports=2)
    scheduler.launch(job("train", tpu, members=4))
    assert [attempt.node for attempt in scheduler.state.members(scheduler.state.jobs["train"])] == ["d", "b", "a", "c"]


# Claimed by nodes -----------------------------------------------------------------------------------------------------


def test_two_nodes_on_one_machine_never_offer_the_same_ports() -> None:
    rng = random.Random(7)
    with find_ports(128, rng) as one, find_ports(128, rng) as other:
        assert one.ports.count == other.ports.count == 128
        assert abs(one.ports.first - other.ports.first) >= 128
        with pytest.raises(InvalidRequest, match=f"probably a fray-node, has claimed {one.ports.first + 64}-"):
            claim_ports(PortRange(one.ports.first + 100, 10))
    with claim_ports(one.ports):
        pass


def test_ranges_that_meet_in_a_block_are_refused_with_the_block_and_free_ports() -> None:
    with find_ports(128, random.Random(7)) as found:
        first = found.ports.first
    with claim_ports(PortRange(first, 70)):
        with pytest.raises(InvalidRequest) as refused:
            claim_ports(PortRange(first + 70, 200))
        text, _, free = str(refused.value).rpartition(" --ports ")
        assert text == (
            f"ports {first + 70}-{first + 269} cannot be claimed: another process of this machine, probably a "
            f"fray-node, has claimed {first + 64}-{first + 127}. Ports are claimed in whole blocks of 64; free ones are"
        )
        with claim_ports(parse_ports(free)) as claim:
            assert claim.ports.count == 200


def test_a_listening_port_is_in_use_and_a_closing_one_is_not() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert ports_in_use([port]) == [port]
    assert ports_in_use([port]) == []


def test_ports_are_written_as_a_range_or_none() -> None:
    assert parse_ports("20000-20511") == PortRange(20_000, 512)
    assert parse_ports("none") == PortRange()
    for wrong in ("20000", "80-90", "9-1", "20000-70000", "a-b"):
        with pytest.raises(
            InvalidRequest, match="expected FIRST-LAST between 1024 and 65535, such as 20000-20511, or none"
        ):
            parse_ports(wrong)


# Used -----------------------------------------------------------------------------------------------------------------


def my_port() -> int:
    return fray.current_job().ports["http"]


async def test_a_port_in_use_is_skipped_without_costs() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:

        async def launch(name: str) -> fray.Job:
            entry = fray.Entrypoint.from_callable(my_port)
            return await scope.launch(fray.JobRequest(name=name, entrypoint=entry, resources=SMALL, ports=["http"]))

        first = await (await launch("first"))
        with socket.create_server(("127.0.0.1", first + 1)):
            job = await launch("second")
            assert await job == first + 2
        causes = [attempt.cause for attempt in (await cluster.poll(job)).attempts]
        assert causes == [EndReason.PORT_TAKEN, EndReason.SUCCEEDED]
        lines = [f"{event.what}: {event.text}" for event in await cluster.events(job)]
        assert any(
            "a process outside Fray listens on node local on the port assigned as 'http'" in line for line in lines
        )


def test_sync_code_waits_for_a_port_and_has_a_current_job() -> None:
    with blocking.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        entry = fray.Entrypoint.from_callable(answer_once)
        job = scope.launch(blocking.JobRequest(name="serve", entrypoint=entry, resources=SMALL, ports=["http"]))
        assert job.wait_port("http").startswith("127.0.0.1:")
        with job.open_forward("http") as address:
            assert all_from(address) == b"serve" * LAST_WORDS
        assert job.wait() is None


LAST_WORDS = 100_000
"""Number of repetitions; most are still under way when the job has ended."""


def answer_once() -> None:
    me = blocking.current_job()
    with socket.create_server(("127.0.0.1", me.ports["http"])) as listener, listener.accept()[0] as line:
        line.sendall(me.name.encode() * LAST_WORDS)


def all_from(address: str) -> bytes:
    """Return all that the far end sends; connects again, for at most 10 s, as long as it does not listen yet."""
    host, _, port = address.rpartition(":")
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        heard = b""
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as line:
            while data := line.recv(65536):
                heard += data
        if heard:
            return heard
    raise AssertionError(f"nothing came from {address}")


# Reached --------------------------------------------------------------------------------------------------------------


def test_a_port_is_relayed_within_a_namespace_and_to_living_members_only(scheduler: Cluster) -> None:
    scheduler.launch(serving("web"))
    scheduler.process("web:0:0")
    scheduler.driver("elsewhere", namespace="other")
    scheduler.launch(job("alien", demand(1), namespace="other"), session="elsewhere")

    def ask(by: str, **what: Any) -> str:
        message = OpenTunnel(**({"to": "web", "port": "http"} | what))
        with pytest.raises(FrayError) as caught:
            open_port_relay(scheduler.state, lambda node: None, SessionId(by), None, message, b"", 1)  # type: ignore[arg-type]
        return f"{type(caught.value).__name__}: {caught.value}"

    assert ask("d") == "Unreachable: node n1, where web:0:0 runs, has no connection to the controller now"
    assert ask("elsewhere").startswith("Unreachable")
    assert ask("d", port="grpc") == "Refused: job web has no port 'grpc'; its ports: http"
    assert ask("d", member=1) == "Refused: job web is pending: it has no living member 1"
    assert ask("d", to="nothing").startswith("NoSuchJob")
    assert ask("s-web:0:0", to="alien") == "Unauthorized: job alien is in another namespace"
    scheduler.see("web:0:0", Outcome(cause=EndReason.SUCCEEDED))
    assert ask("d") == "Refused: job web is succeeded: it has no living member 0"
