"""Values of `fray.v2`: their defaults, and the errors for invalid ones."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from fray.v2 import (
    ActorConfig,
    BinaryEntrypoint,
    CallableEntrypoint,
    CpuConfig,
    DeviceKind,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    JobStatus,
    ResourceConfig,
    TpuConfig,
    TpuTopologyInfo,
    create_environment,
    get_tpu_topology,
)

NOTHING = Entrypoint.from_callable(print)


def job(**changes: Any) -> JobRequest:
    return JobRequest(**{"name": "job", "entrypoint": NOTHING, **changes})


# Resources -----------------------------------------------------------------------------------------------------------


def test_resources_have_the_defaults_of_the_interface() -> None:
    assert dataclasses.asdict(ResourceConfig()) == {
        "cpu": 1,
        "ram": "128m",
        "disk": "1g",
        "device": {"kind": DeviceKind.CPU, "variant": "cpu"},
        "preemptible": True,
        "regions": None,
        "zone": None,
        "replicas": 1,
        "device_alternatives": None,
        "image": None,
    }


def test_values_are_equal_by_value_and_replaced_as_dataclasses_are() -> None:
    assert ResourceConfig(cpu=0.5, regions=["us"]) == ResourceConfig(cpu=0.5, regions=["us"]) != ResourceConfig(cpu=0.5)
    assert ResourceConfig.with_tpu("v5p-8") == ResourceConfig.with_tpu("v5p-8")
    changed = dataclasses.replace(ResourceConfig.with_gpu("H100", count=8), ram="512g", preemptible=False)
    assert (changed.device, changed.ram, changed.preemptible) == (GpuConfig("H100", 8), "512g", False)
    request = job(resources=ResourceConfig(replicas=3))
    assert dataclasses.replace(request, name="other").replicas == 3
    assert job(environment=create_environment("/w")) == job(environment=create_environment("/w"))
    assert {ResourceConfig(): 1}[ResourceConfig.with_cpu()] == 1


@pytest.mark.parametrize(
    "value",
    [ResourceConfig.with_tpu(["v5e-16", "v6e-16"]), ActorConfig(10), Entrypoint.from_binary("ls", ["-l"]), job()],
    ids=lambda value: type(value).__name__,
)
def test_values_pickle(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_devices_are_routed_by_kind_variant_and_type() -> None:
    for device, kind, variant in (
        (ResourceConfig.with_cpu(cpu=2).device, DeviceKind.CPU, "cpu"),
        (ResourceConfig.with_gpu().device, DeviceKind.GPU, "auto"),
        (ResourceConfig.with_gpu("A100-80G", 4).device, DeviceKind.GPU, "A100-80G"),
        (ResourceConfig.with_tpu("v4-8").device, DeviceKind.TPU, "v4-8"),
    ):
        assert (device.kind, device.variant) == (kind, variant)
        assert isinstance(device, {"cpu": CpuConfig, "gpu": GpuConfig, "tpu": TpuConfig}[kind])
        with pytest.raises(dataclasses.FrozenInstanceError):
            device.variant = "other"  # type: ignore[misc]


def test_a_tpu_type_requests_its_vms_with_default_host_resources() -> None:
    asked = ResourceConfig.with_tpu("v5litepod-16", slice_count=2)
    assert (asked.replicas, asked.cpu, asked.ram, asked.disk) == (8, 32, "128g", "50g")
    assert asked.device == TpuConfig("v5litepod-16")
    given = ResourceConfig.with_tpu("v5litepod-16", cpu=8, ram="16g", disk="5g", replicas=1, zone="us-east5-a")
    assert (given.replicas, given.cpu, given.ram, given.disk, given.zone) == (1, 8, "16g", "5g", "us-east5-a")


def test_several_tpu_types_need_the_same_number_of_vms() -> None:
    asked = ResourceConfig.with_tpu(["v5e-16", "v6e-16"])
    assert (asked.device.variant, list(asked.device_alternatives or ()), asked.replicas) == ("v5e-16", ["v6e-16"], 4)
    assert ResourceConfig.with_tpu(["v5e-16"]) == ResourceConfig.with_tpu("v5e-16")


@pytest.mark.parametrize(
    ("name", "chips", "vms", "chips_per_vm"),
    [("v4-8", 4, 1, 4), ("v4-64", 32, 8, 4), ("v5litepod-16", 16, 4, 4), ("v5p-8", 4, 1, 4), ("v6e-64", 64, 16, 4)],
)
def test_tpu_topologies(name: str, chips: int, vms: int, chips_per_vm: int) -> None:
    assert get_tpu_topology(name) == TpuTopologyInfo(name, chips, vms, vms, chips_per_vm)
    assert TpuConfig(name).chip_count() == chips == vms * chips_per_vm
    assert TpuConfig(name).vm_count() == vms


def test_v5e_is_an_alias_of_v5litepod() -> None:
    assert get_tpu_topology("v5e-16") == get_tpu_topology("v5litepod-16")


def test_chips_and_flops_are_those_of_all_replicas() -> None:
    tpu = ResourceConfig.with_tpu("v5p-16", slice_count=3)
    assert (tpu.chip_count(), tpu.device_flops(), tpu.total_flops()) == (24, 459e12, 24 * 459e12)
    gpu = ResourceConfig.with_gpu("H100", count=8, replicas=2)
    assert (gpu.chip_count(), gpu.total_flops("fp8")) == (16, 16 * 1979e12)
    assert gpu.device_flops("bfloat16") == gpu.device_flops("bf16") == 989e12
    cpu = ResourceConfig(replicas=4)
    assert (cpu.chip_count(), cpu.total_flops()) == (0, 4 * cpu.device_flops())


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: ResourceConfig(cpu=-1), r"cpu=-1 must be a number of CPUs"),
    (lambda: ResourceConfig(cpu=float("nan")), r"cpu=nan must be"),
    (lambda: ResourceConfig(cpu=float("inf")), r"cpu=inf must be"),
    (lambda: ResourceConfig(ram="lots"), r"ram.*lots"),
    (lambda: ResourceConfig(disk="-1g"), r"disk.*-1g"),
    (lambda: ResourceConfig(replicas=0), r"replicas=0 must be a whole number, 1 or more"),
    (lambda: ResourceConfig(replicas=1.5), r"replicas=1\.5 must be"),  # type: ignore[arg-type]
    (lambda: ResourceConfig.with_gpu("H100", count=0), r"count=0\) must be 1 or more"),
    (lambda: ResourceConfig.with_tpu("v5litepod-17"), r"v5litepod-17.*v5litepod-16"),
    (lambda: TpuConfig("h100"), r"h100"),
    (lambda: get_tpu_topology("v99-8"), r"v99-8"),
    (lambda: ResourceConfig.with_tpu("v4-8", slice_count=0), r"slice_count=0 must be 1 or more"),
    (lambda: ResourceConfig.with_tpu([]), r"no TPU type"),
    (lambda: ResourceConfig.with_tpu(["v5e-16", "v5e-8"]), r"v5e-16 has 4 VMs and v5e-8 has \d"),
    (lambda: ResourceConfig.with_gpu("H100").device_flops("int3"), r"H100 in 'int3'.*known: bf16"),
    (lambda: ResourceConfig.with_gpu().device_flops(), r"gpu 'auto' are not known; known: a10"),
    (lambda: job(name="two words"), r"'two words' must not be empty or have blanks: write 'two-words'"),
    (lambda: job(name="tab\there"), r"write 'tab-here'"),
    (lambda: job(name=""), r"must not be empty"),
    (lambda: job(replicas=0), r"job 'job': replicas=0 must be"),
    (lambda: job(max_retries_failure=-1), r"max_retries_failure=-1 must be 0 or more"),
    (lambda: job(max_retries_preemption=-1), r"max_retries_preemption=-1 must be 0 or more"),
    (lambda: job(max_task_failures=-1), r"max_task_failures=-1 must be 0 or more"),
    (lambda: job(processes_per_task=2), r"processes_per_task=2: only 1 is supported; start more in the job itself"),
    (lambda: Entrypoint.from_callable("print"), r"from_callable needs a callable, not 'print'"),  # type: ignore[arg-type]
    (lambda: Entrypoint.from_binary(""), r"from_binary needs a program"),
    (lambda: Entrypoint.from_binary("ls", [1]), r"from_binary needs a program and strings"),  # type: ignore[list-item]
    (lambda: EnvironmentConfig(), r"exactly one of workspace \(None\) and docker_image \(None\)"),
    (
        lambda: EnvironmentConfig(workspace="/w", docker_image="i"),
        r"exactly one of workspace \('/w'\) and docker_image",
    ),
    (lambda: create_environment("/w", "image"), r"exactly one of"),
    (lambda: ActorConfig(max_concurrency=0), r"max_concurrency=0 must be 1 or more"),
    (lambda: ActorConfig(max_restarts=-2), r"max_restarts=-2 must be 0 or more, or -1 for always"),
    (lambda: ActorConfig(max_task_retries=-2), r"max_task_retries=-2 must be"),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_invalid_values_are_valueerrors_with_advice(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


# Jobs and actors -----------------------------------------------------------------------------------------------------


def test_a_request_has_the_defaults_of_the_interface() -> None:
    request = JobRequest("job", NOTHING)
    assert (request.max_retries_failure, request.max_retries_preemption) == (0, 100)
    assert (request.priority, request.processes_per_task, request.max_task_failures) == (0, 1, 0)
    assert (request.resources, request.environment, request.replicas) == (ResourceConfig(), None, 1)


def test_replicas_default_to_those_of_the_resources() -> None:
    slices = ResourceConfig.with_tpu("v5litepod-16", slice_count=2)
    assert [job(resources=slices).replicas, job(resources=slices, replicas=1).replicas] == [8, 1]


def test_an_entrypoint_is_a_callable_or_a_program() -> None:
    assert Entrypoint.from_callable(print, args=[1], kwargs={"end": ""}) == Entrypoint(
        callable_entrypoint=CallableEntrypoint(print, (1,), {"end": ""})
    )
    assert Entrypoint.from_binary("ls", ["-l"]) == Entrypoint(binary_entrypoint=BinaryEntrypoint("ls", ("-l",)))
    assert Entrypoint.from_callable(print).binary_entrypoint is None


def test_statuses_are_strings_and_three_are_final() -> None:
    assert [str(status) for status in JobStatus] == ["pending", "running", "succeeded", "failed", "stopped"]
    assert [JobStatus.finished(status) for status in JobStatus] == [False, False, True, True, True]


def test_actors_have_the_defaults_of_the_interface() -> None:
    assert ActorConfig() == ActorConfig(max_concurrency=1, max_restarts=None, max_task_retries=None, priority=0)
    assert ActorConfig(max_restarts=-1).max_restarts == -1


# Environments --------------------------------------------------------------------------------------------------------


def test_an_environment_defaults_to_the_working_directory_and_usual_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = create_environment()
    assert (made.workspace, made.docker_image) == (os.getcwd(), None)
    assert made.env_vars == {"HF_DATASETS_TRUST_REMOTE_CODE": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert (list(made.pip_packages), list(made.extras)) == ([], [])


def test_tokens_are_passed_on_and_the_caller_can_override_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    made = create_environment(
        docker_image="image",
        pip_packages=["numpy"],
        extras=["tpu"],
        env_vars={"TOKENIZERS_PARALLELISM": "true", "WANDB_API_KEY": None, "MINE": "1", "NOT_MINE": None},
    )
    assert (made.workspace, made.docker_image) == (None, "image")
    assert made.env_vars == {
        "HF_DATASETS_TRUST_REMOTE_CODE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "HF_TOKEN": "secret",
        "MINE": "1",
    }
    assert (list(made.pip_packages), list(made.extras)) == (["numpy"], ["tpu"])
