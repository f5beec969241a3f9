"""Links and monitors: to be told when an actor goes, and to go with it.

A monitor is told what the directory says; of a light actor, what its host says. Its delay is that of the notice of a
death: at once for a process (its node sees it), ``suspect_s`` for a machine that has fallen silent.
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
"""Events a monitor keeps for a reader that does not come; then the oldest go."""


@frozen
class Up:
    """The actor is there, as this incarnation."""

    actor: ActorHandle
    incarnation: str


@frozen
class Down:
    """The actor was lost."""

    actor: ActorHandle
    incarnation: str
    """Which one is gone; empty if it never was there."""
    error: FrayError
    """`ActorDied` or `MachineLost`; its cause is the actor's own error, if it had one."""
    will_restart: bool
    """It may be there again: another event will say so, or that it will not."""


Event: TypeAlias = Up | Down


class Monitor:
    """The comings and goings of one actor, from `monitor` on, beginning with how it stands.

    ``async for event in monitor`` gives `Up` and `Down`, and ends behind the `Down` that is final. ``await monitor``
    skips to that one. Use it as ``async with``, or `close` it, to stop earlier.
    """

    def __init__(
        self, handle: ActorHandle, runtime: Runtime, on_event: Callable[[Event], object] | None = None
    ) -> None:
        self._handle = handle
        self._on_event = on_event
        self._events: list[Event] = []
        self._news = trio.Event()
        self._incarnation = ""
        self._was_told = False
        self._final: Down | None = None
        self._closed = False
        self._presence = ActorStatusWatch(runtime, actor_id_of(handle), self._look)
        self._look()

    def _look(self) -> None:
        presence = getattr(self, "_presence", None)
        if presence is None or self._final is not None or self._closed:
            return
        there = presence.incarnation
        if self._incarnation and there != self._incarnation:
            gone, self._incarnation = self._incarnation, ""
            if presence.has_ended:
                self._tell_final(gone)
                return
            error = ActorDied(f"actor {label_of(self._handle)} is gone: {gone} ended", incarnation=gone)
            self._tell(Down(self._handle, gone, error, will_restart=True))
        if there:
            if there != self._incarnation:
                self._incarnation = there
                self._tell(Up(self._handle, there))
        elif presence.has_ended:
            self._tell_final("")

    def _tell_final(self, gone: str) -> None:
        self._final = Down(self._handle, gone, self._presence.end_error(label_of(self._handle)), will_restart=False)
        self._tell(self._final)
        self._presence.close()

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
        else:
            self._events.append(event)
            del self._events[:-EVENTS_LIMIT]
        self._news.set()
        self._news = trio.Event()

    # For whoever reads -----------------------------------------------------------------------------------------------

    def __aiter__(self) -> Monitor:
        return self

    async def __anext__(self) -> Event:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._final is not None or self._closed:
                raise StopAsyncIteration
            await self._news.wait()
        return self._events.pop(0)

    async def wait(self) -> Down:
        """Wait until the actor is gone for good.

        Raises:
            FrayError: the monitor was closed before.
        """
        while self._final is None:
            if self._closed:
                raise FrayError(f"the monitor of {self._handle!r} was closed", reason="closed")
            await self._news.wait()
        return self._final

    def __await__(self) -> Generator[Any, Any, Down]:
        return self.wait().__await__()

    def close(self) -> None:
        """Watch no longer; whoever iterates gets what has come, and the end."""
        self._closed = True
        self._presence.close()
        self._news.set()

    async def __aenter__(self) -> Monitor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "gone" if self._final else "closed" if self._closed else self._incarnation or "not there"
        return f"<monitor of {self._handle!r}: {state}>"


def monitor(handle: ActorHandle) -> Monitor:
    """Watch an actor, wherever it lives. Returns at once; the first event says how it stands.

    Raises:
        FrayError: neither in a job nor in `open_cluster`.
    """
    return Monitor(_checked(handle), current())


# Links ---------------------------------------------------------------------------------------------------------------


class Link:
    """Made by `link`; `unlink` takes it back."""

    def __init__(
        self, life: ActorLifecycle, handle: ActorHandle, runtime: Runtime, on_down: Callable[[Down], object] | None
    ) -> None:
        self._life = life
        self._on_down = on_down
        self._monitor = Monitor(handle, runtime, self._heard)

    def _heard(self, event: Event) -> None:
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
        """The other's end is no longer this actor's business."""
        self._monitor.close()


def link(handle: ActorHandle, *, on_down: Callable[[Down], object] | None = None) -> Link:
    """Tie the running actor to another: when that one has gone for good, this one fails with `LinkedActorDied`.

    A restart of the other is no end. For both directions each links the other. To be called in the loop.

    Args:
        on_down: is called with the `Down` instead, in the loop; it must not wait.

    Raises:
        FrayError: the running code belongs to no actor.
        InvalidRequest: the actor would be linked to itself.
    """
    life = current_lifecycle()
    if life is None:
        raise FrayError("fray.link ties the running actor to another, and this code belongs to none", reason="no actor")
    if actor_id_of(_checked(handle)) == life.actor_id:
        raise InvalidRequest(f"actor {life.name} cannot be linked to itself")
    return Link(life, handle, current(), on_down)


def _checked(handle: ActorHandle) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise InvalidRequest(f"monitors and links need the handle of an actor, not {handle!r}")
    return handle
