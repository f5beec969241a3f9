"""Actors on Iris: each in a job of its own that registers its name; handles and groups of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from fray.errors import ActorUnavailableError
from fray.threads import call_in_thread
from fray.tracebacks import short_traceback
from fray.v2.interface import ActorContext, ActorHandle, _set_current_actor, _set_process_actor
from fray.v2.iris.convert import iris_client, iris_connection
from fray.v2.iris.jobs import HostingJob, IrisJobHandle
from fray.v2.job import JobHandle, JobStatus, refuse_async

PORT = "actor"
"""Name of the port of jobs that host actors."""
FIRST_LOOK_S = 0.02
"""Seconds between the first looks for an answer of an operation; doubled each time, up to its interval."""
LOOKS = 5
"""Attempts to fetch an answer, with pauses of 0.5 s and more, before its call counts as lost."""
POLL_S = 0.02
"""Seconds between two looks for an actor that is not registered yet."""
FIRST_WAIT_S, NEXT_WAIT_S = 60.0, 5.0
"""Seconds that a handle without a job waits for an actor: before it has seen the actor, and after."""


class _ActorService:
    """Service that is registered for an actor. It returns the errors of calls as values, so that an exception of Iris's
    client always means a failure of the connection."""

    def __init__(self, instance: Any, about: ActorContext) -> None:
        self._instance, self._about = instance, about
        if hasattr(instance, "web_application"):  # served by Iris's server beside the calls
            self.web_application = instance.web_application

    def fray_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        context = copy_context()
        try:
            found = getattr(self._instance, method)
            if method.startswith("_") or not callable(found):
                raise AttributeError(f"{method!r} is not a public method")
            refuse_async(found, f"method {method!r}")
            return True, context.run(_as_actor, self._about, found, args, kwargs)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            return False, error


def _as_actor(about: ActorContext, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _set_current_actor(about)
    return fn(*args, **kwargs)


def endpoint_of(job_id: Any, name: str) -> str:
    """Return the name under which the actor of a job is registered: absolute, so that every job and driver finds it."""
    return f"{job_id}/{name}"


def serve(
    cls: type, args: Any, kwargs: Any, name: str, group: str, index: int, port: int, concurrency: int
) -> tuple[Callable[[], None], ActorContext]:
    """Make and serve an actor; register it once it is made. Raises what its constructor raises.

    Returns:
        What ends it, and what it knows about itself.
    """
    from iris.actor.server import ActorServer
    from iris.cluster.client.job_info import get_job_info

    context = iris_client().iris_ctx()
    endpoint = endpoint_of(context.job_id, name)
    about = ActorContext(IrisActorHandle(endpoint, methods=methods_of(cls)), index, group)
    instance = copy_context().run(_as_actor, about, cls, args, kwargs)
    # Callers are on other machines.
    server = ActorServer(host="0.0.0.0", port=port, max_concurrency=concurrency)
    server.register(endpoint, _ActorService(instance, about))
    bound = server.serve_background()
    # After the server listens: a caller may use the address at once.
    registered = context.registry.register(endpoint, f"http://{get_job_info().advertise_host}:{bound}")

    def stop() -> None:
        context.registry.unregister(registered)
        server.stop()

    return stop, about


def host_actor_job(cls: type, args: Any, kwargs: Any, name: str, group: str, index: int, concurrency: int) -> None:
    """Serve an actor until the job is ended or the actor ends itself; the entrypoint of an actor's job.

    Raises:
        BaseException: the error with which the actor has failed.
    """
    port = iris_client().iris_ctx().get_port(PORT)
    stop, about = serve(cls, args, kwargs, name, group, index, port, concurrency)
    _set_process_actor(about)
    about.shutdown_event.wait()
    stop()
    if about._errors:
        raise about._errors[0]


def methods_of(cls: type) -> frozenset[str]:
    """Return the names of the public methods of a class."""
    return frozenset(name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name)))


class IrisActorHandle:
    """Reference to an actor on Iris, which pickles to the actor's name. See `fray.v2.ActorHandle`.

    Args:
        endpoint_name: name under which the actor is registered, ``/user/job/actor``.
        resolver: Iris's resolver of such names. Default: that of ``job``, or of the context where it is used.
        methods: names of the methods, if the class is known.
        job: job that hosts the actor, if this process has submitted it.
    """

    def __init__(
        self,
        endpoint_name: str,
        resolver: Any = None,
        *,
        methods: frozenset[str] | None = None,
        job: HostingJob | None = None,
    ) -> None:
        self._endpoint_name, self._methods, self._job = endpoint_name, methods, job
        self._resolver = job.resolver if job is not None and resolver is None else resolver
        self._found: tuple[Any, Any] | None = None
        self._seen = False

    @short_traceback
    def __getattr__(self, method_name: str) -> IrisActorMethod:
        if method_name.startswith("_") or (self._methods is not None and method_name not in self._methods):
            raise AttributeError(f"actor {self._endpoint_name!r} has no method {method_name!r}")
        return IrisActorMethod(self, method_name)

    def _connection(self) -> tuple[Any, Any]:
        """Return resolver and client: of the client that made the actor; else of this job, or of this process."""
        if self._found is None:
            from iris.actor.client import ActorClient
            from iris.cluster.types import JobName

            job_id = JobName.from_string(self._endpoint_name.rpartition("/")[0])
            resolver = self._resolver
            if resolver is None:
                resolver = iris_connection().resolver_for_job(job_id)
            # One attempt: a call whose connection broke may have run.
            self._found = resolver, ActorClient(resolver, self._endpoint_name, max_call_attempts=1)
        return self._found

    def _is_registered(self) -> bool:
        return not self._connection()[0].resolve(self._endpoint_name).is_empty

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._wait_registered()
        with self._unavailable():
            answer = self._connection()[1].fray_call(method, args, kwargs)
        return _answer(answer)

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperationFuture:
        from iris.actor.client import ActorClient

        self._wait_registered()
        resolver, client = self._connection()
        with self._unavailable():
            operation = client.start_operation("fray_call", method, args, kwargs)
        # To look for the answer again does no harm.
        return OperationFuture(ActorClient(resolver, self._endpoint_name, max_call_attempts=LOOKS), operation)

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        from connectrpc.errors import ConnectError

        # The service returns errors of methods as values: an error of the protocol is one of the connection.
        try:
            yield
        except (ConnectError, OSError) as error:
            raise ActorUnavailableError(f"actor {self._endpoint_name!r} does not answer: {error}") from error

    def _wait_registered(self) -> None:
        """Wait until the name is registered. Raises ActorUnavailableError: the actor's job has ended, or no job
        registers it."""
        until = time.monotonic() + (NEXT_WAIT_S if self._seen else FIRST_WAIT_S)
        while not self._is_registered():
            if self._job is not None:
                if JobStatus.finished(self._job.status()):
                    raise ActorUnavailableError(f"actor {self._endpoint_name!r} has ended: {self._job.why()}")
            elif time.monotonic() > until:
                raise ActorUnavailableError(
                    f"actor {self._endpoint_name!r} {'has ended' if self._seen else 'is not there'}"
                )
            time.sleep(POLL_S)
        self._seen = True

    def __reduce__(self) -> tuple[Any, ...]:
        return IrisActorHandle, (self._endpoint_name,)

    def __repr__(self) -> str:
        return f"IrisActorHandle({self._endpoint_name!r})"


def _answer(answer: tuple[bool, Any]) -> Any:
    """Return what the method returned, or raise what it raised; see `_ActorService.fray_call`."""
    succeeded, value = answer
    if not succeeded:
        raise value
    return value


class OperationFuture:
    """Answer of a call that Iris's server holds until it is fetched, so that no connection lasts as long as the call.

    Args:
        client: Iris's client of the actor.
        operation_id: of the call that was started.
        poll_interval: seconds between two looks for the answer.
    """

    def __init__(self, client: Any, operation_id: str, poll_interval: float = 1.0) -> None:
        self._client, self._operation_id, self._poll_interval = client, operation_id, poll_interval
        self._last: tuple[bool, Any] | None = None
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer. See `fray.v2.ActorFuture.result`; the call continues after a timeout.

        Raises:
            ActorUnavailableError: the actor cannot be reached, or has restarted and lost the call.
        """
        until = None if timeout is None else time.monotonic() + timeout
        pause = min(FIRST_LOOK_S, self._poll_interval)
        # The server forgets an answer once it was fetched: one thread fetches it, for all.
        while (answer := self._fetched()) is None:
            left = pause if until is None else until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"operation {self._operation_id} has not ended within {timeout:g} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, self._poll_interval)
        return _answer(answer)

    def _fetched(self) -> tuple[bool, Any] | None:
        with self._lock:
            if self._last is None:
                self._last = self._fetch()
            return self._last

    def _fetch(self) -> tuple[bool, Any] | None:
        from connectrpc.errors import ConnectError
        from iris.actor.client import unwrap_actor_response
        from iris.rpc.actor_pb2 import ActorResponse, Operation

        try:
            found = self._client.poll_operation_status(self._operation_id)
        except (ConnectError, OSError) as error:
            raise ActorUnavailableError(f"operation {self._operation_id} is lost: {error}") from error
        if found.state in (Operation.PENDING, Operation.RUNNING):
            return None
        if found.state == Operation.SUCCEEDED:
            answer: tuple[bool, Any] = unwrap_actor_response(ActorResponse(serialized_value=found.serialized_result))
            return answer
        text = found.error.message or "cancelled"
        return False, RuntimeError(f"operation {self._operation_id} has no answer: {text}")


