"""The `Runtime` value: the place of one process (in `local`: of one job) in a cluster, and how code finds its own.

This module is a leaf. A `Runtime` knows the parts below it (the controller client, the caller); the parts above it
(the actor host, exported objects, the public API) attach themselves under a `ServiceKey`. `fray.runtime.open` opens
runtimes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import trio
from attrs import define, field, frozen

from fray.errors import FrayError
from fray.model.environment import EnvironmentSpec
from fray.model.ids import AttemptId, BlobId, JobId, Namespace, SessionId
from fray.model.messages.client import Role
from fray.model.service_key import ServiceKey
from fray.net.transport import Network
from fray.runtime.calls.caller import Caller
from fray.runtime.controller_client.client import ControllerClient
from fray.runtime.services import Services


@frozen(eq=False)
class Connections:
    """Connections of a runtime to the rest of the cluster; its background tasks keep them up."""

    network: Network
    client: ControllerClient
    caller: Caller


CONNECTIONS: ServiceKey[Connections] = ServiceKey("connections")


@define(eq=False)
class Runtime:
    """One place in a cluster, valid between enter and exit of `fray.runtime.open.open_runtime`."""

    session: SessionId
    role: Role
    rng: random.Random
    nursery: trio.Nursery
    job_id: JobId | None = None
    job_name: str = ""
    attempt_id: AttemptId | None = None
    node: str = ""
    namespace: Namespace = ""
    user: str = ""
    """User that runs the driver; of a job, the user that submitted it."""
    address: str = ""
    """Address of the controller, as ``FRAY_CLUSTER_ADDRESS`` gives it."""
    bundle: BlobId = ""
    """Workspace bundle that this job runs in; the default for its child jobs."""
    workspace: str = ""
    """Directory of that workspace."""
    environment: EnvironmentSpec = field(factory=EnvironmentSpec)
    """Environment of this job; child jobs that name no packages inherit its packages."""
    find_workspace: Callable[[str], Awaitable[Any]] | None = None
    """Function that makes a bundle of a directory; None: `fray.runtime.workspaces.upload` reads the directory."""
    token: trio.lowlevel.TrioToken = field(factory=trio.lowlevel.current_trio_token)
    """Entry into the loop this runtime lives in, for other threads."""
    services: Services = field(factory=Services)
    """The connections, and services of the parts above this module, such as the actor host and the API's `Cluster`."""
    has_left: bool = False
    """Flag: this runtime has left the cluster; what is made from now on is closed."""

    # A job that uses neither the controller nor actors never has connections, and pays nothing for them.

    @property
    def network(self) -> Network:
        """The network of this runtime, which carries ``relay:`` addresses over the controller."""
        return self.services[CONNECTIONS].network

    @property
    def client(self) -> ControllerClient:
        """The client of the controller."""
        return self.services[CONNECTIONS].client

    @property
    def caller(self) -> Caller:
        """All outgoing actor calls."""
        return self.services[CONNECTIONS].caller


# A context variable, since in `local` many jobs share one process, each with a runtime of its own.
runtime_var: ContextVar[Runtime | None] = ContextVar("fray_runtime", default=None)
"""Runtime of the running code; None in a thread that Fray did not start, see `set_process_runtime`."""
_process_runtime: Callable[[], Runtime] | None = None
# References may be unpickled before a cluster is open: in a payload, or at the start of a driver.
_open_callbacks: deque[Callable[[Runtime], object]] = deque()


def current() -> Runtime:
    """Return the runtime of the running code.

    Raises:
        FrayError: neither in `open_cluster` nor in a job.
    """
    runtime = find()
    if runtime is not None:
        return runtime
    raise FrayError(
        "no cluster here: run inside `async with fray.open_cluster()`, or in a job that Fray started",
        reason="no cluster",
    )


def current_or_none() -> Runtime | None:
    """Return the runtime of the running code, without starting one."""
    return runtime_var.get()


def find() -> Runtime | None:
    """Return the runtime of the running code, or of the job that owns this process (started now if needed), or None."""
    runtime = runtime_var.get()
    return runtime if runtime is not None or _process_runtime is None else _process_runtime()


def set_current(runtime: Runtime) -> None:
    """Make `current` return ``runtime`` in this context; for a task that works on behalf of another thread."""
    runtime_var.set(runtime)


def set_process_runtime(provider: Callable[[], Runtime] | None) -> None:
    """Set how threads and code outside Fray's tasks find the runtime; in the process of a job."""
    global _process_runtime
    _process_runtime = provider


def on_next_runtime(callback: Callable[[Runtime], object]) -> None:
    """Call ``callback`` in the loop of the next runtime that opens; for what was unpickled before there was one."""
    _open_callbacks.append(callback)


def notify_opened(runtime: Runtime) -> None:
    """Run the callbacks of `on_next_runtime`. In the loop of ``runtime``."""
    # A callback may unpickle more references, which register further callbacks.
    while _open_callbacks:
        _open_callbacks.popleft()(runtime)
