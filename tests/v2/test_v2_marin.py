"""Flat modules with which Marin imports its own `fray` package: names, values and behaviour of its release of today.

The tables are facts about the wheels of `marin-fray` 0.2.227; the tests need none of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import fray.v2
from fray.actor import ActorContext, ActorUnavailableError, HostedActor, current_actor
from fray.client import JobFailed
from fray.current_client import current_client, set_current_client
from fray.device_flops import device_flops, device_flops_for_jax_device
from fray.iris_backend import FrayIrisClient, IrisActorHandle
from fray.local_backend import LocalActorMethod, LocalClient
from fray.types import (
    ActorConfig,
    CpuConfig,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    JobStatus,
    ResourceConfig,
    TpuConfig,
    create_environment,
    get_tpu_topology,
    tpu_hbm_capacity_bytes,
)
from fray.v2.fray import convert
from fray.v2.ray_backend.environments import runtime_env

NAMES = {
    "actor": "ActorContext ActorFuture ActorGroup ActorHandle ActorMethod ActorUnavailableError HostedActor "
    "_current_actor_ctx _reset_current_actor _set_current_actor current_actor",
    "client": "Client JobAlreadyExists JobFailed JobHandle wait_all",
    "cluster": "ANY_REGION CpuConfig DeviceConfig DeviceKind Entrypoint EnvironmentConfig GpuConfig GpuType JobRequest "
    "JobStatus ResourceConfig TpuConfig TpuTopologyInfo TpuType create_environment get_tpu_topology",
    "current_client": "_current_client_var current_client set_current_client",
    "device_flops": "DEVICE_FLOPS FlopDtype device_flops device_flops_for_jax_device "
    "jax_device_kind_to_fray_device_type normalize_device_type normalize_dtype",
    "local_backend": "LocalActorGroup LocalActorHandle LocalActorMethod LocalClient LocalJobHandle",
    "types": "ANY_REGION ActorConfig BinaryEntrypoint CallableEntrypoint CpuConfig DEFAULT_TPU_HOST_FRACTION "
    "DeviceConfig DeviceKind Entrypoint EnvironmentConfig GpuConfig GpuType JobRequest JobStatus ResourceConfig "
    "TPU_HBM_BYTES_PER_CHIP TPU_HOST_RESOURCES TPU_TOPOLOGIES TpuConfig TpuFamily TpuHostResources TpuTopologyInfo "
    "TpuType create_environment get_tpu_topology tpu_family tpu_hbm_bytes_per_chip tpu_hbm_capacity_bytes",
    "iris_backend": "FrayIrisClient IrisActorGroup IrisActorHandle IrisJobHandle NSYS_TASKS_ENV OperationFuture "
    "convert_constraints convert_container_profile convert_entrypoint convert_environment convert_resources "
    "map_iris_job_state resolve_coscheduling wrap_multiprocess wrap_nsys",
}
DIFFERENT = {
    *("ResourceConfig", "CpuConfig", "GpuConfig", "TpuConfig", "DeviceConfig", "EnvironmentConfig", "JobRequest"),
    *("ActorConfig", "LocalClient", "LocalJobHandle", "create_environment", "current_client", "get_tpu_topology"),
}
"""Names that are not the objects of `fray.v2`."""


@pytest.mark.parametrize("module", NAMES)
def test_a_flat_module_has_marins_names_and_the_objects_of_v2(module: str) -> None:
    flat = importlib.import_module(f"fray.{module}")
    for name in NAMES[module].split():
        found = getattr(flat, name)
        if hasattr(fray.v2, name):
            assert (found is getattr(fray.v2, name)) == (name not in DIFFERENT), name


def test_import_fray_imports_none_of_it() -> None:
    code = "import sys, fray; print([name for name in sys.modules if name.startswith(('fray.v2', 'fray.types'))])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_marin_fray_in_the_same_place_is_a_warning_with_the_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "fray").symlink_to(Path(fray.v2.__file__).parents[1])
    command = [sys.executable, "-P", "-W", "error::RuntimeWarning", "-c", "import fray.types"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, env=environ).returncode == 0
    (tmp_path / "marin_fray-0.2.227.dist-info").mkdir()
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert f"marin-fray is installed in {tmp_path / 'fray'} too" in ran.stderr
    assert "pip uninstall --yes marin-fray && pip install" in ran.stderr


def test_a_name_of_a_newer_marin_is_an_error_that_says_which_release_is_followed() -> None:
    with pytest.raises(ImportError, match=r"'fray.types' has no attribute 'ResourceConfigs'.*marin-fray 0\.2\.227"):
        from fray.types import ResourceConfigs  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(TypeError, match=r"ResourceConfig has no parameter 'shm_size'.*marin-fray 0\.2\.227"):
        ResourceConfig(shm_size="1g")  # type: ignore[call-arg]
    assert not hasattr(importlib.import_module("fray.types"), "ResourceConfigs")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ActorConfig(of_tomorrow=1),  # type: ignore[call-arg]
        lambda: JobRequest("job", Entrypoint.from_callable(print), of_tomorrow=1),  # type: ignore[call-arg]
        lambda: create_environment(of_tomorrow=1),  # type: ignore[call-arg]
        lambda: LocalClient(of_tomorrow=1),  # type: ignore[call-arg]
        lambda: LocalClient().submit(JobRequest("job", Entrypoint.from_callable(print)), of_tomorrow=1),  # type: ignore[call-arg]
        lambda: FrayIrisClient("127.0.0.1:1", of_tomorrow=1),  # type: ignore[call-arg]
        lambda: FrayIrisClient.submit(None, None, of_tomorrow=1),  # type: ignore[arg-type, call-arg]
    ],
)
def test_a_keyword_of_a_newer_marin_is_an_error_that_says_which_release_is_followed(call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"has no parameter 'of_tomorrow'.*marin-fray 0\.2\.227"):
        call()


def test_arguments_by_position_are_in_marins_order() -> None:
    resources = ResourceConfig(
        2, "8g", "10g", GpuConfig("H100"), False, ["us-east5"], None, "peer", 3, ["A100"], "image"
    )
    assert resources == ResourceConfig(
        cpu=2,
        ram="8g",
        disk="10g",
        device=GpuConfig("H100"),
        preemptible=False,
        regions=["us-east5"],
        target_cluster="peer",
        replicas=3,
        device_alternatives=["A100"],
        image="image",
    )
    program = Entrypoint.from_callable(print)
    request = JobRequest("job", program, resources, None, 3, 2, 4, 5, 6, 7, 8.0)
    assert (request.processes_per_task, request.max_retries_failure, request.max_retries_preemption) == (2, 4, 5)
    assert (request.max_task_failures, request.priority, request.timeout) == (6, 7, 8.0)
    environment = EnvironmentConfig("/w", None, (), {}, {"K": "v"}, "isolate", ("gpu",))
    assert (environment.secrets, environment.secret_behavior, environment.extras) == ({"K": "v"}, "isolate", ("gpu",))
    assert CpuConfig("cpu", "cpu") == CpuConfig(kind="cpu") == CpuConfig()
    with pytest.raises(ValueError, match="kind must be 'cpu'"):
        CpuConfig("gpu")
    with pytest.raises(TypeError, match="ResourceConfig has two values of 'cpu': by position and by name"):
        ResourceConfig(2, cpu=3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="JobRequest takes 11 arguments, and 12 are given"):
        JobRequest("job", program, resources, None, 3, 2, 4, 5, 6, 7, 8.0, 9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'entrypoint'"):
        JobRequest("job")  # type: ignore[call-arg]
    assert list(inspect.signature(JobRequest).parameters)[5] == "processes_per_task"
    assert replace(request, name="other").timeout == 8.0
    for each in (resources, request, environment, CpuConfig()):
        assert cloudpickle.loads(cloudpickle.dumps(each)) == each


def test_instances_of_either_interface_are_instances_of_both() -> None:
    assert isinstance(fray.v2.ResourceConfig(), ResourceConfig)
    assert isinstance(ResourceConfig(), fray.v2.ResourceConfig)
    assert isinstance(TpuConfig("v4-8"), fray.v2.TpuConfig)
    assert not isinstance(TpuConfig("v4-8"), GpuConfig)

    class Own(LocalClient):
        pass

    assert not isinstance(LocalClient(), Own)


def test_resources_have_marins_defaults_and_can_be_changed() -> None:
    resources = ResourceConfig()
    assert (resources.ram, resources.disk, resources.target_cluster) == ("4g", "64g", None)
    resources.cpu = 3
    assert resources.scale(2).cpu == 6
    assert resources.scale(ram=0.5).ram == "2g"
    with pytest.raises(ValueError, match="either one factor"):
        resources.scale(2, cpu=1)
    request = JobRequest("job", Entrypoint.from_callable(print))
    request.name = "other"
    assert request.resources.ram == "4g"


def test_with_tpu_takes_half_of_a_host_and_types_that_agree_in_shape() -> None:
    tpu = ResourceConfig.with_tpu("v5p-16", slice_count=2)
    assert (tpu.cpu, tpu.ram, tpu.disk, tpu.replicas) == (104, "224g", "50g", 4)
    assert tpu.chip_count() == 16
    assert tpu.device_flops() == 459e12
    with pytest.raises(ValueError, match="chips per VM"):
        ResourceConfig.with_tpu(["v6e-4", "v6e-8"])
    assert [get_tpu_topology(f"v5litepod-{size}").host_count for size in (2, 16, 256)] == [1, 2, 32]
    assert tpu_hbm_capacity_bytes("v5p-8") == 4 * 95 * 1024**3


def test_devices_have_marins_methods_and_order() -> None:
    assert GpuConfig("H100", "gpu", 8).total_flops() == 8 * 989.5e12
    assert TpuConfig("v6e-8", "tpu", "2x4").topology == "2x4"
    assert "98304" in TpuConfig("v6e-8").default_env_vars()["LIBTPU_INIT_ARGS"]
    assert (TpuConfig("v5litepod-16").chip_count(), fray.v2.TpuConfig("v5litepod-16").chip_count()) == (4, 16)
    assert device_flops_for_jax_device("NVIDIA A100-SXM4-80GB") == device_flops("a100-80g") == 312e12
    assert device_flops("abacus") is None


def test_marins_defaults_reserve_nothing_on_a_cluster() -> None:
    for resources in (ResourceConfig(), ResourceConfig.with_tpu("v5p-8")):
        native = convert.job_resources(resources)
        assert (native.memory, native.disk) == (None, 0)


def test_tokens_travel_as_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    environment = create_environment(workspace="/w")
    assert "HF_TOKEN" not in environment.env_vars
    native = convert.environment(environment)
    assert native is not None
    assert native.env_vars["HF_TOKEN"] == convert.Secret("HF_TOKEN")
    isolated = convert.environment(create_environment(workspace="/w", secret_behavior="isolate"))
    assert isolated is not None
    assert "HF_TOKEN" not in isolated.env_vars
    with pytest.raises(ValueError, match="set OTHER here"):
        convert.environment(create_environment(workspace="/w", secrets={"OTHER": "x"}))
    on_ray, _ = runtime_env(environment, None, one_machine=True)
    assert on_ray["env_vars"]["HF_TOKEN"] == "hf_0123456789"


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout": 60},
        {"processes_per_task": 8},
        {"environment": create_environment(workspace="/w", setup_scripts=["true"])},
    ],
)
def test_what_only_iris_has_is_an_error_on_other_clusters(settings: dict[str, Any]) -> None:
    request = JobRequest("job", Entrypoint.from_callable(print), **settings)
    with pytest.raises(ValueError, match="Iris only"):
        convert.job_request(request)


def test_a_remote_call_runs_in_a_copy_of_its_callers_context() -> None:
    place: ContextVar[str] = ContextVar("place", default="nowhere")
    with LocalClient() as client:
        place.set("maker")
        actor = client.create_actor(Reader, name="reader")
        place.set("caller")
        assert actor.read.remote(place).result() == "caller"
        assert actor.read.remote(place, "method").result() == "caller"
        assert place.get() == "caller"


class Reader:
    def read(self, variable: ContextVar[str], value: str = "") -> str:
        found = variable.get()
        variable.set(value)
        return found


class Counter:
    def __init__(self) -> None:
        self.about = current_actor()

    def end(self) -> None:
        self.about.shutdown_event.set()

    def give_up(self) -> None:
        self.about.fail(KeyError("gone"))


@contextmanager
def clients(kind: str) -> Iterator[Any]:
    with LocalClient() if kind == "threads" else fray.v2.FrayClient("local") as client:
        yield client


@pytest.mark.parametrize("kind", ["threads", "fray"])
def test_an_actor_that_sets_its_shutdown_event_ends(kind: str) -> None:
    with clients(kind) as client:
        environment = EnvironmentConfig(docker_image=None, workspace=".") if kind == "threads" else None
        group = client.create_actor_group(Counter, name="ender", count=1, environment=environment)
        handle = group.wait_ready(timeout=60)[0]
        assert isinstance(group._job_id, str)
        handle.end()
        assert group.jobs[0].wait(60) == "succeeded"
        assert group.is_done()
        if kind == "threads":  # as Marin's, which its callers end once more
            assert group.wait_ready() == [handle]
            handle.end()
        group.shutdown()
        with pytest.raises(ActorUnavailableError):
            handle.end()


def test_a_context_and_a_hosted_actor_are_made_as_marin_makes_them() -> None:
    event = threading.Event()
    about = ActorContext("handle", 0, "group", event)
    about.fail(exc=KeyError("gone"))
    assert event.is_set()
    assert [repr(error) for error in about._errors] == ["KeyError('gone')"]
    HostedActor(handle="handle").shutdown()
    assert JobFailed(job_id="job-1", status=JobStatus.STOPPED).failed_status == "stopped"


def test_a_method_and_a_handle_are_made_as_marin_makes_them() -> None:
    method = LocalActorMethod(str.upper)
    assert [method("a"), method.remote("b").result(), method.submit("c").result()] == ["A", "B", "C"]
    handle = IrisActorHandle(endpoint_name="/user/job/actor", resolver="resolver")
    assert handle._resolver == "resolver"
    assert pickle.loads(pickle.dumps(handle))._endpoint_name == "/user/job/actor"


def test_an_actor_that_fails_raises_its_error_from_its_job() -> None:
    with LocalClient() as client:
        group = client.create_actor_group(Counter, name="failing", count=1)
        group.wait_ready()[0].give_up()
        with pytest.raises(KeyError, match="gone"):
            group.jobs[0].wait()


def test_a_hosted_actor_of_the_local_client_answers_after_its_end() -> None:
    with LocalClient() as client:
        hosted = client.host_actor(Counter, name="hosted")
        hosted.shutdown()
        hosted.handle.end()


def test_logs_are_the_last_lines_and_the_fallback_is_marins_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAY_CLIENT_SPEC", raising=False)
    with current_client() as client:  # type: ignore[attr-defined]
        assert type(client) is LocalClient
        program = Entrypoint.from_binary(sys.executable, ["-c", "print('a'); print('b')"])
        job = client.submit(JobRequest("lines", program))
        job.wait()
        assert (job.logs(), job.logs(1)) == (("a", "b"), ("b",))
        with set_current_client(client):
            assert fray.v2.current_client() is client
