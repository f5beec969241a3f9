"""`LocalClient`: jobs and actors as threads of this process, for tests and laptops.

It is direct on purpose: callables and arguments are never pickled, what a job changes is seen by its submitter, and
each call of an actor begins at once in a thread of its own. Nothing can be killed, so nothing is: `terminate` marks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextvars import Context, copy_context
from typing import Any

from fray.v2 import programs
from fray.v2.actor import ActorContext, HostedActor, _reset_current_actor, _set_current_actor
from fray.v2.job import JobStatus
from fray.v2.threads import JobThreads, begin
from fray.v2.types import ActorConfig, BinaryEntrypoint, Entrypoint, JobRequest, ResourceConfig

log = logging.getLogger("fray.v2")

# Jobs ----------------------------------------------------------------------------------------------------------------


class LocalJobHandle:
    """A job of this process: ``job_id`` and the future of its thread. See `fray.v2.JobHandle`.

    Args:
        future: of what the job does; cancelled, it never begins.
        output: a binary's output so far.
        kill: ends it, where that can be.
    """

    def __init__(
        self,
        job_id: str,
        future: Future[Any],
        *,
        output: Callable[[], str] | None = None,
        kill: Callable[[], None] | None = None,
    ) -> None:
        self._job_id, self._future = job_id, future
        self._output, self._kill = output, kill
        self._terminated = threading.Event()

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        """STOPPED from `terminate` on, whatever comes; RUNNING also while it waits for a thread."""
        if self._terminated.is_set() or self._future.cancelled():
            return JobStatus.STOPPED
        if not self._future.done():
            return JobStatus.RUNNING
        return JobStatus.SUCCEEDED if self._future.exception() is None else JobStatus.FAILED

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait until its code has ended, also after `terminate`. As `fray.v2.JobHandle.wait`."""
        wait([self._future], timeout)
        if not raise_on_failure:
            return self.status()
        if not self._future.done():
            raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s")
        try:
            self._future.result()
        except CancelledError:
            pass
        return self.status()

    def terminate(self) -> None:
        """Mark it STOPPED. A queued job never starts, a program is ended; a function that runs goes on."""
        self._terminated.set()
        if not self._future.cancel() and self._kill is not None:
            self._kill()

    def logs(self) -> str:
        """What a program has printed. What a function prints goes where this process prints: empty."""
        return "" if self._output is None else self._output()

    def __repr__(self) -> str:
        return f"<LocalJobHandle {self._job_id} {self.status().value}>"


# Actors --------------------------------------------------------------------------------------------------------------

_registry: dict[str, _LocalActor] = {}
"""Of the whole process: whoever was made last under a name answers to it."""


class _LocalActor:
    """One instance, and the context in which its code runs: that of its creator, with itself as current actor."""

    def __init__(self, name: str, group: str, index: int) -> None:
        self.name = name
        self.made = threading.Event()
        self.instance: Any = None
        self._maker = threading.get_ident()
        self.handle = LocalActorHandle(name)
        self.about = ActorContext(self.handle, index, group, terminate=self.end)
        self._context = copy_context()
        self._context.run(_set_current_actor, self.about)

    def make(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalActorHandle:
        """Construct it, here and now; its name answers from before, so that the constructor can give itself away."""
        before = _registry.get(self.name)
        _registry[self.name] = self
        try:
            self.instance = self.context().run(cls, *args, **kwargs)
        except BaseException:
            self.end()
            if before is not None and self.name not in _registry:
                _registry[self.name] = before
            raise
        finally:
            self.made.set()
        return self.handle

    def context(self) -> Context:
        return self._context.copy()

    def end(self) -> None:
        """Its name answers no more, unless somebody else has it now. Calls that run go on."""
        self.about.shutdown_event.set()
        if _registry.get(self.name) is self:
            _registry.pop(self.name, None)

    def method(self, name: str) -> Callable[..., Any]:
        if not self.made.is_set() and threading.get_ident() != self._maker:
            self.made.wait()
        if self.instance is None:
            raise _dead(self.name)
        found = getattr(self.instance, name)
        if not callable(found):
            raise AttributeError(f"{name!r} of actor {self.name!r} is no method, and only methods can be called")
        return found  # type: ignore[no-any-return]


def _dead(name: str) -> RuntimeError:
    return RuntimeError(f"actor {name!r} is not there: it has ended, or was never made")


class LocalActorMethod:
    """A method of an actor of this process."""

    def __init__(self, actor: _LocalActor, name: str, method: Callable[..., Any]) -> None:
        self._actor, self._name, self._method = actor, name, method

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin the call in a thread of its own, at once."""
        return begin(self._actor.context(), f"{self._actor.name}.{self._name}", self._method, *args, **kwargs)

    submit = remote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _set_current_actor(self._actor.about)
        try:
            return self._method(*args, **kwargs)
        finally:
            _reset_current_actor(token)


class LocalActorHandle:
    """An actor of this process, by name. Raises RuntimeError at access when it is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method_name: str) -> LocalActorMethod:
        if method_name.startswith("_"):
            raise AttributeError(f"{method_name!r}: names with a leading underscore are not for others to call")
        actor = _registry.get(self._name)
        if actor is None:
            raise _dead(self._name)
        return LocalActorMethod(actor, method_name, actor.method(method_name))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalActorHandle, (self._name,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalActorHandle) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"LocalActorHandle({self._name!r})"


