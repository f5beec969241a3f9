"""Translation of `fray.v2` for Ray: resources, slices, retries, environments, errors; no Ray runs here."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fray.v2 import (
    ActorConfig,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    ResourceConfig,
    create_environment,
)
from fray.v2.ray_backend import auth
from fray.v2.ray_backend.environments import runtime_env
from fray.v2.ray_backend.errors import packed
from fray.v2.ray_backend.resources import actor_options, bundle, job_options, slice_request, tries
from fray.v2.ray_backend.tpu import head_bundles, variables, vm_bundles


def request(resources: ResourceConfig, **settings: Any) -> JobRequest:
    return JobRequest(name="job", entrypoint=Entrypoint.from_callable(print), resources=resources, **settings)


def test_preemptible_false_pins_to_the_head_node() -> None:
    steady = ResourceConfig(preemptible=False)
    assert (
        job_options(steady)["resources"] == {"head_node": 0.0001} == actor_options(steady, ActorConfig())["resources"]
    )
    assert "resources" not in job_options(ResourceConfig())


def test_jobs_with_an_accelerator_are_not_pinned_to_the_head() -> None:
    assert job_options(ResourceConfig.with_tpu("v4-8", preemptible=False))["resources"] == {"TPU": 4}
    assert "resources" not in job_options(ResourceConfig.with_gpu("H100", preemptible=False))


def test_jobs_reserve_their_cpus_and_actors_only_given_ones() -> None:
    assert job_options(ResourceConfig(cpu=0.5))["num_cpus"] == 0.5
    assert job_options(ResourceConfig())["num_cpus"] == 1
    assert actor_options(ResourceConfig(), ActorConfig())["num_cpus"] == 0
    assert "memory" not in job_options(ResourceConfig()), "no memory was requested"
    assert actor_options(ResourceConfig(cpu=2), ActorConfig())["num_cpus"] == 2


def test_memory_gpus_and_regions_have_rays_names() -> None:
    options = job_options(ResourceConfig.with_gpu("H100", count=2, ram="1g", zone="europe-west4-a"))
    assert options["memory"] == 1 << 30
    assert options["num_gpus"] == 2
    assert options["label_selector"] == {
        "ray.io/accelerator-type": "H100",
        "ray.io/availability-zone": "europe-west4-a",
    }
    assert job_options(ResourceConfig(device=GpuConfig("A100")))["accelerator_type"] == "A100"
    either = job_options(ResourceConfig.with_gpu("H100", device_alternatives=["A100"], regions=["eu", "us"]))
    assert either["label_selector"] == {
        "ray.io/accelerator-type": "in(H100,A100)",
        "ray.io/availability-region": "in(eu,us)",
    }


def test_an_actors_config_becomes_rays_without_default_restarts() -> None:
    asked = ActorConfig(max_concurrency=100, max_restarts=-1, max_task_retries=3)
    options = actor_options(ResourceConfig(), asked)
    assert (options["max_concurrency"], options["max_restarts"], options["max_task_retries"]) == (100, -1, 3)
    usual = actor_options(ResourceConfig(), ActorConfig())
    assert (usual["max_concurrency"], usual["max_restarts"], usual["max_task_retries"]) == (1, 0, 0)


def test_retries_are_the_sum_of_both() -> None:
    assert tries(request(ResourceConfig(), max_retries_failure=3, max_retries_preemption=4)) == 7
    assert tries(request(ResourceConfig())) == 100
    assert tries(request(ResourceConfig(), max_retries_failure=1, max_task_failures=2)) == 102


def test_replicas_of_a_tpu_job_become_num_slices() -> None:
    wanted = slice_request(request(ResourceConfig.with_tpu("v5litepod-16", slice_count=2)))
    assert wanted is not None
    assert (wanted.slices, wanted.vms, wanted.chips) == (2, 4, 4)
    assert head_bundles(wanted) == [{"TPU-v5litepod-16-head": 1}] * 2
    each = bundle(job_options(ResourceConfig.with_tpu("v5litepod-16", cpu=1, ram="1g")))
    assert each == {"CPU": 1, "memory": 1 << 30, "TPU": 4}
    assert vm_bundles(wanted, ["a", None], each) == [{**each, "a": 1}] * 4 + [each] * 4
    assert variables(wanted, 5, "10.0.0.1") == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_PORT": "8081",
    }
    assert slice_request(request(ResourceConfig())) is None


def test_replicas_that_are_not_whole_slices_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"4 VMs: write .*with_tpu\('v5litepod-16', slice_count=N\)"):
        slice_request(request(ResourceConfig.with_tpu("v5litepod-16"), replicas=6))


def test_an_environment_becomes_a_runtime_env_and_a_workspace_of_this_machine_is_not_copied(tmp_path: Path) -> None:
    environment = create_environment(workspace=str(tmp_path), pip_packages=["six"], env_vars={"A": "1"})
    here, directory = runtime_env(environment, None, one_machine=True)
    assert (here["pip"], here["env_vars"]["A"], directory) == (["six"], "1", str(tmp_path))
    assert "working_dir" not in here
    there, directory = runtime_env(environment, None, one_machine=False)
    assert (there["working_dir"], directory) == (str(tmp_path), None)
    assert ".git" in there["excludes"]
    assert runtime_env(EnvironmentConfig(docker_image="lab/image"), None, one_machine=False) == (
        {"image_uri": "lab/image"},
        None,
    )
    assert runtime_env(None, None, one_machine=False) == ({}, None)


def test_extras_become_packages(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[project.optional-dependencies]\ntpu = ["jax"]\n')
    environment = EnvironmentConfig(workspace=str(tmp_path), extras=["tpu"])
    assert runtime_env(environment, None, one_machine=True)[0] == {"pip": ["jax"]}
    with pytest.raises(ValueError, match=r"\['gpu'\] are not in .*which has \['tpu'\]"):
        runtime_env(EnvironmentConfig(workspace=str(tmp_path), extras=["gpu"]), None, one_machine=True)


def test_rays_token_cannot_be_set_for_jobs() -> None:
    with pytest.raises(ValueError, match="RAY_AUTH_TOKEN cannot be set for jobs") as raised:
        runtime_env(EnvironmentConfig(workspace=".", env_vars={"RAY_AUTH_TOKEN": "sesame"}), None, one_machine=True)
    assert "sesame" not in str(raised.value)


def test_token_authentication_is_on_where_a_token_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    named = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    auth.prepare(named)
    assert named["RAY_AUTH_MODE"] == "token"
    switched_off = {"RAY_AUTH_TOKEN": "sesame", "RAY_AUTH_MODE": "disabled"}
    auth.prepare(switched_off)
    assert switched_off["RAY_AUTH_MODE"] == "disabled"
    nothing: dict[str, str] = {}
    auth.prepare(nothing)
    assert nothing == {}, "Ray's own default applies"
    with pytest.raises(RuntimeError, match="no such file"):
        auth.prepare({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


class Fussy(Exception):
    """Error whose constructor does not accept its ``args``, so that pickle alone fails."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def test_errors_arrive_as_themselves_also_where_pickle_alone_would_fail() -> None:
    error = packed(Fussy(code=3)).unpacked()
    assert isinstance(error, Fussy)
    assert (str(error), error.code) == ("code 3", 3)
    ended = packed(SystemExit(4)).unpacked()
    assert isinstance(ended, SystemExit)
    assert ended.code == 4


def test_an_error_that_cannot_be_pickled_arrives_as_its_text() -> None:
    error = Fussy(code=3)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    arrived = packed(error).unpacked()
    assert type(arrived) is RuntimeError
    assert str(arrived) == "Fussy: code 3"


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
import fray.v2
from fray.v2.ray_backend.backend import RayClient, shared_ray_client
for begin in (RayClient, lambda: fray.v2.client.client_of("ray")):
    try:
        begin()
    except RuntimeError as error:
        print(error)
"""


def test_without_ray_installed_the_error_says_what_to_install_and_fray_v2_imports_no_ray() -> None:
    run = [sys.executable, "-c"]
    output = subprocess.run([*run, WITHOUT_RAY], capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.count("pip install 'fray[ray]'") == 2
    imported = "import sys, fray.v2; fray.v2.current_client(); assert 'ray' not in sys.modules"
    subprocess.run([*run, imported], timeout=60, check=True)
