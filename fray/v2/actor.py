"""Actors as callers of `fray.v2` see them: handles, methods, futures, groups, and what an actor knows of itself."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from threading import Event
from typing import Any, Protocol, runtime_checkable

from fray.v2.job import JobHandle, JobStatus


@runtime_checkable
class ActorFuture(Protocol):
    """The answer of a call, to come."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it: what the method returned, or raise what it raised.

        Raises:
            TimeoutError: (the built-in one) not within ``timeout`` seconds; the call goes on, ask again.
            RuntimeError: the actor is dead.
        """


@runtime_checkable
class ActorMethod(Protocol):
    """A method of an actor."""

    def remote(self, *args: Any, **kwargs: Any) -> ActorFuture:
        """Begin a call."""

    def submit(self, *args: Any, **kwargs: Any) -> ActorFuture:
        """Begin a call that may last long and outlive a connection."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and wait for the answer."""


@runtime_checkable
class ActorHandle(Protocol):
    """An actor, by its name: usable before it is there, from any thread, and picklable."""

    def __getattr__(self, method_name: str) -> ActorMethod: ...


@runtime_checkable
class ActorGroup(Protocol):
    """Instances of one actor. Which of them does what is the caller's to decide."""

    @property
    def ready_count(self) -> int:
        """Members that can be called."""

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        """Wait until ``count`` members (default all) can be called; they come in order of index. May be asked again.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
            RuntimeError: so many have ended that it can never be.
        """

    def discover_new(self) -> list[ActorHandle]:
        """Members that can be called and that neither `wait_ready` nor this gave before."""

    def is_done(self) -> bool:
        """Whether no further member can ever come."""

    @property
    def jobs(self) -> list[JobHandle]:
        """The job of each member."""

    def statuses(self) -> list[JobStatus]:
        """How the job of each member stands."""

    def shutdown(self) -> None:
        """End all members: calls that run may finish, then the names answer no more. May be repeated."""


class HostedActor:
    """An actor that lives in the process that asked for it: `Client.host_actor`."""

    def __init__(self, handle: Any, stop: Callable[[], None]) -> None:
        self.handle = handle
        self._stop: Callable[[], None] | None = stop

    def shutdown(self) -> None:
        """End it. May be repeated."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def __enter__(self) -> HostedActor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


# What an actor knows of itself ---------------------------------------------------------------------------------------


class ActorContext:
    """The actor whose code is running: from `current_actor`, or made by hand.

    Args:
        handle: of this actor, for others to call.
        index: its place in the group, from 0.
        group_name: name of the group, or of the actor when it is alone.
    """

    def __init__(
        self,
        handle: Any,
        index: int,
        group_name: str,
        *,
        shutdown_event: Any = None,
        terminate: Callable[[], None] | None = None,
        fail: Callable[[str], None] | None = None,
    ) -> None:
        self.handle, self.index, self.group_name = handle, index, group_name
        self.shutdown_event = Event() if shutdown_event is None else shutdown_event
        """``is_set()`` once the actor shall end."""
        self._terminate, self._fail = terminate or self.shutdown_event.set, fail

    def terminate(self) -> None:
        """Ask for the actor's end in order; returns at once."""
        self._terminate()

    def fail(self, message: str) -> None:
        """Ask for its end as failed; returns at once."""
        if self._fail is not None:
            self._fail(message)
        else:
            self._terminate()

    def __repr__(self) -> str:
        return f"ActorContext(handle={self.handle!r}, index={self.index}, group_name={self.group_name!r})"


_current_actor_var: ContextVar[ActorContext | None] = ContextVar("fray_v2_current_actor", default=None)


def _set_current_actor(context: ActorContext) -> Token[ActorContext | None]:
    return _current_actor_var.set(context)


def _reset_current_actor(token: Token[ActorContext | None]) -> None:
    _current_actor_var.reset(token)


_process_actor: ActorContext | None = None


def _set_process_actor(context: ActorContext | None) -> None:
    """All of this process is one actor's: it is current in threads of its own, too."""
    global _process_actor
    _process_actor = context


def current_actor() -> ActorContext:
    """The actor whose code is running: in its constructor, in its methods, and on a cluster in its threads, too.

    Raises:
        RuntimeError: no actor's code is running.
    """
    from fray.v2.fray.client import running_actor

    found = _current_actor_var.get() or _process_actor or running_actor()
    if found is None:
        raise RuntimeError("current_actor() is for the code of an actor: this is not one")
    return found
