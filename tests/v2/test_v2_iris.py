"""`FrayIrisClient` on a real Iris: its controller and workers in this process, jobs as processes of their own.

Needs marin-iris and Python 3.12: `make test-marin`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("iris.client.client", reason="needs marin-iris: make test-marin")

from connectrpc.errors import ConnectError
from v2_contract import *  # noqa: F403
from v2_contract import (
    LATE_S,
    SMALL,
    Capabilities,
    Counter,
    Wrong,
    do_nothing,
    fail,
    new,
    request,
    wait_until,
)

import fray.iris_backend
import fray.types
from fray.v2 import (
    ActorConfig,
    Entrypoint,
    JobFailed,
    JobRequest,
    JobStatus,
    ResourceConfig,
    create_environment,
    current_client,
)
from fray.v2.iris import actors
from fray.v2.iris.actors import IrisActorHandle, OperationFuture
from fray.v2.iris.convert import (
    band_of,
    convert_constraints,
    convert_container_profile,
    convert_environment,
    convert_resources,
    image_of,
    limit_of,
    resolve_coscheduling,
)
from fray.v2.iris.jobs import IrisJobHandle
from fray.v2.iris_backend import FrayIrisClient
from fray.v2.marin.resources import ANY_REGION


@pytest.fixture(scope="module")
def controller() -> Iterator[Any]:
    """Start a controller and workers of Iris in this process; jobs are processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors, "FIRST_WAIT_S", 20.0)
        patch.setattr(actors, "NEXT_WAIT_S", 2.0)
        # Tasks import this checkout and these tests.
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        from iris.cluster.local_cluster import LocalCluster, make_local_cluster_config

        config = make_local_cluster_config(8)
        config.scale_groups["slice"] = tpu_slices()
        cluster = LocalCluster(config)
        address = cluster.start()
        try:
            yield address
        finally:
            cluster.close()


def tpu_slices() -> Any:
    """Return a group of machines that Iris takes for the VMs of one preemptible TPU slice in us-east5."""
    from iris.cluster import config
    from iris.cluster.types import AcceleratorType, CapacityType

    return config.ScaleGroupConfig(
        name="slice",
        max_slices=1,
        num_vms=4,
        resources=config.ScaleGroupResources(
            cpu_millicores=8000,
            memory_bytes=16 * 1024**3,
            disk_bytes=50 * 1024**3,
            device_type=AcceleratorType.TPU,
            device_variant="v5litepod-16",
            device_count=4,
            capacity_type=CapacityType.PREEMPTIBLE,
        ),
        slice_template=config.SliceConfig(
            num_vms=4, gcp=config.GcpSliceConfig(zone="us-east5-a", runtime_version="v2")
        ),
    )


@pytest.fixture(scope="module")
def client(controller: Any) -> FrayIrisClient:
    return FrayIrisClient(controller)


@pytest.fixture
def make_client(controller: Any) -> Callable[[], FrayIrisClient]:
    return lambda: FrayIrisClient(controller)


@pytest.fixture
def capabilities() -> Capabilities:
    """Return the capabilities: Iris passes on no exceptions of jobs, and ends actors with their containers."""
    return Capabilities(carries_errors=False, finishes_calls=False, program_error=JobFailed)


def test_a_hosted_actor_lives_in_its_callers_process(client: FrayIrisClient) -> None:
    """Replace the contract: that process is a job. `test_a_job_hosts_an_actor_for_its_own_jobs` has the rest."""
    with pytest.raises(RuntimeError, match="host_actor must be called in a job of Iris"):
        client.host_actor(Counter, 5, name=new("hosted"))


test_a_hosted_actor_that_sets_its_shutdown_event_ends = None  # of the contract: the same


# Translations --------------------------------------------------------------------------------------------------------


def test_not_preemptible_is_iriss_constraint() -> None:
    from iris.cluster.constraints import preemptible_constraint

    assert convert_constraints(ResourceConfig(preemptible=False)) == [preemptible_constraint(False)]
    assert convert_constraints(ResourceConfig()) == []


