"""`LocalClient`: jobs and actors as threads of this process, for tests and laptops.

Callables and arguments are never pickled, so a submitter sees what its job changes, and each call of an actor starts at
once in its own thread: callers rely on both. Threads cannot be killed, so `terminate` only marks a running function.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from fray.errors import ActorUnavailableError
from fray.missing_names import V2_CLIENT_LINES, ExplainsMissing
from fray.threads import BoundedThreads, call_in_thread, lock_timeout
from fray.tracebacks import short_traceback, short_tracebacks
from fray.type_variables import A_co, P, T_co
from fray.v2 import subprocesses
from fray.v2.interface import (
    ActorContext,
    ActorHandle,
    HostedActor,
    _current_actor_var,
    _reset_current_actor,
    _set_current_actor,
    take_environment,
)
from fray.v2.job import JobHandle, JobStatus, output_of, refuse_async
from fray.v2.types import ActorConfig, CallableEntrypoint, Entrypoint, JobRequest, ResourceConfig, check_request

T = TypeVar("T")

# Jobs ----------------------------------------------------------------------------------------------------------------


@short_tracebacks
class LocalJobHandle:
    """Job of this process: ``job_id`` and the future of its thread. See `fray.v2.JobHandle`.

    Args:
        future: result of the job; if it is cancelled, the job never starts.
        output: returns a program's output so far.
        kill: ends the job, if that is possible.
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
        self._stopped, self._process = False, os.getpid()

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        """Return the status: STOPPED after `terminate` for good; RUNNING also while the job waits for a thread.

        Raises:
            RuntimeError: the job runs in the process from which this one was forked, which cannot see its end.
        """
        if self._stopped or self._future.cancelled():
            return JobStatus.STOPPED
        if not self._future.done():
            self._check_process()
            return JobStatus.RUNNING
        return JobStatus.SUCCEEDED if self._future.exception() is None else JobStatus.FAILED

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait until the code has ended, also after `terminate`. See `fray.v2.JobHandle.wait`; STOPPED does not
        raise."""
        if not self._future.done():
            self._check_process()
        failed = False
        try:
            failed = self._future.exception(lock_timeout(timeout)) is not None
        except CancelledError:
            pass
        except TimeoutError:
            if raise_on_failure:
                raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s") from None
        if failed and raise_on_failure and not self._stopped:  # a stopped job raises nothing, also if it fails later
            try:
                self._future.result()
            finally:
                del self  # else the error's traceback and the future would hold each other
        return self.status()

    def terminate(self) -> None:
        """Mark the job STOPPED. A queued job never starts, a program is ended; a running function continues."""
        self._stopped = True
        if not self._future.cancel() and self._kill is not None:
            self._kill()

    def logs(self, max_lines: int | None = None) -> Any:
        """Return the output of a program; empty for a function, which prints to the streams of this process. See
        `fray.v2.JobHandle.logs`."""
        text = "" if self._output is None else self._output()
        return text if max_lines is None else output_of(text.splitlines(), max_lines)

    def _check_process(self) -> None:
        # A forked child has a copy of the job, which would never end there.
        if os.getpid() != self._process:
            raise RuntimeError(
                f"job {self._job_id} runs in process {self._process}, from which this one was forked: wait for it "
                "there, or submit jobs after the fork"
            )

    def __repr__(self) -> str:
        state = "running" if not (self._stopped or self._future.done()) else self.status().value
        return f"<LocalJobHandle {self._job_id} {state}>"


def _context_of_job() -> Context:
    """Return a copy of the submitter's context without its current actor: a job is not the actor that submitted it."""
    context = copy_context()
    context.run(_current_actor_var.set, None)
    return context


def _call_entrypoint(call: CallableEntrypoint) -> None:
    try:
        call.callable(*call.args, **call.kwargs)
    except SystemExit as leaving:  # `sys.exit(0)` is a success, as for a process
        if leaving.code not in (None, 0):
            raise


# Actors --------------------------------------------------------------------------------------------------------------

_registry: dict[str, _LocalActor] = {}
"""Actors of the whole process by name: the last actor made under a name answers to it."""
os.register_at_fork(after_in_child=_registry.clear)  # a child has copies, which are not the actors


