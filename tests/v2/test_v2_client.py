"""Current client, `wait_all`, and the modules in which the names of `fray.v2` are found."""

from __future__ import annotations

import contextvars
import importlib
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

import fray.current_client
import fray.v2
from fray.v2 import (
    ActorContext,
    ActorFuture,
    ActorGroup,
    Client,
    JobAlreadyExists,
    JobFailed,
    JobHandle,
    JobStatus,
    LocalClient,
    LocalJobHandle,
    ResourceConfig,
    create_environment,
    current_client,
    iris_backend,
    set_current_client,
    wait_all,
)
from fray.v2.client import _current_client_var, client_of
from fray.v2.fray import client as fray_backend
from fray.v2.ray_backend import backend as ray_backend

# Current client ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAY_CLIENT_SPEC", raising=False)


def test_without_any_client_each_call_makes_a_localclient() -> None:
    first, second = current_client(), current_client()
    assert isinstance(first, LocalClient)
    assert isinstance(second, LocalClient)
    assert first is not second


def test_set_current_client_sets_and_restores() -> None:
    outer, inner = LocalClient(), object()
    with set_current_client(outer) as given:
        assert given is outer is current_client()
        with pytest.raises(KeyError), set_current_client(inner):
            assert current_client() is inner is _current_client_var.get()
            raise KeyError
        assert current_client() is outer
    assert _current_client_var.get() is None


def test_a_duck_typed_client_comes_back_unchanged() -> None:
    class Wrapper:
        def __init__(self, inner: LocalClient) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    wrapper = Wrapper(LocalClient())
    with set_current_client(wrapper):
        assert current_client() is wrapper


def test_a_set_client_belongs_to_its_context() -> None:
    seen: list[object] = []
    with set_current_client(client := LocalClient()):
        copied = contextvars.copy_context()
        thread = threading.Thread(target=lambda: seen.append(_current_client_var.get()))
        thread.start()
        thread.join()
    assert seen == [None]
    assert copied.run(current_client) is client


@dataclass
class Surroundings:
    """Clusters whose job this code is, as the backends detect them."""

    monkeypatch: pytest.MonkeyPatch
    asked: list[str] = field(default_factory=list)

    def are(self, *, iris: object = None, ray: object = None, fray: object = None) -> None:
        if iris is not None:
            self.monkeypatch.setitem(sys.modules, "iris", SimpleNamespace())
        self.monkeypatch.setattr(iris_backend, "client_of_iris_job", lambda: iris)
        self.monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: ray is not None))
        self.monkeypatch.setattr(ray_backend, "shared_ray_client", lambda spec: ray)
        self.monkeypatch.setattr(fray_backend, "client_of_fray_job", lambda: fray)


