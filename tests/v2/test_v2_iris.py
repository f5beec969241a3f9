"""`FrayIrisClient` against the stand-in of Iris beside this file, whose jobs are real processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from v2_contract import *  # noqa: F403
from v2_contract import Capabilities, Counter, do_nothing, fail, new, request

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
from fray.v2.client import client_of
from fray.v2.iris import actors
from fray.v2.iris.actors import IrisActorHandle
from fray.v2.iris.jobs import IrisJobHandle
from fray.v2.iris_backend import FrayIrisClient

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture(scope="module")
def controller() -> Iterator[Any]:
    """Start a controller; this process acts as one of its jobs, since names belong to one root job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors, "FIRST_WAIT_S", 1.0)
        patch.setattr(actors, "NEXT_WAIT_S", 0.5)
        patch.syspath_prepend(str(STANDIN))
        from iris.client import as_job
        from iris.controller import Controller

        with Controller() as controller, as_job(controller.address, "/tests"):
            yield controller
    for name in [name for name in sys.modules if name.partition(".")[0] == "iris"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def client(controller: Any) -> FrayIrisClient:
    return FrayIrisClient(controller.address)


@pytest.fixture
def make_client(controller: Any) -> Callable[[], FrayIrisClient]:
    return lambda: FrayIrisClient(controller.address)


@pytest.fixture
def capabilities() -> Capabilities:
    """Return the capabilities: Iris passes on no exceptions of jobs, and ends actors with their containers."""
    return Capabilities(carries_errors=False, finishes_calls=False, program_error=JobFailed)


def spec_of(controller: Any, name: str) -> dict[str, Any]:
    return controller.jobs[f"/tests/{name}"].spec  # type: ignore[no-any-return]


def submitted(client: FrayIrisClient, controller: Any, **settings: Any) -> dict[str, Any]:
    name = new("mapped")
    job = JobRequest(name=name, entrypoint=Entrypoint.from_callable(do_nothing), **settings)
    client.submit(job).wait()
    return spec_of(controller, name)


# Translations ------------------------------------------------------------------------------------------------------


def test_not_preemptible_is_iriss_constraint(client: FrayIrisClient, controller: Any) -> None:
    from iris.cluster.types import Constraint, ConstraintOp

    spec = submitted(client, controller, resources=ResourceConfig(preemptible=False))
    assert spec["constraints"] == [Constraint(key="preemptible", op=ConstraintOp.EQ, value="false")]
    assert submitted(client, controller)["constraints"] == []


def test_regions_and_a_zone_are_constraints(client: FrayIrisClient, controller: Any) -> None:
    resources = ResourceConfig(regions=["us-central1", "us-east5"], zone="us-central1-a")
    region, zone = submitted(client, controller, resources=resources)["constraints"]
    assert (region.key, region.values) == ("region", ("us-central1", "us-east5"))
    assert (zone.key, zone.value) == ("zone", "us-central1-a")


def test_replicas_are_part_of_iriss_resource_spec(client: FrayIrisClient, controller: Any) -> None:
    resources = ResourceConfig.with_tpu("v5litepod-16", slice_count=2)
    spec = submitted(client, controller, resources=resources)["resources"]
    assert (spec.replicas, spec.cpu, spec.memory, spec.disk) == (8, 32, "128g", "50g")
    assert (spec.device.kind, spec.device.variant) == ("tpu", "v5litepod-16")


def test_gpus_and_retries_arrive(client: FrayIrisClient, controller: Any) -> None:
    spec = submitted(client, controller, resources=ResourceConfig.with_gpu("H100", count=4), max_retries_failure=3)
    assert (spec["resources"].device.variant, spec["resources"].device.count) == ("H100", 4)
    assert (spec["max_retries_failure"], spec["max_retries_preemption"]) == (3, 100)


def test_an_environment_is_packages_variables_and_extras(client: FrayIrisClient, controller: Any) -> None:
    environment = create_environment(pip_packages=["polars"], extras=["tpu"], env_vars={"A": "1"})
    found = submitted(client, controller, environment=environment)["environment"]
    assert (found.pip_packages, found.extras, found.env_vars["A"]) == (["polars"], ["tpu"], "1")


def test_an_image_is_refused_with_a_reason(client: FrayIrisClient) -> None:
    environment = create_environment(docker_image="ghcr.io/a/b:1")
    with pytest.raises(ValueError, match="the cluster's own image"):
        client.submit(request(do_nothing, environment=environment))


def test_an_actor_is_a_job_with_a_port_named_actor(client: FrayIrisClient, controller: Any) -> None:
    name = new("counters")
    group = client.create_actor_group(Counter, name=name, count=2, actor_config=ActorConfig(max_restarts=2))
    assert [handle.add(1) for handle in group.wait_ready()] == [1, 1]
    specs = [spec_of(controller, f"{name}-{index}") for index in range(2)]
    assert [spec["ports"] for spec in specs] == [["actor"], ["actor"]]
    assert [spec["max_retries_failure"] for spec in specs] == [2, 2]
    group.shutdown()


def test_a_handle_pickles_to_its_name(client: FrayIrisClient) -> None:
    handle = client.create_actor(Counter, name=new("counter"))
    assert handle.add(1) == 1
    assert handle.__reduce__() == (IrisActorHandle, (handle._name,))
    assert pickle.loads(pickle.dumps(handle)).add(1) == 2


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


def test_in_a_job_of_iris_the_current_client_is_that_clusters(controller: Any) -> None:
    found = current_client()
    assert isinstance(found, FrayIrisClient)
    assert found._iris.address == controller.address


def test_a_spec_selects_one_client_per_process(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAY_CLIENT_SPEC", f"iris://{controller.address}")
    found = current_client()
    assert isinstance(found, FrayIrisClient)
    assert current_client() is found
    found.shutdown()
    assert current_client() is not found


def test_without_iris_the_error_says_so() -> None:
    script = "from fray.v2.client import client_of; client_of('iris://localhost:1')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Iris is not installed here" in done.stderr
    assert client_of("local") is not None