class _LocalActor:
    """Instance, and the context in which its code runs: its caller's, with this actor as current actor."""

    def __init__(self, name: str, group: str, index: int, cls: type, stays: bool = False) -> None:
        self.name, self._class, self._stays = name, cls, stays
        self.handle = LocalActorHandle(name)
        self.about = ActorContext(self.handle, index, group, terminate=self._end_itself, fail=self._fail)
        self._instance: Any = None
        self._made, self._maker_thread = threading.Event(), threading.get_ident()
        self.ended: Future[None] = Future()
        """Done once the actor has ended; serves as the future of its job."""
        self.ended.set_running_or_notify_cancel()

    @property
    def answers(self) -> bool:
        """True while the name leads to this actor."""
        return _registry.get(self.name) is self

    def _end_itself(self) -> None:
        """End the actor in order; one that stays answers to its name until its owner ends it."""
        if self._stays:
            self._set_ended(None)
        else:
            self.end()

    def _fail(self, error: BaseException | str) -> None:
        self.end(error if isinstance(error, BaseException) else RuntimeError(error))

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalActorHandle:
        """Construct the actor in this thread.

        It is registered before, so that the constructor can pass the handle to other code.
        """
        before = _registry.get(self.name)
        _registry[self.name] = self
        try:
            self._instance = self.context().run(self._class, *args, **kwargs)
        except BaseException as error:
            self.end(error)
            # The name goes back to the actor that it was taken from, if that still lives.
            if before is not None and not before.ended.done():
                _registry.setdefault(self.name, before)
            raise
        finally:
            self._made.set()
        return self.handle

    def context(self) -> Context:
        """Return a copy of the running code's context, with this actor as current actor."""
        context = copy_context()
        context.run(_set_current_actor, self.about)
        return context

    def end(self, error: BaseException | None = None) -> None:
        """Unregister the actor, unless a later one has its name. Running calls continue."""
        if self.answers:
            _registry.pop(self.name, None)
        self._set_ended(error)

    def _set_ended(self, error: BaseException | None) -> None:
        try:
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)
        except InvalidStateError:
            pass  # already ended
        # Last: setting it ends the actor without an error.
        self.about.shutdown_event.set()

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method. Raises AttributeError if the actor has no method of this name."""
        if not self._made.is_set():
            # Access looks at the class and the call waits: so a constructor can pass on its own handle, and no lock is
            # held that its calls need.
            if callable(getattr(self._class, name, None)):
                return lambda *args, **kwargs: self._made_method(name)(*args, **kwargs)
            self._wait_made()
        return self._made_method(name)

    def _made_method(self, name: str) -> Callable[..., Any]:
        self._wait_made()
        # Its constructor has failed.
        if self._instance is None:
            raise _dead_actor(self.name)
        found = getattr(self._instance, name, None)
        if not callable(found):
            raise AttributeError(f"actor {self.name!r} has no method {name!r}; only methods can be called")
        refuse_async(found, f"method {name!r} of actor {self.name!r}")
        return found  # type: ignore[no-any-return]

    def _wait_made(self) -> None:
        if not self._made.is_set() and threading.get_ident() == self._maker_thread:
            raise RuntimeError(f"actor {self.name!r} is still being made: its constructor cannot wait for its methods")
        self._made.wait()


def _dead_actor(name: str) -> ActorUnavailableError:
    return ActorUnavailableError(
        f"actor {name!r} is not there: it has ended, was never made, or lives in the process that forked this one"
    )


@short_tracebacks
class LocalActorMethod(Generic[P, T_co]):
    """Method of an actor of this process.

    Args:
        method: function that is called.
        actor: actor whose method it is, for `current_actor`. Default: none.
        name: name of the method in those of threads. Default: that of the function.
    """

    def __init__(self, method: Callable[..., Any], *, actor: _LocalActor | None = None, name: str = "") -> None:
        self._method, self._actor = method, actor
        self._name = name or getattr(method, "__name__", repr(method))

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[T_co]:
        """Start the call at once in its own thread, in a copy of the caller's context."""
        actor = self._actor
        context, owner = (copy_context(), "") if actor is None else (actor.context(), f"{actor.name}.")
        return call_in_thread(context, f"{owner}{self._name}", self._method, *args, **kwargs)

    submit = remote

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
        if self._actor is None:
            return self._method(*args, **kwargs)  # type: ignore[no-any-return]
        token = _set_current_actor(self._actor.about)
        try:
            result: T_co = self._method(*args, **kwargs)
            return result
        finally:
            _reset_current_actor(token)


