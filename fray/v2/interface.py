"""Protocols that every backend implements, and the context variables that say where code runs.

The backends import this module; `fray.v2.client` and `fray.v2.actor`, where callers find these names, choose among the
backends and so lie above them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from threading import Event
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from fray.type_variables import A, A_co, P, T_co
from fray.v2.job import JobHandle, JobStatus
from fray.v2.types import ActorConfig, EnvironmentConfig, JobRequest, ResourceConfig

T = TypeVar("T")

# Actors --------------------------------------------------------------------------------------------------------------


@runtime_checkable
class ActorFuture(Protocol[T_co]):
    """Pending answer of a call."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the answer; return what the method returned, or raise what it raised.

        Raises:
            TimeoutError: (the built-in one) not within ``timeout`` seconds; the call continues, and `result` may be
                called again.
            RuntimeError: the actor is dead.
        """


@runtime_checkable
class ActorMethod(Protocol[P, T_co]):
    """Method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T_co]:
        """Start a call."""

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T_co]:
        """Start a call that may last long and outlive a connection."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Call the method and wait for the answer."""


@runtime_checkable
class ActorHandle(Protocol[A_co]):
    """Reference to an actor by name: usable before the actor exists, on any thread, and picklable. ``A_co``, for type
    checkers, is the actor's class."""

    def __getattr__(self, method_name: str, /) -> ActorMethod: ...


@runtime_checkable
class ActorGroup(Protocol[A]):
    """Instances of one actor class. The caller decides which of them does what."""

    @property
    def ready_count(self) -> int:
        """Number of members that can be called."""

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle[A]]:
        """Wait until ``count`` members (default all) can be called; return them in order of index. May be repeated.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
            RuntimeError: so many members have ended that ``count`` can never be reached.
        """

    def discover_new(self) -> list[ActorHandle[A]]:
        """Return the members that can be called and that neither `wait_ready` nor this method has returned before."""

    def is_done(self) -> bool:
        """Return whether no further member can ever become ready."""

    @property
    def jobs(self) -> list[JobHandle]:
        """Job of each member."""

    def statuses(self) -> list[JobStatus]:
        """Return the status of each member's job."""

    def shutdown(self) -> None:
        """End all members: running calls may finish, then the names no longer answer. May be repeated."""


class HostedActor(Generic[A_co]):
    """Actor that lives in the process that made it; see `Client.host_actor`."""

    def __init__(self, handle: Any, stop: Callable[[], None] | None = None) -> None:
        self.handle: ActorHandle[A_co] = handle
        self._stop = stop

    def shutdown(self) -> None:
        """End the actor. May be repeated."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def __enter__(self) -> HostedActor[A_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


class EndingEvent(Event):
    """Event with which an actor ends itself: `set` calls ``end``, the first time."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def set(self) -> None:
        if not self.is_set():
            super().set()
            self._end()


class ActorContext:
    """Actor whose code is running: from `current_actor`, or made by hand.

    Args:
        handle: of this actor, for other code to call.
        index: position in the group, from 0.
        group_name: name of the group; of the actor when it is in no group.
    """

    def __init__(
        self,
        handle: Any,
        index: int,
        group_name: str,
        shutdown_event: Any = None,
        *,
        terminate: Callable[[], None] | None = None,
        fail: Callable[[BaseException | str], None] | None = None,
    ) -> None:
        self.handle, self.index, self.group_name = handle, index, group_name
        if shutdown_event is None:
            shutdown_event = Event() if terminate is None else EndingEvent(terminate)
        self.shutdown_event = shutdown_event
        """Event that is set once the actor shall end; setting it ends the actor."""
        self._terminate, self._fail = terminate or self.shutdown_event.set, fail
        self._errors: list[BaseException] = []
        """Errors of `fail`, where it was given no function."""

    def terminate(self) -> None:
        """Request an orderly end of the actor; return at once."""
        self._terminate()

    def fail(self, exc: BaseException | str) -> None:
        """Request the end of the actor as failed with ``exc``, an exception or a text; return at once."""
        if self._fail is not None:
            self._fail(exc)
        else:
            self._errors.append(exc if isinstance(exc, BaseException) else RuntimeError(exc))
            self._terminate()

    def __repr__(self) -> str:
        return f"ActorContext(handle={self.handle!r}, index={self.index}, group_name={self.group_name!r})"


