"""Links and monitors: events when an actor is lost, and ending together with it.

Events come from the actor registry; for a light actor, from its host. The delay is that of detecting the death: none
for a process (its node sees it), ``suspect_s`` for a machine that has stopped responding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, TypeAlias

import trio
from attrs import frozen

from fray.api.actors.handle import ActorHandle, actor_id_of, label_of
from fray.errors import ActorDied, FrayError, InvalidRequest, LinkedActorDied
from fray.runtime.actors.lifecycle import ActorLifecycle, current_lifecycle
from fray.runtime.actors.status_watch import ActorStatusWatch
from fray.runtime.runtime import Runtime, current

EVENTS_LIMIT = 10_000
"""Events that a monitor buffers for its reader; beyond it the oldest are dropped."""


@frozen
class Up:
    """Event: the actor is ready, as this incarnation."""

    actor: ActorHandle
    incarnation: str


@frozen
class Down:
    """Event: the actor was lost."""

    actor: ActorHandle
    incarnation: str
    """Incarnation that was lost; empty if none ever was ready."""
    error: FrayError
    """`ActorDied` or `MachineLost`; its cause is the actor's own error, if it had one."""
    will_restart: bool
    """True if another event will follow: `Up`, or the final `Down`."""


Event: TypeAlias = Up | Down


class Monitor:
    """Events of one actor, from `monitor` on; the first is its present state.

    ``async for event in monitor`` yields `Up` and `Down`, and ends after the final `Down`. ``await monitor`` waits for
    that one. Use ``async with``, or `close`, to stop earlier.
    """

    def __init__(
        self, handle: ActorHandle, runtime: Runtime, on_event: Callable[[Event], object] | None = None
    ) -> None:
        self._handle = handle
        self._on_event = on_event
        self._events: list[Event] = []
        self._changed = trio.Event()
        self._incarnation = ""
        self._final: Down | None = None
        self._closed = False
        self._watch = ActorStatusWatch(runtime, actor_id_of(handle), self._update)
        self._update()

    def _update(self) -> None:
        watch = getattr(self, "_watch", None)
        if watch is None or self._final is not None or self._closed:
            return
        current = watch.incarnation
        if self._incarnation and current != self._incarnation:
            lost, self._incarnation = self._incarnation, ""
            if watch.has_ended:
                self._emit_final(lost)
                return
            label = label_of(self._handle)
            ended = ActorDied(f"actor {label} is gone: {lost} ended", incarnation=lost)
            error = ended if watch.silence is None else watch.silence.died(label)
            self._emit(Down(self._handle, lost, error, will_restart=True))
        if current:
            if current != self._incarnation:
                self._incarnation = current
                self._emit(Up(self._handle, current))
        elif watch.has_ended:
            self._emit_final("")

    def _emit_final(self, incarnation: str) -> None:
        self._final = Down(self._handle, incarnation, self._watch.end_error(label_of(self._handle)), will_restart=False)
        self._emit(self._final)
        self._watch.close()

    def _emit(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
        else:
            self._events.append(event)
            del self._events[:-EVENTS_LIMIT]
        self._changed.set()
        self._changed = trio.Event()

    # Reading ---------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Monitor:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._final is not None or self._closed:
                raise StopAsyncIteration
            await self._changed.wait()
        return self._events.pop(0)

    async def wait(self) -> Down:
        """Wait until the actor is gone for good.

        Raises:
            FrayError: the monitor was closed before.
        """
        while self._final is None:
            if self._closed:
                raise FrayError(f"the monitor of {self._handle!r} was closed", reason="closed")
            await self._changed.wait()
        return self._final

    def __await__(self) -> Generator[Any, Any, Down]:
        return self.wait().__await__()

    def close(self) -> None:
        """Stop watching; an iteration ends after the events that have come."""
        self._closed = True
        self._watch.close()
        self._changed.set()

    async def __aenter__(self) -> Monitor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "gone" if self._final else "closed" if self._closed else self._incarnation or "not ready"
        return f"<monitor of {self._handle!r}: {state}>"


def monitor(handle: ActorHandle) -> Monitor:
    """Watch an actor, wherever it lives. Returns at once; the first event is its present state.

    Raises:
        FrayError: neither in a job nor in `open_cluster`.
    """
    return Monitor(_checked(handle), current())


# Links ---------------------------------------------------------------------------------------------------------------


class Link:
    """Link of the running actor to another; made by `link`."""

    def __init__(
        self, life: ActorLifecycle, handle: ActorHandle, runtime: Runtime, on_down: Callable[[Down], object] | None
    ) -> None:
        self._life = life
        self._on_down = on_down
        self._monitor = Monitor(handle, runtime, self._on_event)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Down) or event.will_restart:
            return
        if self._on_down is not None:
            self._on_down(event)
            return
        error = LinkedActorDied(
            f"actor {self._life.name} ends because it is linked to {label_of(event.actor)}: {event.error}",
            actor=actor_id_of(event.actor),
        )
        error.__cause__ = event.error
        self._life.fail(error)

    def unlink(self) -> None:
        """Remove the link: the other's end no longer ends this actor."""
        self._monitor.close()


def link(handle: ActorHandle, *, on_down: Callable[[Down], object] | None = None) -> Link:
    """Tie the running actor to another: when that one has ended for good, this one fails with `LinkedActorDied`.

    A restart of the other does not count. A link works in one direction. Must be called in the loop.

    Args:
        on_down: called with the `Down` instead, in the loop; it must not wait.

    Raises:
        FrayError: the running code does not belong to an actor.
        InvalidRequest: the actor would be linked to itself.
    """
    life = current_lifecycle()
    if life is None:
        raise FrayError("fray.link must be called by code of an actor: this code belongs to none", reason="no actor")
    if actor_id_of(_checked(handle)) == life.actor_id:
        raise InvalidRequest(f"actor {life.name} cannot be linked to itself")
    return Link(life, handle, current(), on_down)


def _checked(handle: ActorHandle) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise InvalidRequest(f"monitors and links need the handle of an actor, not {handle!r}")
    return handle