class IrisActorMethod:
    """Method of an actor on Iris."""

    __slots__ = ("_handle", "_method")

    def __init__(self, handle: IrisActorHandle, method: str) -> None:
        self._handle, self._method = handle, method

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the call, in a thread because Iris's call blocks."""
        name = f"{self._handle._endpoint_name}.{self._method}"
        return call_in_thread(copy_context(), name, self._handle._call, self._method, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> OperationFuture:
        """Start a call that may last longer than a connection; return once the actor has it."""
        return self._handle._start(self._method, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handle._call(self._method, args, kwargs)


class IrisActorGroup:
    """Actors on Iris, each in a separate job. See `fray.v2.ActorGroup`."""

    def __init__(self, handles: list[IrisActorHandle], jobs: list[IrisJobHandle]) -> None:
        self._handles, self._jobs = handles, jobs
        self._returned: set[int] = set()

    @property
    def _job_id(self) -> str:
        """Id of the first member's job; see `fray.v2.fray.groups`."""
        return self._jobs[0].job_id if self._jobs else ""

    @property
    def _ready(self) -> list[int]:
        return [index for index, handle in enumerate(self._handles) if handle._is_registered()]

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        """Wait for members. See `fray.v2.ActorGroup.wait_ready`."""
        wanted = len(self._handles) if count is None else count
        until = time.monotonic() + timeout
        while len(ready := self._ready) < wanted:
            ended = [job for job in self._jobs if JobStatus.finished(job.status())]
            if len(self._jobs) - len(ended) < wanted:
                why = "; ".join(f"{job.job_id}: {job.why()}" for job in ended[:3])
                raise RuntimeError(f"{len(ended)} of {len(self._jobs)} members have ended: {why}")
            if time.monotonic() > until:
                raise TimeoutError(f"{len(ready)} of {wanted} members are there after {timeout:g} s")
            time.sleep(POLL_S)
        chosen = ready[:wanted]
        self._returned.update(chosen)
        return [self._handles[index] for index in chosen]

    def discover_new(self, target: int | None = None) -> list[ActorHandle]:
        new = [index for index in self._ready if index not in self._returned]
        new = new if target is None else new[: max(0, target - len(self._returned))]
        self._returned.update(new)
        return [self._handles[index] for index in new]

    def is_done(self) -> bool:
        return all(map(JobStatus.finished, self.statuses()))

    @property
    def jobs(self) -> list[JobHandle]:
        return list(self._jobs)

    def statuses(self) -> list[JobStatus]:
        return [job.status() for job in self._jobs]

    def shutdown(self) -> None:
        """End the jobs of all members with their running calls: Iris kills the containers."""
        for job in self._jobs:
            if not JobStatus.finished(job.status()):
                job.terminate()

    def __reduce__(self) -> tuple[Any, ...]:
        return IrisActorGroup, (self._handles, self._jobs)