class LocalActorGroup:
    """Members that are all there from the beginning. As `fray.v2.ActorGroup`."""

    def __init__(self, actors: list[_LocalActor]) -> None:
        self._actors = actors
        self._jobs = [_ActorJob(actor) for actor in actors]
        self._given: set[int] = set()

    @property
    def ready_count(self) -> int:
        return len(self._actors)

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[LocalActorHandle]:
        wanted = len(self._actors) if count is None else count
        if wanted > len(self._actors):
            raise TimeoutError(f"{wanted} members will not be ready: there are {len(self._actors)}")
        self._given.update(range(wanted))
        return [actor.handle for actor in self._actors[:wanted]]

    def discover_new(self) -> list[LocalActorHandle]:
        new = [index for index in range(len(self._actors)) if index not in self._given]
        self._given.update(new)
        return [self._actors[index].handle for index in new]

    def is_done(self) -> bool:
        return all(JobStatus.finished(status) for status in self.statuses())

    @property
    def jobs(self) -> list[LocalJobHandle]:
        return list(self._jobs)

    def statuses(self) -> list[JobStatus]:
        return [job.status() for job in self._jobs]

    def shutdown(self) -> None:
        for job in self._jobs:
            job.terminate()


class _ActorJob(LocalJobHandle):
    """The job that an actor would be on a cluster."""

    def __init__(self, actor: _LocalActor) -> None:
        super().__init__(actor.name, Future())
        self._actor = actor

    def terminate(self) -> None:
        super().terminate()
        self._actor.end()


# The client ----------------------------------------------------------------------------------------------------------

_numbers = itertools.count()


class LocalClient:
    """Jobs and actors as threads of this process; see `fray.v2.Client`.

    Args:
        max_threads: jobs that run at once; others wait their turn. Calls of actors have threads of their own.
    """

    def __init__(self, max_threads: int = 8) -> None:
        self._threads = JobThreads(max_threads)
        self._jobs: list[Future[Any]] = []
        self._closed = False

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> LocalJobHandle:
        """Run it once in a thread, in a copy of this code's context. Resources, environment, replicas and retries are
        of no effect here, and one name twice is two jobs."""
        if self._closed:
            raise RuntimeError("this LocalClient was shut down: make another")
        job_id = f"local-{request.name}-{next(_numbers)}"
        entrypoint: Entrypoint = request.entrypoint
        if entrypoint is not None and entrypoint.binary_entrypoint is not None:
            handle = self._program(job_id, entrypoint.binary_entrypoint)
        elif entrypoint is not None and (call := entrypoint.callable_entrypoint) is not None:
            work = lambda: call.callable(*call.args, **call.kwargs)  # noqa: E731
            handle = LocalJobHandle(job_id, self._threads.submit(copy_context(), work, job_id))
        else:
            raise ValueError(
                f"job {request.name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one"
            )
        self._jobs = [job for job in self._jobs if not job.done()] + [handle._future]
        return handle

    def _program(self, job_id: str, entry: BinaryEntrypoint) -> LocalJobHandle:
        program = programs.Program(job_id, [entry.command, *entry.args])
        future = self._threads.submit(copy_context(), program.run, job_id)
        return LocalJobHandle(job_id, future, output=program.output, kill=program.kill)

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 (as callers read the signature)
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> LocalActorHandle:
        """Construct it here and now; what the constructor raises comes out."""
        return _LocalActor(name, name, 0).make(actor_class, args, kwargs)

    def create_actor_group(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> LocalActorGroup:
        """Construct them one after another, here; when one fails, those before it end, and its error comes out."""
        actors: list[_LocalActor] = []
        try:
            for index in range(count):
                actors.append(_LocalActor(f"{name}-{index}", name, index))
                actors[-1].make(actor_class, args, kwargs)
        except BaseException:
            for actor in actors:
                actor.end()
            raise
        return LocalActorGroup(actors)

    def host_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor:
        """As `create_actor`, with an end."""
        actor = _LocalActor(name, name, 0)
        return HostedActor(actor.make(actor_class, args, kwargs), actor.end)

    def shutdown(self, wait: bool = True) -> None:
        """Take no more jobs, and wait for those that run. Actors outlive it."""
        self._closed = True
        for job in self._jobs if wait else ():
            if not job.cancelled():
                job.exception()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
