"""Translation of requests of `fray.v2` for a cluster of Fray."""

from __future__ import annotations

from pathlib import Path

import pytest

from fray.model.resources import parse_bytes
from fray.v2 import (
    ActorConfig,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    ResourceConfig,
    TpuConfig,
)
from fray.v2.fray.convert import (
    actor_config,
    actor_request,
    job_request,
    job_resources,
)

NOTHING = Entrypoint.from_callable(print)


def job(**settings: object) -> JobRequest:
    return JobRequest(name="job", entrypoint=NOTHING, **settings)  # type: ignore[arg-type]


def test_given_memory_is_reserved_and_is_the_limit() -> None:
    found = job_resources(ResourceConfig(ram="4g", disk="10g"))
    assert found.demand().memory_bytes == found.memory_limit_bytes() == parse_bytes("4g")
    assert found.demand().disk_bytes == parse_bytes("10g")


def test_default_memory_sets_no_limit() -> None:
    """Check the default of 128m, which as a limit would kill any process that imports numpy."""
    for resources in (ResourceConfig(), ResourceConfig(ram="128m"), ResourceConfig.with_tpu("v4-8")):
        found = job_resources(resources)
        assert found.memory_limit_bytes() == 0
        assert found.demand().memory_bytes == parse_bytes("2g")
        assert found.demand().disk_bytes == 0


def test_an_actor_reserves_only_given_amounts() -> None:
    found = actor_request("actor", ResourceConfig(preemptible=False), ActorConfig()).resources
    assert (found.cpu, found.demand().memory_bytes, found.preemptible) == (0, 0, False)
    found = actor_request("actor", ResourceConfig(cpu=0.5, ram="1g"), ActorConfig()).resources
    assert (found.cpu, found.memory_limit_bytes()) == (0.5, parse_bytes("1g"))


def test_an_actor_is_one_process() -> None:
    with pytest.raises(ValueError, match="count="):
        actor_request("actor", ResourceConfig.with_tpu("v5litepod-16"), ActorConfig())


def test_devices_regions_and_images_are_passed_on() -> None:
    resources = ResourceConfig.with_gpu("H100", 4, regions=["us-east5"], zone="us-east5-a", image="lab/train:3")
    found = job_request(job(resources=resources))
    demand = found.resources.demand()
    assert (demand.device_kind, demand.device_variant, demand.device_count) == ("gpu", "H100", 4)
    assert (demand.regions, demand.zones) == (("us-east5",), ("us-east5-a",))
    assert found.environment.docker_image == "lab/train:3"
    either = job_resources(ResourceConfig.with_tpu(["v5p-8", "v4-8"]))
    assert [device.variant for device in either.devices] == ["v5p-8", "v4-8"]


def test_replicas_of_tpu_jobs_become_slices() -> None:
    assert job_request(job(resources=ResourceConfig.with_tpu("v5litepod-16", slice_count=2))).replicas == 2
    assert job_request(job(resources=ResourceConfig.with_tpu("v5litepod-16"), replicas=12)).replicas == 3
    assert job_request(job(resources=ResourceConfig.with_tpu("v5litepod-16"))).members() == 4


def test_replicas_that_are_not_whole_slices_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"replicas=6 .* each slice has 4: write 4 or 8"):
        job_request(job(resources=ResourceConfig.with_tpu("v5litepod-16"), replicas=6))
    with pytest.raises(ValueError, match="write 4, or"):
        job_request(job(resources=ResourceConfig(device=TpuConfig("v5litepod-16"))))


def test_replicas_of_other_jobs_are_processes() -> None:
    assert job_request(job(replicas=3)).members() == 3
    assert job_request(job()).replicas is None, "a single process does not make a gang"
    assert job_request(job(resources=ResourceConfig(device=GpuConfig("H100", 8), replicas=2))).members() == 2


def test_priorities_are_bands() -> None:
    found = [job_request(job(priority=priority)).priority for priority in (7, 0, -1)]
    assert found == ["production", None, "batch"]
    assert actor_request("actor", ResourceConfig(), ActorConfig(priority=1)).priority == "production"


def test_retries_of_a_job_and_failures_of_its_tasks_are_one_budget() -> None:
    found = job_request(job(max_retries_failure=2, max_retries_preemption=5))
    assert (found.max_retries_failure, found.max_retries_preemption) == (2, 5)
    assert job_request(job(max_task_failures=3)).max_retries_failure == 3


def test_an_actor_restarts_after_losses_and_after_failures_only_if_configured() -> None:
    default = actor_request("actor", ResourceConfig(), ActorConfig())
    assert (default.max_retries_failure, default.max_retries_preemption) == (0, 100)
    assert actor_request("actor", ResourceConfig(preemptible=False), ActorConfig()).max_retries_preemption == 0
    assert actor_config(ActorConfig()).max_restarts is None
    assert actor_config(ActorConfig(max_restarts=10)).max_restarts == 10
    assert actor_config(ActorConfig(max_task_retries=3)).max_restarts == 3
    assert actor_config(ActorConfig(max_restarts=0, max_task_retries=3)).max_restarts == 0


def test_concurrency_is_limited_only_if_given() -> None:
    assert [actor_config(ActorConfig(max_concurrency=n)).max_concurrency for n in (1, 100)] == [None, 100]


def test_an_environment_is_passed_on_without_an_empty_workspace(tmp_path: Path) -> None:
    config = EnvironmentConfig(workspace=str(tmp_path), pip_packages=["polars"], env_vars={"A": "1"}, extras=["gpu"])
    found = job_request(job(environment=config)).environment
    assert (found.pip_packages, found.env_vars, found.extras) == (("polars",), {"A": "1"}, ("gpu",))
    assert found.workspace is None, "the directory is empty"
    (tmp_path / "code.py").touch()
    assert job_request(job(environment=config)).environment.workspace == str(tmp_path)


def test_invalid_requests_are_valueerrors() -> None:
    with pytest.raises(ValueError, match="reserved for Fray"):
        job_request(job(environment=EnvironmentConfig(docker_image="a", env_vars={"FRAY_X": "1"})))
    with pytest.raises(ValueError, match="entrypoint"):
        job_request(JobRequest(name="job", entrypoint=Entrypoint()))
    with pytest.raises(ValueError, match="bad-name"):
        job_request(JobRequest(name="bad:name", entrypoint=NOTHING))