class LocalActorHandle(Generic[A_co]):
    """Reference to an actor of this process by name. Access raises RuntimeError if no such actor is registered."""

    def __init__(self, name: str) -> None:
        self._name = name

    @short_traceback
    def __getattr__(self, method_name: str) -> LocalActorMethod:
        if method_name.startswith("_"):
            raise AttributeError(f"{method_name!r}: names with a leading underscore cannot be called remotely")
        actor = _registry.get(self._name)
        if actor is None:
            raise _dead_actor(self._name)
        return LocalActorMethod(actor.method(method_name), actor=actor, name=method_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalActorHandle, (self._name,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalActorHandle) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"LocalActorHandle({self._name!r})"


@short_tracebacks
class LocalActorGroup(Generic[A_co]):
    """Group whose members all exist from the beginning. See `fray.v2.ActorGroup`."""

    def __init__(self, actors: list[_LocalActor]) -> None:
        self._actors = actors
        self._jobs = [LocalJobHandle(actor.name, actor.ended, kill=actor.end) for actor in actors]
        self._returned: set[int] = set()

    @property
    def _job_id(self) -> str:
        """Id of the first member's job; see `fray.v2.fray.groups`."""
        return self._jobs[0].job_id if self._jobs else ""

    @property
    def ready_count(self) -> int:
        return len(self._living())

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle[A_co]]:
        wanted = len(self._actors) if count is None else count
        if wanted < 0:
            raise ValueError(f"wait_ready({wanted}): the number of members must be 0 or more")
        if wanted > len(self._actors):
            raise TimeoutError(f"{wanted} members will not be ready: there are {len(self._actors)}")
        living = self._living()
        if wanted > len(living):
            raise RuntimeError(f"{wanted} members will never be ready: {len(self._actors) - len(living)} have ended")
        return self._handles_of(living[:wanted])

    def discover_new(self, target: int | None = None) -> list[ActorHandle[A_co]]:
        new = [index for index in self._living() if index not in self._returned]
        return self._handles_of(new if target is None else new[: max(0, target - len(self._returned))])

    def _living(self) -> list[int]:
        return [index for index, actor in enumerate(self._actors) if not actor.ended.done()]

    def _handles_of(self, indices: list[int]) -> list[ActorHandle[A_co]]:
        self._returned.update(indices)
        return [self._actors[index].handle for index in indices]

    def is_done(self) -> bool:
        return all(actor.ended.done() for actor in self._actors)

    @property
    def jobs(self) -> list[JobHandle]:
        return list(self._jobs)

    def statuses(self) -> list[JobStatus]:
        return [job.status() for job in self._jobs]

    def shutdown(self) -> None:
        for job in self._jobs:
            job.terminate()


# The client ----------------------------------------------------------------------------------------------------------

_numbers = itertools.count()


@short_tracebacks
class LocalClient(ExplainsMissing):
    """Jobs and actors as threads of this process; see `fray.v2.Client`.

    Args:
        max_threads: jobs that run concurrently; others are queued. Calls of actors have their own threads.
    """

    _meant = V2_CLIENT_LINES
    _job_class = LocalJobHandle
    _group_class: type[LocalActorGroup] = LocalActorGroup
    _actors_stay = False

    def __init__(self, max_threads: int = 8) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads={max_threads} must be 1 or more")
        self._threads = BoundedThreads(max_threads, "this LocalClient was shut down: make another")

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> LocalJobHandle:
        """Run the job once in a thread, in a copy of this code's context. Resources, environment, replicas and retries
        have no effect here, and two submits of one name are two jobs."""
        check_request(request)
        job_id = f"local-{request.name}-{next(_numbers)}"
        entrypoint: Entrypoint = request.entrypoint
        if entrypoint is not None and (binary := entrypoint.binary_entrypoint) is not None:
            # Not started here: it takes a place among the threads like every job.
            program = subprocesses.Program(job_id, [binary.command, *binary.args])
            future = self._threads.submit(_context_of_job(), program.run, job_id)
            return self._job_class(job_id, future, output=program.output, kill=program.kill)
        if entrypoint is not None and (call := entrypoint.callable_entrypoint) is not None:
            refuse_async(call.callable, f"job {request.name!r}")
            future = self._threads.submit(_context_of_job(), partial(_call_entrypoint, call), job_id)
            return self._job_class(job_id, future)
        raise ValueError(f"job {request.name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one")

    def create_actor(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 (as callers read the signature)
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> LocalActorHandle[T]:
        """Construct the actor in this thread; raise what the constructor raises. An ``environment=`` has no effect."""
        take_environment(actor_class, kwargs)
        return _LocalActor(name, name, 0, actor_class, self._actors_stay).make(args, kwargs)

    def create_actor_group(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> LocalActorGroup[T]:
        """Construct the members one after another in this thread; if one fails, end those before it and raise its
        error."""
        if count < 0:
            raise ValueError(f"count={count} must be 0 or more")
        take_environment(actor_class, kwargs)
        actors: list[_LocalActor] = []
        try:
            for index in range(count):
                actors.append(_LocalActor(f"{name}-{index}", name, index, actor_class, self._actors_stay))
                actors[-1].make(args, kwargs)
        except BaseException:
            # All or none, as on a cluster.
            for actor in actors:
                actor.end()
            raise
        return self._group_class(actors)

    def host_actor(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        **kwargs: Any,
    ) -> HostedActor[T]:
        """Construct an actor as `create_actor` does; the result can end it."""
        actor = _LocalActor(name, name, 0, actor_class, self._actors_stay)
        return HostedActor(actor.make(args, kwargs), actor.end)

    def shutdown(self, wait: bool = True) -> None:
        """Accept no more jobs, and wait for those submitted. Actors outlive the client.

        Raises:
            RuntimeError: with ``wait``, in a job of this client, which would wait for itself.
        """
        self._threads.close(wait=wait)

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        self.shutdown(wait=error_type is None)