@pytest.mark.parametrize(("priority", "band"), [(3, "PRODUCTION"), (0, "INHERIT"), (-1, "BATCH")])
def test_a_priority_is_a_band_which_iris_may_refuse(client: FrayIrisClient, priority: int, band: str) -> None:
    from iris.rpc import job_pb2

    assert band_of(priority) == job_pb2.PriorityBand.Value(f"PRIORITY_BAND_{band}")
    band_request = JobRequest(
        name=new("band"), entrypoint=Entrypoint.from_callable(do_nothing), resources=SMALL, priority=priority
    )
    if priority > 0:
        with pytest.raises(Exception, match="cannot submit production jobs"):
            client.submit(band_request)
    else:
        assert client.submit(band_request).wait(timeout=60) is JobStatus.SUCCEEDED


def test_regions_a_zone_and_alternatives_are_constraints() -> None:
    from iris.cluster import constraints as iris

    resources = ResourceConfig(regions=["us-central1", "us-east5"], zone="us-central1-a")
    assert convert_constraints(resources) == [
        iris.region_constraint(["us-central1", "us-east5"]),
        iris.zone_constraint("us-central1-a"),
    ]
    assert convert_constraints(ResourceConfig(regions=[ANY_REGION])) == [iris.any_region_constraint()]
    with pytest.raises(ValueError, match="ANY_REGION stands for every region, and alone"):
        convert_constraints(ResourceConfig(regions=[ANY_REGION, "us-east5"]))
    either = ResourceConfig.with_tpu(["v5litepod-16", "v6e-16"])
    assert convert_constraints(either) == [iris.device_variant_constraint(["v5litepod-16", "v6e-16"])]


def test_what_only_todays_marin_has_is_passed_on() -> None:
    from iris.cluster import constraints as iris
    from iris.rpc import job_pb2

    resources = fray.types.ResourceConfig(target_cluster="peer", container_profile="CONTAINER_PROFILE_PRIVILEGED")
    (constraint,) = convert_constraints(resources)
    assert (constraint.key, constraint.op) == (iris.CLUSTER_CONSTRAINT_KEY, iris.ConstraintOp.EQ)
    assert convert_container_profile(resources) == job_pb2.CONTAINER_PROFILE_PRIVILEGED
    entrypoint = fray.types.Entrypoint.from_callable(do_nothing)
    limited = fray.types.JobRequest(name="limited", entrypoint=entrypoint, timeout=90)
    assert limit_of(limited).to_seconds() == 90
    environment = fray.types.create_environment(
        setup_scripts=[], sync_packages=["a"], secrets={"TOKEN": "x"}, secret_behavior="isolate"
    )
    spec = convert_environment(environment)
    assert (spec.setup_scripts, spec.sync_packages, spec.secrets) == ([], ["a"], {"TOKEN": "x"})
    assert spec.secret_behavior == "isolate"


def test_slices_start_together_and_replicas_are_the_jobs(client: FrayIrisClient) -> None:
    resources = ResourceConfig.with_tpu("v5litepod-16", slice_count=2)
    spec = convert_resources(resources)
    assert (spec.cpu, spec.memory, spec.disk, spec.device.tpu.variant) == (32, "128g", "50g", "v5litepod-16")
    assert resolve_coscheduling(resources, 8).group_by == "tpu-name"
    assert resolve_coscheduling(ResourceConfig(), 8) is None
    gpus = convert_resources(ResourceConfig.with_gpu("H100", count=4)).device.gpu
    assert (gpus.variant, gpus.count) == ("H100", 4)
    job = client.submit(request(do_nothing, replicas=2))
    assert job.wait(60) == JobStatus.SUCCEEDED
    assert len(job._job.tasks()) == 2


SLICE = ResourceConfig.with_tpu("v5litepod-16", cpu=1, ram="100m", disk="100m")


def meet(directory: Path) -> None:
    """Wait for all VMs of the slice: without a start of all together none would end."""
    from iris.cluster.client.job_info import get_job_info

    (directory / str(get_job_info().task_index)).touch()
    wait_until(lambda: len(list(directory.iterdir())) == 4, "four VMs")


