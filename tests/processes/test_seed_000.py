"""The code of Fray-Zero (`seed_000.md`), block by block and as it is written there: on processes and on threads."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fray
from fray import blocking
from fray.blocking import Cluster, ClusterResolver, Entrypoint, Job, JobRequest, JobState, LocalCluster, ResourceConfig
from tests.processes import seed_functions as bodies
from tests.processes.seed_functions import run_block, wait_until
from tests.processes.seed_interfaces import ON_PURPOSE, differences

PAGE = (Path(__file__).parent / "seed_000.md").read_text()
BLOCKS: dict[str, str] = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="200MB")


@pytest.fixture(scope="module", params=["machine?nodes=1&cpu=24&memory=64GB", "local"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with blocking.open_cluster(request.param, logs=False) as cluster:
        yield cluster
        cluster.terminate([info.job_id for info in cluster.list_jobs()])  # what a failed test has left


def request(name: str, fn: Any, *args: Any) -> JobRequest:
    return JobRequest(name=name, resources=SMALL, entrypoint=Entrypoint.from_callable(fn, args=args))


@contextmanager
def ended_afterwards(cluster: Cluster, *jobs: Job) -> Iterator[None]:
    """Servers that run forever are ended by the test that launched them."""
    try:
        yield
    finally:
        cluster.terminate(jobs)
        assert {info.state for info in cluster.wait(jobs)} <= {JobState.STOPPED}


# The primitives ------------------------------------------------------------------------------------------------------


def test_the_interfaces_are_as_written_except_for_listed_differences() -> None:
    found = differences(BLOCKS["interfaces"])
    assert {name: what for name, what in found.items() if name not in ON_PURPOSE} == {}
    assert ON_PURPOSE.keys() == found.keys(), "what no longer differs needs no reason"
    for attribute in ("reservation_id", "allocated_resources", "pending_resources", "jobs", "expires_at"):
        assert hasattr(blocking.ReservationInfo, attribute)


def test_actor_server_serves_under_a_name_and_resolver_balances_and_broadcasts(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"load_model": bodies.load_model}
    served = request("inference", bodies.run_program, BLOCKS["actor_server"], names)
    with ended_afterwards(cluster, *cluster.launch(served, count=4)):
        text = BLOCKS["resolver"].replace('resolver = FixedResolver({"inference": "localhost:8080"})', "pass")
        ClusterResolver(cluster).lookup("inference_pool").wait_for_size(4)
        found = run_block(text, cluster=cluster, x=7)
        assert found["result"] == 49
        assert found["results"] == [49] * 4
        assert capsys.readouterr().out == "Pool has 4 actors\n"
        endpoints = found["pool"].endpoints
        assert len({endpoint.job_id for endpoint in endpoints}) == 4
        assert [one.actor_id for one in cluster.metadata.lookup_all("inference_pool")] == [
            endpoint.actor_id for endpoint in endpoints
        ]
        assert cluster.metadata.lookup("inference_pool") == endpoints[0]
        assert cluster.metadata.list_actors("inference") == endpoints
        assert cluster.metadata.lookup("unknown") is None
    wait_until(lambda: found["pool"].size == 0)
    assert cluster.metadata.lookup_all("inference_pool") == []


def test_a_fixed_resolver_has_fixed_addresses(cluster: Cluster) -> None:
    with blocking.ActorServer(cluster) as server:
        server.register("inference_pool", bodies.InferenceModel(), metadata={"model": "doubling"})
        address = f"localhost:{server.address.rpartition(':')[2]}"
        text = BLOCKS["resolver"].replace('"inference": "localhost:8080"', f'"inference_pool": "{address}"')
        found = run_block(text.replace("size(4", "size(1"), cluster=cluster, x=[1])
        assert found["result"] == (0, [2])
        assert found["results"] == [(0, [2])]
        (endpoint,) = cluster.metadata.lookup_all("inference_pool")
        assert endpoint.metadata == {"model": "doubling"}


def test_a_broadcast_gives_all_results_failures_included(cluster: Cluster) -> None:
    with blocking.ActorServer(cluster) as server:
        for number in range(3):
            server.register("mixed", bodies.InferenceModel(number, broken=1))
        futures = ClusterResolver(cluster).lookup("mixed").broadcast().predict([4])
        results = [f.result() for f in futures]
        assert [type(result) for result in results] == [tuple, ValueError, tuple]
        assert [f.exception() for f in futures] == [None, results[1], None]
        assert "model 1 is broken" in str(results[1])
        assert {future.result()[0] for future in blocking.as_completed(futures[::2])} == {0, 2}
        far = cluster.create_actor(bodies.Reader)
        assert far.kinds(futures) == ["tuple", "ValueError", "tuple"], "where they arrive they are the same"


def test_worker_pool_runs_shards(cluster: Cluster) -> None:
    shards = [range(n) for n in range(50)]
    found = run_block(BLOCKS["worker_pool"], process_shard=bodies.process_shard, shards=shards)
    assert found["results"] == [sum(shard) for shard in shards]
    assert found["pool"].size == 0


def test_rl_controller_launches_workers_that_share_a_curriculum(cluster: Cluster) -> None:
    found = run_block(
        BLOCKS["rl_controller"],
        coordinator_job=request("coordinator", bodies.serve_curriculum),
        train_worker_job=request("trainer", bodies.take_lessons, "trainer", 2),
        rollout_worker_job=lambda i: request(f"rollout-{i}", bodies.take_lessons, f"rollout-{i}", 3),
        num_rollout_workers=3,
    )
    with ended_afterwards(cluster, cluster.get_job("coordinator")):
        curriculum = found["resolver"].lookup("curriculum")
        curriculum.wait_for_size(1)
        wait_until(lambda: len(curriculum.call().all_results()) == 4)
        results = dict(curriculum.call().all_results())
        assert results.keys() == {"trainer", "rollout-0", "rollout-1", "rollout-2"}
        assert sorted(lesson for taken in results.values() for lesson in taken) == list(range(1, 12))
        assert cluster.wait([cluster.get_job(name) for name in results], raise_on_failure=True)


def test_local_development_is_the_same_code(cluster: Cluster) -> None:
    data = {"n": 1}
    found = run_block(BLOCKS["local_development"], MyActor=bodies.MyActor, data=data)
    thread, answer = found["result"]
    assert answer == {"n": 1, "seen": True}
    assert data == {"n": 1}, "it was pickled on the way"
    assert thread.startswith("fray-my_actor")
    assert found["cluster"] is cluster
    found["server"].shutdown()
    wait_until(lambda: found["pool"].size == 0)


def test_local_actor_server_opens_no_port_and_pickles_all_the_same(cluster: Cluster) -> None:
    if not isinstance(cluster, LocalCluster):
        with pytest.raises(fray.InvalidRequest, match="use ActorServer"):
            blocking.LocalActorServer(cluster)
        return
    data = {"n": 1}
    text = BLOCKS["local_development"].replace("ActorServer(", "LocalActorServer(")
    found = run_block(text, MyActor=bodies.MyActor, data=data)
    assert isinstance(found["server"], blocking.ActorServer)
    assert found["server"].address.startswith("memory:")
    assert found["result"][1] == {"n": 1, "seen": True}
    assert data == {"n": 1}
    assert cluster.launch(request("client", bodies.process_there, data)).wait() == {"n": 1, "seen": True}
    with pytest.raises(fray.NotPicklable):
        found["pool"].call().process({"lock": threading.Lock()})
    found["server"].shutdown()
    wait_until(lambda: cluster.metadata.lookup_all("my_actor") == [])


# The uses ------------------------------------------------------------------------------------------------------------


def test_leader_trains_with_whatever_slices_there_are(cluster: Cluster) -> None:
    found = run_block(
        BLOCKS["multislice_leader"],
        load_weights=lambda: [1.0, 2.0],
        load_data=lambda slice_id: iter(range(100)),
        create_model=bodies.Model,
        slice_id=0,
        peer_slices=1,
    )
    found["create_model"] = lambda peers: bodies.Model([0.0], peers)
    sizes = [2, 3, 1]
    trained: list[int] = []

    class Slices:
        """Return the workers of one round, each an actor in its own process."""

        def __init__(self, scope: blocking.Scope, size: int) -> None:
            self.group = scope.create_actor_group(found["Worker"], count=size, resources=SMALL, on_failure="absorb")

        def train_step(self) -> None:
            futures = [worker.train_step.remote() for worker in self.group]
            trained.append(len([future.result(20) for future in futures]))
            self.group.shutdown()

    with cluster.open_scope("slices") as scope:

        def build_multi_slice() -> Slices:
            if not sizes:
                raise bodies.Enough
            return Slices(scope, sizes.pop(0))

        found["build_multi_slice"] = build_multi_slice
        with pytest.raises(bodies.Enough):
            found["multislice_train"]()
    assert trained == [2, 3, 1]


def test_training_asks_for_a_slice_that_this_cluster_never_has(cluster: Cluster) -> None:
    refused = fray.InvalidRequest if isinstance(cluster, LocalCluster) else fray.NeverSchedulable
    with pytest.raises(refused, match=r"extras not supported in a local cluster|v5litepod-16"):
        run_block(BLOCKS["example_training"])
    text = BLOCKS["example_training"].replace('with_tpu("v5litepod-16")', "with_cpu()").replace('extras=["tpu"]', "")
    found = run_block(text)
    job_id = found["job_id"]
    assert isinstance(job_id, str)
    assert (cluster.poll(job_id).state, cluster.poll(str(job_id)).name) == (JobState.SUCCEEDED, "llama-training")
    assert job_id in [info.job_id for info in cluster.list_jobs()]
    assert cluster.monitor(job_id, print).start_time <= cluster.poll(job_id).end_time
    with pytest.raises(ZeroDivisionError):
        run_block(text.replace("pass", "1 / 0"))


def test_inference_balances_over_servers(cluster: Cluster) -> None:
    found = run_block(
        BLOCKS["example_inference"],
        InferenceModel=bodies.InferenceModel,
        batch_of_prompts=[1, 2],
    )
    servers = cluster.launch(request("server", found["server_main"]), count=2)
    with ended_afterwards(cluster, *servers):
        pool = ClusterResolver(cluster).lookup("inference")
        pool.wait_for_size(2)
        found["run_client"]()
        assert cluster.launch(request("client", found["run_client"])).wait() is None
        assert pool.call().predict([3]) == (0, [6])


def test_zephyr_has_more_workers_than_there_are_machines(cluster: Cluster) -> None:
    shards = [range(n) for n in range(300)]
    found = run_block(BLOCKS["example_zephyr"], process_shard=bodies.process_shard, shards=shards)
    assert found["results"] == [sum(shard) for shard in shards]


def test_rl_group_is_placed_together_and_works(cluster: Cluster) -> None:
    found = run_block(
        BLOCKS["example_rl"].replace("...)", "resources=SMALL)"),
        cluster=cluster,
        SMALL=SMALL,
        CurriculumActor=bodies.CurriculumActor,
        WeightStore=bodies.WeightStore,
        result="a rollout",
    )
    assert found["worker_main"].__module__ == bodies.MODULE
    (group,) = cluster.list_groups()[-1:]
    jobs = [cluster.get_job(member.name) for member in group.members]
    assert [job.name for job in jobs] == ["coordinator", "worker-1"]
    with ended_afterwards(cluster, *jobs):
        curriculum = ClusterResolver(cluster).lookup("curriculum")
        curriculum.wait_for_size(1)
        wait_until(lambda: len(curriculum.call().all_results()) >= 20)
        assert set(curriculum.call().all_results()) == {"a rollout"}


def test_multislice_holds_a_reservation_and_meets_at_a_barrier(cluster: Cluster) -> None:
    at_least, at_most = (ResourceConfig(cpu=0.5, memory="200MB", replicas=count) for count in (2, 3))
    source = BLOCKS["example_multislice"].replace("min_resources=...", "min_resources=at_least")
    source = source.replace("max_resources=...", "max_resources=at_most")
    found = run_block(bodies.TRAINING + source, cluster=cluster, at_least=at_least, at_most=at_most)
    reservation = found["reservation"]
    barrier = bodies.Barrier(slices=2)

    class Coordinator(found["BarrierActor"]):  # type: ignore[misc]  # it is found
        def wait_for_barrier(self, ctx: blocking.ActorContext, slice_id: int, step: int) -> None:
            super().wait_for_barrier(ctx, slice_id, step)
            barrier.wait_for(slice_id, step)

    with blocking.ActorServer(cluster) as server:
        server.register("coordinator", Coordinator(), max_concurrency=2)
        slices = [
            cluster.launch(
                JobRequest(f"slice-{n}", SMALL, Entrypoint.from_callable(found["slice_worker"], args=(n,))),
                reservation_id=reservation,
            )
            for n in range(2)
        ]
        info = cluster.get_reservation(reservation)
        assert set(info.jobs) == set(slices)
        for job in slices:
            with pytest.raises(bodies.Enough, match="5"):
                job.wait(timeout=30)
        assert cluster.get_reservation(reservation).state is blocking.ReservationState.HELD
    assert sorted(barrier.passed) == [(step, 2) for step in range(5) for _ in range(2)]
    cluster.release_reservation(reservation)
    wait_until(lambda: cluster.get_reservation(reservation).state is blocking.ReservationState.ENDED)


def test_local_code_needs_no_change(cluster: Cluster) -> None:
    found = run_block(BLOCKS["example_local"])
    with found["server"] as server:
        server.register("mine", bodies.InferenceModel())
        assert ClusterResolver(found["cluster"]).lookup("mine").call().predict([1]) == (0, [2])
