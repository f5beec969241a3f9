"""Variables and rosters that the members of a gang get."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fray
from fray import Entrypoint, JobRequest, ResourceConfig
from fray.model.gangs import port_names
from fray.model.resources import Demand
from fray.model.specs import AttemptSpec, EntryKind, GangMember, GangRoster, JobSpec
from fray.node.job_process.gang_variables import PEERS_LIMIT_CHARS, framework_variables, own_variables
from fray.runtime.process import jax_distributed
from tests.support.scheduler import Cluster, job

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="1MB")


def attempt_spec(
    rank: int, hosts: list[str], devices: tuple[str, ...] = (), tpu: str = "", ports: tuple[str, ...] = ()
) -> AttemptSpec:
    demand = Demand(device_kind="tpu", device_variant=tpu) if tpu else Demand()
    spec = JobSpec(
        job_id="j",
        name="j",
        namespace="n",
        entry=EntryKind.CALLABLE,
        members=len(hosts),
        demand=demand,
        ports=ports,
        gang=True,
    )
    names = port_names(spec)
    peers = tuple(
        GangMember(host=host, ports={name: 20_000 + 10 * member + place for place, name in enumerate(names)})
        for member, host in enumerate(hosts)
    )
    return AttemptSpec(
        attempt_id=f"j:0:{rank}",
        spec=spec,
        controller="tcp:c:1",
        key="",
        advertise=hosts[rank],
        devices=devices,
        ports=peers[rank].ports,
        members=peers,
    )


def test_a_member_gets_its_rank_the_coordinator_and_the_addresses_of_the_others() -> None:
    assert own_variables(attempt_spec(1, ["10.0.0.1", "10.0.0.2", "10.0.0.2"], ports=("web-ui",))) == {
        "FRAY_PORT_WEB_UI": "20010",
        "FRAY_PORT_COORDINATOR": "20011",
        "FRAY_HOST": "10.0.0.2",
        "FRAY_RANK": "1",
        "FRAY_WORLD_SIZE": "3",
        "FRAY_LOCAL_RANK": "0",
        "FRAY_LOCAL_WORLD_SIZE": "2",
        "FRAY_COORDINATOR_ADDRESS": "10.0.0.1:20001",
        "FRAY_PEERS": "10.0.0.1:20001,10.0.0.2:20011,10.0.0.2:20021",
        "FRAY_PEERS_WEB_UI": "10.0.0.1:20000,10.0.0.2:20010,10.0.0.2:20020",
    }


def test_frameworks_get_their_own_variables() -> None:
    assert framework_variables(attempt_spec(1, ["10.0.0.1", "10.0.0.1"])) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20000",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:20000",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }


def test_a_member_with_gpus_of_its_own_sees_them_from_zero() -> None:
    variables = framework_variables(attempt_spec(1, ["10.0.0.1", "10.0.0.1"], devices=("gpu-4", "gpu-5")))
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("0", "1")


def test_a_gang_on_one_machine_listens_on_loopback() -> None:
    variables = framework_variables(attempt_spec(0, ["127.0.0.1", "127.0.0.1"]))
    assert (variables["JAX_COORDINATOR_BIND_ADDRESS"], variables["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1:20000", "lo")


def test_an_ipv6_address_has_brackets_only_before_a_port() -> None:
    variables = framework_variables(attempt_spec(0, ["fd00::1", "fd00::2"]))
    assert (variables["MASTER_ADDR"], variables["JAX_COORDINATOR_ADDRESS"]) == ("fd00::1", "[fd00::1]:20000")


def test_hosts_of_two_tpu_slices_get_slice_rank_and_coordinator() -> None:
    hosts = [f"10.0.{slice_}.{worker}" for slice_ in (1, 2) for worker in range(4)]
    variables = framework_variables(attempt_spec(6, hosts, tpu="v5litepod-16"))
    assert {key: value for key, value in variables.items() if key.startswith(("TPU_", "MEGASCALE_"))} == {
        "TPU_WORKER_ID": "2",
        "TPU_WORKER_HOSTNAMES": "10.0.2.0,10.0.2.1,10.0.2.2,10.0.2.3",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.1.0",
        "MEGASCALE_PORT": "20001",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }
    assert "MEGASCALE_NUM_SLICES" not in framework_variables(attempt_spec(0, hosts[:4], tpu="v5litepod-16"))


def test_a_list_of_peers_that_is_too_long_for_a_variable_is_left_out() -> None:
    many = own_variables(attempt_spec(0, ["10.0.0.1"] * 10_000))
    assert "FRAY_PEERS" not in many
    assert max(map(len, many.values())) < PEERS_LIMIT_CHARS


async def test_current_job_of_a_gang_works_in_every_kind_of_cluster() -> None:
    async with fray.open_cluster("local") as cluster, cluster.open_scope("s") as scope:
        request = JobRequest(
            name="gang", entrypoint=Entrypoint.from_callable(fray.current_job), resources=SMALL, replicas=2, ports=["x"]
        )
        job = await scope.launch(request)
        mine = await job
        assert (mine.id, mine.name, mine.namespace) == (job.id, "gang", cluster.namespace)
        assert (mine.rank, mine.world_size, mine.local_rank, mine.local_world_size) == (0, 2, 0, 2)
        assert mine.coordinator == mine.peers[0].address("coordinator")
        assert mine.ports == mine.peers[0].ports
        assert await scope.run(alone) == (0, 1, None, ())


def alone() -> Any:
    job = fray.current_job()
    return job.rank, job.world_size, job.coordinator, job.peers


def test_current_job_is_none_outside_of_jobs() -> None:
    with pytest.raises(fray.FrayError, match="no job here"):
        fray.current_job()


# JAX, without JAX -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a stand-in for ``jax._src.clusters``."""
    module: Any = ModuleType("jax._src.clusters")

    class ClusterEnv:
        name = ""
        _cluster_types: list[Any] = []  # noqa: RUF012

        def __init_subclass__(cls) -> None:
            ClusterEnv._cluster_types.append(cls)

    class Slurm(ClusterEnv):
        name = "slurm"

    module.ClusterEnv = ClusterEnv
    monkeypatch.setitem(sys.modules, "jax._src.clusters", module)
    for name, value in (("COORDINATOR_ADDRESS", "h:1"), ("RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(f"FRAY_{name}", value)
    return module


def test_jax_uses_the_cluster_of_the_gang_first(clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jax_distributed.install()
    jax_distributed.install()
    ours, slurm = clusters.ClusterEnv._cluster_types
    assert (ours.name, slurm.name) == ("fray", "slurm")
    assert ours.is_env_present()
    variables = ours.get_coordinator_address(timeout_secs=1, override_coordinator_port=None)
    assert (variables, ours.get_process_count(), ours.get_process_id()) == ("h:1", 4, 3)
    monkeypatch.delenv("FRAY_RANK")
    assert not ours.is_env_present()


@given(st.lists(st.tuples(st.sampled_from(["", "10.0.0.1", "::1"]), st.integers(1, 65535)), min_size=1, max_size=5))
def test_a_roster_has_its_members_as_columns(members: list[tuple[str, int]]) -> None:
    peers = tuple(GangMember(host=host, ports={"coordinator": port, "http": port % 7}) for host, port in members)
    assert GangRoster.of(peers).members() == peers


def test_the_desired_attempts_of_a_gang_share_their_roster() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=8)
    scheduler.launch(job("gang", members=3))
    first, second, _ = scheduler.state.desired_attempts("n1")
    assert first.roster is second.roster
    assert len(first.members) == 3
