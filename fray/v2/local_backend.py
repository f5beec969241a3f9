"""`LocalClient`: jobs and actors as threads of this process, for tests and laptops.

It is direct on purpose: callables and arguments are never pickled, what a job changes is seen by its submitter, and
each call of an actor begins at once in a thread of its own. Nothing can be killed, so nothing is: `terminate` marks.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from fray.threads import BoundedThreads, call_in_thread, lock_timeout
from fray.v2 import subprocesses
from fray.v2.interface import (
    ActorContext,
    ActorHandle,
    HostedActor,
    _current_actor_var,
    _reset_current_actor,
    _set_current_actor,
)
from fray.v2.job import JobHandle, JobStatus, refuse_async
from fray.v2.types import ActorConfig, CallableEntrypoint, Entrypoint, JobRequest, ResourceConfig

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
        self._stopped, self._process = False, os.getpid()

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        """STOPPED from `terminate` on, whatever comes; RUNNING also while it waits for a thread.

        Raises:
            RuntimeError: it runs in the process that this one was forked from, and nobody knows here.
        """
        if self._stopped or self._future.cancelled():
            return JobStatus.STOPPED
        if not self._future.done():
            self._check_process()
            return JobStatus.RUNNING
        return JobStatus.SUCCEEDED if self._future.exception() is None else JobStatus.FAILED

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait until its code has ended, also after `terminate`. As `fray.v2.JobHandle.wait`; STOPPED is no failure."""
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
        if failed and raise_on_failure and not self._stopped:
            try:
                self._future.result()
            finally:
                del self  # else the error's traceback and the future would hold each other
        return self.status()

    def terminate(self) -> None:
        """Mark it STOPPED. A queued job never starts, a program is ended; a function that runs goes on."""
        self._stopped = True
        if not self._future.cancel() and self._kill is not None:
            self._kill()

    def logs(self) -> str:
        """What a program has printed. What a function prints goes where this process prints: empty."""
        return "" if self._output is None else self._output()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"job {self._job_id} runs in process {self._process}, which this one was forked from: wait for it "
                "there, or submit jobs after the fork"
            )

    def __repr__(self) -> str:
        state = "running" if not (self._stopped or self._future.done()) else self.status().value
        return f"<LocalJobHandle {self._job_id} {state}>"


def _context_of_job() -> Context:
    """That of the submitter, except that no job is the actor that submitted it."""
    context = copy_context()
    context.run(_current_actor_var.set, None)
    return context


def _run(call: CallableEntrypoint) -> None:
    try:
        call.callable(*call.args, **call.kwargs)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


# Actors --------------------------------------------------------------------------------------------------------------

_registry: dict[str, _LocalActor] = {}
"""Of the whole process: whoever was made last under a name answers to it."""
os.register_at_fork(after_in_child=_registry.clear)  # a child has copies of them, which are not the actors


class _LocalActor:
    """One instance, and the context in which its code runs: that of its creator, with itself as current actor."""

    def __init__(self, name: str, group: str, index: int, cls: type) -> None:
        self.name, self._class = name, cls
        self.handle = LocalActorHandle(name)
        self.about = ActorContext(
            self.handle, index, group, terminate=self.end, fail=lambda message: self.end(RuntimeError(message))
        )
        self._context = copy_context()
        self._context.run(_set_current_actor, self.about)
        self._instance: Any = None
        self._made, self._maker = threading.Event(), threading.get_ident()
        self.ended: Future[None] = Future()
        """Its end, as a job's."""
        self.ended.set_running_or_notify_cancel()

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalActorHandle:
        """Construct it, here and now; its name answers from before, so that the constructor can give itself away."""
        before = _registry.get(self.name)
        _registry[self.name] = self
        try:
            self._instance = self.context().run(self._class, *args, **kwargs)
        except BaseException as error:
            self.end(error)
            if before is not None and not before.ended.done():
                _registry.setdefault(self.name, before)
            raise
        finally:
            self._made.set()
        return self.handle

    def context(self) -> Context:
        return self._context.copy()

    def end(self, error: BaseException | None = None) -> None:
        """Its name answers no more, unless somebody else has it now. Calls that run go on."""
        self.about.shutdown_event.set()
        if _registry.get(self.name) is self:
            _registry.pop(self.name, None)
        try:
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)
        except InvalidStateError:
            pass  # it has ended before

    def method(self, name: str) -> Callable[..., Any]:
        """Raises AttributeError: it has none of this name."""
        if not self._made.is_set():
            if callable(getattr(self._class, name, None)):
                return lambda *args, **kwargs: self._made_method(name)(*args, **kwargs)
            self._wait_made()
        return self._made_method(name)

    def _made_method(self, name: str) -> Callable[..., Any]:
        self._wait_made()
        if self._instance is None:
            raise _dead(self.name)
        found = getattr(self._instance, name)
        if not callable(found):
            raise AttributeError(f"{name!r} of actor {self.name!r} is no method, and only methods can be called")
        refuse_async(found, f"method {name!r} of actor {self.name!r}")
        return found  # type: ignore[no-any-return]

    def _wait_made(self) -> None:
        if not self._made.is_set() and threading.get_ident() == self._maker:
            raise RuntimeError(f"actor {self.name!r} is still being made: its constructor cannot wait for its methods")
        self._made.wait()