def test_a_gang_starts_on_the_vms_of_one_slice(client: FrayIrisClient, tmp_path: Path) -> None:
    gang = JobRequest(name=new("gang"), entrypoint=Entrypoint.from_callable(meet, args=[tmp_path]), resources=SLICE)
    assert gang.replicas == 4
    assert client.submit(gang).wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "where",
    [
        replace(SLICE, regions=["us-east5"]),
        replace(SLICE, regions=[ANY_REGION]),
        replace(SLICE, zone="us-east5-a"),
        replace(SMALL, preemptible=False),
    ],
)
def test_iris_starts_a_job_where_its_constraints_hold(client: FrayIrisClient, where: ResourceConfig) -> None:
    there = JobRequest(name=new("there"), entrypoint=Entrypoint.from_callable(do_nothing), resources=where)
    assert client.submit(there).wait(timeout=LATE_S) == JobStatus.SUCCEEDED


@pytest.mark.parametrize("nowhere", [{"regions": ["us-central1"]}, {"zone": "us-east5-b"}, {"preemptible": False}])
def test_iris_refuses_a_job_whose_constraints_no_machine_fits(client: FrayIrisClient, nowhere: dict[str, Any]) -> None:
    entrypoint = Entrypoint.from_callable(do_nothing)
    with pytest.raises(ConnectError, match="is unschedulable"):
        client.submit(JobRequest(name=new("nowhere"), entrypoint=entrypoint, resources=replace(SLICE, **nowhere)))


def test_iris_ends_a_job_after_its_timeout(client: FrayIrisClient) -> None:
    entrypoint = fray.types.Entrypoint.from_callable(time.sleep, [1000])
    late = fray.types.JobRequest(name=new("late"), entrypoint=entrypoint, resources=SMALL, timeout=1)
    with pytest.raises(JobFailed) as raised:
        client.submit(late).wait(timeout=3 * LATE_S)  # Iris looks at the times once a minute
    assert "Execution timeout exceeded" in raised.value.__notes__[0]


def test_an_actor_restarts_as_often_as_its_calls_would_be_repeated(client: FrayIrisClient, tmp_path: Path) -> None:
    config = ActorConfig(max_task_retries=1)
    actor = client.create_actor(Mortal, tmp_path, name=new("mortal"), resources=SMALL, actor_config=config)
    assert actor.lives() == 1
    with pytest.raises(RuntimeError):
        actor.die()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "the next incarnation")
    assert wait_until(lambda: lives_of(actor), "its answer") == 2


class Mortal:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / str(os.getpid())).touch()

    def lives(self) -> int:
        return len(list(self.directory.iterdir()))

    def die(self) -> None:
        os._exit(9)


def lives_of(actor: Any) -> int | None:
    try:
        return int(actor.lives())
    except RuntimeError:  # the address of the incarnation before, until the next one has registered
        return None


def write_secret(path: Path) -> None:
    from rigging.secrets import SECRETS_DIR_ENV

    path.write_text((Path(os.environ[SECRETS_DIR_ENV]) / "LAB_KEY").read_text())


def test_secrets_are_files_of_the_job(client: FrayIrisClient, tmp_path: Path) -> None:
    environment = fray.types.create_environment(secrets={"LAB_KEY": "a-key"})
    entrypoint = fray.types.Entrypoint.from_callable(write_secret, [tmp_path / "key"])
    job = client.submit(fray.types.JobRequest(new("secret"), entrypoint, SMALL, environment))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert (tmp_path / "key").read_text() == "a-key"


def test_an_environment_is_packages_variables_and_extras() -> None:
    found = convert_environment(create_environment(pip_packages=["polars"], extras=["tpu"], env_vars={"A": "1"}))
    assert (found.pip_packages, found.extras, found.env_vars["A"]) == (["polars"], ["tpu"], "1")
    assert image_of(create_environment(docker_image="ghcr.io/a/b:1"), ResourceConfig()) == "ghcr.io/a/b:1"