_current_actor_var: ContextVar[ActorContext | None] = ContextVar("fray_v2_current_actor", default=None)
_process_actor: ActorContext | None = None


def _set_current_actor(ctx: ActorContext) -> Token[ActorContext | None]:
    return _current_actor_var.set(ctx)


def _reset_current_actor(token: Token[ActorContext | None]) -> None:
    _current_actor_var.reset(token)


def _set_process_actor(context: ActorContext | None) -> None:
    """Make ``context`` the current actor of all code of this process, in threads that it starts too."""
    global _process_actor
    _process_actor = context


def _known_actor() -> ActorContext | None:
    """Return the actor of the running code, or of the process; None if a backend has set neither."""
    return _current_actor_var.get() or _process_actor


# Clients -------------------------------------------------------------------------------------------------------------


@runtime_checkable
class Client(Protocol):
    """Submits jobs and makes actors."""

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> JobHandle:
        """Submit a job and return at once.

        Args:
            adopt_existing: on a cluster, return the living job of this name if there is one.

        Raises:
            JobAlreadyExists: a living job has this name, and ``adopt_existing`` is False.
            ValueError: the request has no entrypoint, or this backend cannot run it.
            RuntimeError: the client was shut down.
        """

    def create_actor(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        resources: ResourceConfig = ...,
        actor_config: ActorConfig = ...,
        **kwargs: Any,
    ) -> ActorHandle[T]:
        """Make ``actor_class(*args, **kwargs)`` under ``name``. The handle can be used at once."""

    def create_actor_group(
        self,
        actor_class: type[T],
        *args: Any,
        name: str,
        count: int,
        resources: ResourceConfig = ...,
        actor_config: ActorConfig = ...,
        **kwargs: Any,
    ) -> ActorGroup[T]:
        """Make ``count`` instances: ``{name}-0``, ``{name}-1``, …; on a cluster, return without waiting for them."""

    def host_actor(
        self, actor_class: type[T], *args: Any, name: str, actor_config: ActorConfig = ..., **kwargs: Any
    ) -> HostedActor[T]:
        """Make an actor in this process, for other code and processes to call."""

    def shutdown(self, wait: bool = True) -> None:
        """End the client and what it made; with ``wait``, after its running jobs have ended. May be repeated."""


def take_environment(actor_class: type, options: dict[str, Any]) -> EnvironmentConfig | None:
    """Remove ``environment=`` from the keywords of `Client.create_actor` and return it; None if there is none.

    All other keywords belong to the constructor, and so does this one if the constructor has a parameter of this name,
    or the value is of another type.
    """
    given = options.get("environment")
    if not isinstance(given, EnvironmentConfig | None):
        return None
    if "environment" in options and "environment" not in inspect.signature(actor_class).parameters:
        del options["environment"]
        return given
    return None


_current_client_var: ContextVar[Any] = ContextVar("fray_v2_current_client", default=None)

C = TypeVar("C")


@contextmanager
def set_current_client(client: C) -> Iterator[C]:
    """Make ``client`` what `current_client` returns in this ``with`` block, and in the jobs submitted there."""
    token = _current_client_var.set(client)
    try:
        yield client
    finally:
        _current_client_var.reset(token)


_client_factory: Callable[[str], Any] | None = None


def _set_client_factory(factory: Callable[[str], Any]) -> None:
    """Register the function that makes a client of a spec: `fray.v2.client.client_of`, when that module is loaded."""
    global _client_factory
    _client_factory = factory


def _client_of_spec(spec: str) -> Any:
    """Return the client that ``spec`` names.

    A handle that arrives by pickle finds its cluster by ``FRAY_CLIENT_SPEC``; handles lie below the factory, which
    imports their backends, so they reach it through this registration.
    """
    assert _client_factory is not None, "fray.v2 imports fray.v2.client"
    return _client_factory(spec)