def _dead(name: str) -> RuntimeError:
    return RuntimeError(
        f"actor {name!r} is not there: it has ended, was never made, or lives in a process that forked this one"
    )


class LocalActorMethod:
    """A method of an actor of this process."""

    def __init__(self, actor: _LocalActor, name: str, method: Callable[..., Any]) -> None:
        self._actor, self._name, self._method = actor, name, method

    def remote(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin the call in a thread of its own, at once."""
        return call_in_thread(self._actor.context(), f"{self._actor.name}.{self._name}", self._method, *args, **kwargs)

    submit = remote

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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
        self._jobs = [LocalJobHandle(actor.name, actor.ended, kill=actor.end) for actor in actors]
        self._given: set[int] = set()

    @property
    def ready_count(self) -> int:
        return len(self._living())

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        wanted = len(self._actors) if count is None else count
        if wanted < 0:
            raise ValueError(f"wait_ready({wanted}): a number of members is 0 or more")
        if wanted > len(self._actors):
            raise TimeoutError(f"{wanted} members will not be ready: there are {len(self._actors)}")
        living = self._living()
        if wanted > len(living):
            raise RuntimeError(f"{wanted} members will never be ready: {len(self._actors) - len(living)} have ended")
        return self._give(living[:wanted])

    def discover_new(self) -> list[ActorHandle]:
        return self._give([index for index in self._living() if index not in self._given])

    def _living(self) -> list[int]:
        return [index for index, actor in enumerate(self._actors) if not actor.ended.done()]

    def _give(self, indices: list[int]) -> list[ActorHandle]:
        self._given.update(indices)
        return [self._actors[index].handle for index in indices]

    def is_done(self) -> bool:
        return not self._living()

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


class LocalClient:
    """Jobs and actors as threads of this process; see `fray.v2.Client`.

    Args:
        max_threads: jobs that run at once; others wait their turn. Calls of actors have threads of their own.
    """

    def __init__(self, max_threads: int = 8) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads={max_threads} must be 1 or more")
        self._threads = BoundedThreads(max_threads, "this LocalClient was shut down: make another")

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> LocalJobHandle:
        """Run it once in a thread, in a copy of this code's context. Resources, environment, replicas and retries are
        of no effect here, and one name twice is two jobs."""
        job_id = f"local-{request.name}-{next(_numbers)}"
        entrypoint: Entrypoint = request.entrypoint
        if entrypoint is not None and (binary := entrypoint.binary_entrypoint) is not None:
            program = subprocesses.Program(job_id, [binary.command, *binary.args])
            future = self._threads.submit(_context_of_job(), program.run, job_id)
            return LocalJobHandle(job_id, future, output=program.output, kill=program.kill)
        if entrypoint is not None and (call := entrypoint.callable_entrypoint) is not None:
            refuse_async(call.callable, f"job {request.name!r}")
            return LocalJobHandle(job_id, self._threads.submit(_context_of_job(), partial(_run, call), job_id))
        raise ValueError(f"job {request.name!r} has no entrypoint: Entrypoint.from_callable or from_binary makes one")

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
        return _LocalActor(name, name, 0, actor_class).make(args, kwargs)

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
        if count < 0:
            raise ValueError(f"count={count} must be 0 or more")
        actors: list[_LocalActor] = []
        try:
            for index in range(count):
                actors.append(_LocalActor(f"{name}-{index}", name, index, actor_class))
                actors[-1].make(args, kwargs)
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
        actor = _LocalActor(name, name, 0, actor_class)
        return HostedActor(actor.make(args, kwargs), actor.end)

    def shutdown(self, wait: bool = True) -> None:
        """Take no more jobs, and wait for those that were taken. Actors outlive it.

        Raises:
            RuntimeError: a job of its own would wait, and so for itself.
        """
        self._threads.close(wait=wait)

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        self.shutdown(wait=error_type is None)