def test_a_handle_pickles_to_its_name(client: FrayIrisClient) -> None:
    handle = client.create_actor(Counter, name=new("counter"))
    assert handle.add(1) == 1
    assert handle.__reduce__() == (IrisActorHandle, (handle._endpoint_name,))
    assert pickle.loads(pickle.dumps(handle)).add(1) == 2


def test_a_handle_finds_the_actor_by_the_client_that_made_it(client: FrayIrisClient) -> None:
    other = FrayIrisClient("127.0.0.1:1")  # of another cluster, made later: where no controller is
    handle = client.create_actor(Counter, name=new("counter"))
    assert handle.add(1) == 1
    del other


def test_a_constructor_that_fails_ends_its_job(client: FrayIrisClient) -> None:
    group = client.create_actor_group(Unmakeable, name=new("unmakeable"), count=1)
    with pytest.raises(RuntimeError, match="not to be made"):
        group.wait_ready()
    assert group.is_done()
    assert group.statuses() == [JobStatus.FAILED]


class Unmakeable:
    def __init__(self) -> None:
        raise OSError("not to be made")


def test_a_failed_job_raises_with_iriss_text(client: FrayIrisClient) -> None:
    with pytest.raises(JobFailed) as raised:
        client.submit(request(fail)).wait()
    assert "no such luck (7)" in raised.value.__notes__[0]


def test_a_jobs_handle_pickles_to_its_id(client: FrayIrisClient) -> None:
    job = client.submit(request(do_nothing))
    again = pickle.loads(pickle.dumps(job))
    assert isinstance(again, IrisJobHandle)
    assert again.job_id == job.job_id
    assert again.wait(30) == JobStatus.SUCCEEDED


# Which client --------------------------------------------------------------------------------------------------------


def test_a_long_call_is_an_operation_that_can_be_asked_again(client: FrayIrisClient, tmp_path: Path) -> None:
    actor = client.create_actor(Counter, name=new("counter"), resources=SMALL)
    future = actor.begin_and_wait_for.submit(tmp_path / "began", tmp_path / "go")
    assert isinstance(future, OperationFuture)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    (tmp_path / "go").write_text("")
    assert [future.result(timeout=60), future.result(timeout=60)] == ["came", "came"]
    with pytest.raises(Wrong, match="no such luck"):
        actor.fail.submit("no such luck", 7).result(timeout=60)


def test_marins_module_has_todays_logs_on_iris(controller: Any) -> None:
    job = fray.iris_backend.FrayIrisClient(controller).submit(request(print, "one line"))
    assert job.wait(60, stream_logs=True) == JobStatus.SUCCEEDED
    assert isinstance(job.logs(), tuple)
    assert len(job.logs(1)) == 1


NOT_IMPORTED = """
import sys
from fray.current_client import current_client
assert "iris" not in sys.modules
current_client()
"""


def test_a_job_of_iris_without_its_controller_is_an_error_also_where_iris_was_not_imported() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
    environ["IRIS_TASK_ID"] = "/someone/job/0"
    ran = subprocess.run([sys.executable, "-c", NOT_IMPORTED], env=environ, capture_output=True, text=True)
    assert "RuntimeError: this job of Iris has no address of its controller" in ran.stderr


def use_current_client(path: Path) -> None:
    found = current_client()
    child = found.submit(JobRequest(name="child", entrypoint=Entrypoint.from_callable(do_nothing), resources=SMALL))
    path.write_text(f"{type(found).__name__} {child.wait(60)} {child.job_id}")


def test_in_a_job_of_iris_the_current_client_is_that_clusters(client: FrayIrisClient, tmp_path: Path) -> None:
    job = client.submit(request(use_current_client, tmp_path / "found"))
    assert job.wait(60) == JobStatus.SUCCEEDED
    assert (tmp_path / "found").read_text() == f"FrayIrisClient succeeded {job.job_id}/child"


def test_a_spec_selects_one_client_per_process(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAY_CLIENT_SPEC", f"iris://{controller.removeprefix('http://')}")
    found = current_client()
    assert isinstance(found, FrayIrisClient)
    assert current_client() is found
    found.shutdown()
    assert current_client() is not found
