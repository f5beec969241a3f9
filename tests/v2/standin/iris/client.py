"""Client library: jobs, and the context of a job."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import cloudpickle

from iris.cluster.types import Constraint, Entrypoint, EnvironmentSpec, ResourceSpec
from iris.controller import KEY, OVER
from iris.rpc import cluster_pb2 as pb


class JobAlreadyExists(Exception):
    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.job_id} exists")
        self.job = job


class JobFailedError(Exception):
    """A job did not succeed."""


class _Requester:
    """Connection to the controller."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = Client((host, int(port)), authkey=KEY)
        self._lock = threading.Lock()

    def ask(self, *question: Any) -> Any:
        with self._lock:
            self._connection.send(question)
            well, answer = self._connection.recv()
        if not well:
            raise answer
        return answer


@dataclass
class JobStatus:
    state: int
    error: str


class Job:
    def __init__(self, client: IrisClient, job_id: str) -> None:
        self._asker = client._asker
        self.job_id = job_id

    @property
    def state(self) -> int:
        return self.status().state

    def status(self) -> JobStatus:
        return JobStatus(*self._asker.ask("status", self.job_id))

    def wait(self, timeout: float = 300.0, poll_interval: float = 0.01, *, raise_on_failure: bool = True) -> JobStatus:
        until = time.monotonic() + timeout
        while (status := self.status()).state not in OVER:
            if time.monotonic() > until:
                raise TimeoutError(f"job {self.job_id} has not ended within {timeout} s")
            time.sleep(poll_interval)
        if raise_on_failure and status.state != pb.JOB_STATE_SUCCEEDED:
            raise JobFailedError(f"job {self.job_id}: {status.error}")
        return status

    def terminate(self) -> None:
        self._asker.ask("terminate", self.job_id)

    def logs(self) -> list[str]:
        return self._asker.ask("logs", self.job_id).splitlines(keepends=True)


class Registry:
    """Registers names of actors of a job."""

    def __init__(self, asker: _Requester, job_id: str) -> None:
        self._asker, self._job_id = asker, job_id

    def register(self, name: str, address: str, metadata: dict[str, str] | None = None) -> None:
        self._asker.ask("register", self._job_id, name, address)

    def unregister(self, name: str) -> None:
        self._asker.ask("unregister", self._job_id, name)


@dataclass
class ResolveResult:
    name: str
    addresses: list[str]

    @property
    def is_empty(self) -> bool:
        return not self.addresses


class Resolver:
    """Resolves names to addresses in the namespace of a job."""

    def __init__(self, asker: _Requester, job_id: str) -> None:
        self._asker, self._job_id = asker, job_id

    def resolve(self, name: str) -> ResolveResult:
        found = self._asker.ask("resolve", self._job_id, name)
        return ResolveResult(name, [found] if found else [])


class IrisClient:
    def __init__(self, address: str, workspace: Path | None) -> None:
        self.address, self.workspace = address, workspace
        self._asker = _Requester(address)

    @classmethod
    def remote(cls, controller_address: str, *, workspace: Path | None = None) -> IrisClient:
        return cls(controller_address, workspace)

    def submit(
        self,
        entrypoint: Entrypoint,
        name: str,
        resources: ResourceSpec,
        environment: EnvironmentSpec | None = None,
        ports: Sequence[str] | None = None,
        constraints: Sequence[Constraint] | None = None,
        max_retries_failure: int = 0,
        max_retries_preemption: int = 100,
    ) -> Job:
        context = get_iris_ctx()
        spec = {
            "name": name,
            "entrypoint": cloudpickle.dumps(entrypoint),
            "resources": resources,
            "environment": environment,
            "env_vars": dict(environment.env_vars or {}) if environment else {},
            "ports": list(ports or ()),
            "constraints": list(constraints or ()),
            "max_retries_failure": max_retries_failure,
            "max_retries_preemption": max_retries_preemption,
        }
        new, job_id = self._asker.ask("submit", context.job_id if context else "", spec)
        if not new:
            raise JobAlreadyExists(Job(self, job_id))
        return Job(self, job_id)

    def resolver_for_job(self, job_id: str) -> Resolver:
        return Resolver(self._asker, job_id)

    def shutdown(self, wait: bool = True) -> None:
        pass


# In a job ------------------------------------------------------------------------------------------------------------


@dataclass
class IrisContext:
    job_id: str
    client: IrisClient
    ports: dict[str, int]

    def get_port(self, name: str) -> int:
        return self.ports[name]

    @property
    def registry(self) -> Registry:
        return Registry(self.client._asker, self.job_id)

    @property
    def resolver(self) -> Resolver:
        return self.client.resolver_for_job(self.job_id)


_context: IrisContext | None = None


def get_iris_ctx() -> IrisContext | None:
    """Return the context of this process's job; None outside."""
    global _context
    if _context is None and "IRIS_JOB_ID" in os.environ:
        names = [name for name in os.environ.get("IRIS_PORTS", "").split(",") if name]
        client = IrisClient.remote(os.environ["IRIS_CONTROLLER"])
        _context = IrisContext(os.environ["IRIS_JOB_ID"], client, {name: _free_port() for name in names})
    return _context


def iris_ctx() -> IrisContext:
    context = get_iris_ctx()
    if context is None:
        raise RuntimeError("not in a job of Iris")
    return context


@contextmanager
def as_job(address: str, job_id: str) -> Iterator[IrisContext]:
    """Let this process act as a job in the ``with`` block, for tests."""
    global _context
    before, _context = _context, IrisContext(job_id, IrisClient.remote(address), {"actor": _free_port()})
    try:
        yield _context
    finally:
        _context = before


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