def test_order_is_set_client_spec_iris_ray_fray(monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings(monkeypatch)
    iris, ray, fray_, mine = object(), object(), object(), object()
    around.are(fray=fray_)
    assert current_client() is fray_
    around.are(fray=fray_, ray=ray)
    assert current_client() is ray
    around.are(fray=fray_, ray=ray, iris=iris)
    assert current_client() is iris
    monkeypatch.setenv("FRAY_CLIENT_SPEC", "local")
    assert isinstance(current_client(), LocalClient)
    with set_current_client(mine):
        assert current_client() is mine
    monkeypatch.setenv("FRAY_CLIENT_SPEC", "")
    assert current_client() is iris, "an empty spec counts as not set"


@pytest.mark.parametrize(
    ("spec", "module", "maker"),
    [
        ("machine", fray_backend, "shared_fray_client"),
        ("machine?nodes=2&cpu=4", fray_backend, "shared_fray_client"),
        ("fray://host:1234", fray_backend, "shared_fray_client"),
        ("ray", ray_backend, "shared_ray_client"),
        ("iris://host:1234", iris_backend, "shared_iris_client"),
    ],
)
def test_a_spec_selects_its_backend(monkeypatch: pytest.MonkeyPatch, spec: str, module: object, maker: str) -> None:
    monkeypatch.setattr(module, maker, lambda spec: ("made for", spec))
    monkeypatch.setenv("FRAY_CLIENT_SPEC", spec)
    assert current_client() == ("made for", spec)


@pytest.mark.parametrize("spec", ["slurm", "locally", "http://host:1", "machines", "Local"])
def test_an_invalid_spec_is_a_valueerror_that_lists_the_valid_ones(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setenv("FRAY_CLIENT_SPEC", spec)
    with pytest.raises(
        ValueError,
        match=rf"invalid FRAY_CLIENT_SPEC='{spec}'; expected one of local, machine, fray://host:port, ray, iris",
    ):
        current_client()


# Many jobs -----------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """Caller's own handle with ``status()`` and ``job_id``; it ends after a number of calls of ``status``."""

    job_id: str
    end: JobStatus
    looks: int = 0

    def status(self) -> JobStatus:
        self.looks -= 1
        return self.end if self.looks < 0 else JobStatus.RUNNING


def jobs(*ends: tuple[str, int]) -> list[Job]:
    return [Job(f"job-{index}", JobStatus(end), looks) for index, (end, looks) in enumerate(ends)]


def test_wait_all_of_no_jobs_is_empty() -> None:
    assert wait_all([]) == wait_all((), timeout=0) == []


def test_wait_all_returns_statuses_in_the_order_of_the_jobs() -> None:
    waited = jobs(("succeeded", 4), ("stopped", 0), ("failed", 2))
    assert wait_all(waited, raise_on_failure=False) == [JobStatus.SUCCEEDED, JobStatus.STOPPED, JobStatus.FAILED]


@pytest.mark.parametrize("end", [JobStatus.FAILED, JobStatus.STOPPED])
def test_wait_all_raises_at_the_first_failed_or_stopped_job(end: JobStatus) -> None:
    with pytest.raises(JobFailed, match=f"job-1.*{end}") as raised:
        wait_all(jobs(("succeeded", 10**9), (end, 2)))
    assert (raised.value.job_id, raised.value.failed_status) == ("job-1", end)


def test_a_timeout_of_wait_all_names_the_unfinished_jobs() -> None:
    with pytest.raises(
        TimeoutError, match=r"4 of 5 jobs have not ended within 0\.01 s: job-1, job-2, job-3 and 1 more"
    ):
        wait_all(jobs(("succeeded", 0), *[("succeeded", 10**9)] * 4), timeout=0.01)
    assert wait_all(jobs(("succeeded", 0)), timeout=0) == [JobStatus.SUCCEEDED], "it looks before the timeout counts"


def test_errors_are_runtimeerrors_and_pickle_with_their_attributes() -> None:
    failed = pickle.loads(pickle.dumps(JobFailed("job-1", JobStatus.STOPPED)))
    assert isinstance(failed, RuntimeError)
    assert (failed.job_id, failed.failed_status, str(failed)) == ("job-1", JobStatus.STOPPED, "job job-1 stopped")
    exists = pickle.loads(pickle.dumps(JobAlreadyExists("tokenize")))
    assert isinstance(exists, RuntimeError)
    assert (exists.job_name, exists.handle) == ("tokenize", None)
    assert "'tokenize' exists already: pass adopt_existing=True" in str(exists)


# Names and signatures ------------------------------------------------------------------------------------------------

SIGNATURES = {
    Client.submit: "self, request, adopt_existing=True",
    Client.shutdown: "self, wait=True",
    LocalClient.create_actor: "self, actor_class, *args, name, resources=…, actor_config=…, **kwargs",
    LocalClient.create_actor_group: "self, actor_class, *args, name, count, resources=…, actor_config=…, **kwargs",
    LocalClient.host_actor: "self, actor_class, *args, name, actor_config=…, **kwargs",
    LocalClient.submit: "self, request, adopt_existing=True",
    LocalClient.shutdown: "self, wait=True",
    LocalClient.__init__: "self, max_threads=8",
    wait_all: "jobs, *, timeout=None, raise_on_failure=True",
    JobHandle.wait: "self, timeout=None, *, raise_on_failure=True",
    LocalJobHandle.wait: "self, timeout=None, *, raise_on_failure=True",
    ActorFuture.result: "self, timeout=None",
    ActorGroup.wait_ready: "self, count=None, timeout=300.0",
    ActorContext.__init__: "self, handle, index, group_name, shutdown_event=None, *, terminate=None, fail=None",
    create_environment: "workspace=None, docker_image=None, pip_packages=None, env_vars=None, extras=None",
    ResourceConfig.with_gpu: "gpu_type='auto', count=1, **kwargs",
    ResourceConfig.with_tpu: "tpu_type, slice_count=1, **kwargs",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures_are_those_of_the_interface(function: Callable[..., object]) -> None:
    found = inspect.signature(function)
    plain = [value.replace(annotation=inspect.Parameter.empty) for value in found.parameters.values()]
    plain = [
        value.replace(default=Ellipsis) if value.name in ("resources", "actor_config") else value for value in plain
    ]
    signature = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    assert signature.replace("Ellipsis", "…") == f"({SIGNATURES[function]})"


TYPES = """
ActorConfig BinaryEntrypoint CallableEntrypoint CpuConfig DeviceConfig DeviceKind Entrypoint EnvironmentConfig GpuConfig
GpuType JobRequest JobStatus ResourceConfig TpuConfig TpuTopologyInfo TpuType create_environment get_tpu_topology
"""
CLIENT = "Client JobHandle JobStatus JobFailed JobAlreadyExists wait_all current_client set_current_client"
ACTOR = "ActorContext ActorFuture ActorGroup ActorHandle ActorMethod HostedActor current_actor"
LOCAL = "LocalClient LocalJobHandle LocalActorHandle LocalActorMethod"
MODULES = {"types": TYPES, "client": CLIENT, "actor": ACTOR, "local_backend": LOCAL}
PRIVATE = {"client": ["_current_client_var"], "actor": ["_set_current_actor", "_reset_current_actor"]}


def test_fray_v2_has_the_names_its_callers_use() -> None:
    assert {name for names in MODULES.values() for name in names.split()} <= set(fray.v2.__all__)
    assert all(hasattr(fray.v2, name) for name in fray.v2.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_the_modules_have_the_same_objects(module: str) -> None:
    found = importlib.import_module(f"fray.v2.{module}")
    assert all(getattr(found, name) is getattr(fray.v2, name) for name in MODULES[module].split())
    assert all(hasattr(found, name) for name in PRIVATE.get(module, ()))


@pytest.mark.parametrize("variable", ["IRIS_TASK_ID", "IRIS_JOB_ID"])
def test_a_job_of_iris_that_cannot_import_iris_gets_an_error_and_no_threads(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "iris", None)
    monkeypatch.setenv(variable, "/someone/job/0")
    for find in (current_client, fray.current_client.current_client):
        with pytest.raises(RuntimeError, match=rf"{variable} says that this process is a job of Iris.*marin-iris"):
            find()
    monkeypatch.setenv("FRAY_CLIENT_SPEC", "local")
    assert isinstance(current_client(), LocalClient)


def test_without_iris_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iris.client", None)
    with pytest.raises(RuntimeError, match="Iris is not installed here"):
        client_of("iris://localhost:1")
