"""Status of one actor, kept up to date by what the directory reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from fray.errors import ActorDied, FrayError
from fray.model.actors import ActorStatus
from fray.model.ids import ActorId, split_actor_id
from fray.model.messages.calls import RequestShutdown
from fray.model.messages.client import ActorEndpoint, Names
from fray.model.service_key import ServiceKey
from fray.model.specs import EndReason
from fray.net.codec import Bytes
from fray.runtime import tracing
from fray.runtime.actors.light import ActorEnded, EndedBefore, Event
from fray.runtime.calls.host_loss import HostLoss, loss_of_error, loss_of_outcome
from fray.runtime.calls.range_set import ENDS_KEPT, LONG_AGO, RangeSet
from fray.runtime.runtime import Runtime

REQUEST_S = 5.0
"""Time limit for asking an actor to end, in seconds."""
# ENDED is for an orderly end (deleted, idle, with its owner); every other one is FAILED. An actor on a machine that is
# silent is RESTARTING: it was there, is not now, and may be again.
_ORDERLY = frozenset({EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.OWNER_ENDED})


class ActorStatusWatch:
    """Follows one actor from now on; ``on_change`` is called, in the loop, whenever it comes, goes, or has ended.

    For a light actor the directory has the host, and the host reports the actor's end: it is ready while its host is.
    """

    def __init__(self, runtime: Runtime, actor_id: ActorId, on_change: Callable[[], object]) -> None:
        self.actor_id = actor_id
        self.home, self._number = split_actor_id(actor_id)
        """``home`` is its own id, or that of its host."""
        self.endpoint: ActorEndpoint | None = None
        self.silence: HostLoss | None = None
        """Set while its machine is silent: it may be ready again."""
        self._end: HostLoss | None = None
        self._is_orderly = False
        self._was_ready = False
        self._on_change = on_change
        self._unwatch: Callable[[], None] = lambda: None
        self._light_events = _light_events_of(runtime, self.home) if self._number else None
        if self._light_events is not None:
            self._light_events.listeners.setdefault(self._number, []).append(self._on_light)
            # The end may be known already, from another watch of the same host.
            self._on_light()
        self._unwatch = runtime.client.names.watch(f"actor:{self.home}", self._on_names)
        # The watch reports within its call, before `_unwatch` was there to be called.
        if self.has_ended:
            self.close()

    def _on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        # Oldest first, so this is the newest incarnation.
        self.endpoint = names.endpoints[-1] if names.endpoints else None
        loss = None if names.ended is None else loss_of_outcome(names.ended, blobs)
        self.silence = loss if names.may_return else None
        if names.ended is not None and not names.may_return and self._end is None:
            self._end, self._is_orderly = loss, names.ended.cause in _ORDERLY
        # Tells a restart from the first start, which look the same while no endpoint is there.
        self._was_ready = self._was_ready or self.is_ready or self.silence is not None
        if self.has_ended:
            self.close()  # an end for good is the last change
        self._on_change()

    def _on_light(self) -> None:
        gone = None if self._light_events is None else self._light_events.end_of(self._number)
        if gone is not None and self._end is None:
            self._end, self._is_orderly = _loss_of(gone), gone.error is None
            self.close()
        self._on_change()

    def close(self) -> None:
        """Stop following it."""
        self._unwatch()
        events = self._light_events
        if events is not None and self._on_light in (listeners := events.listeners.get(self._number, [])):
            listeners.remove(self._on_light)
            if not listeners:
                del events.listeners[self._number]

    @property
    def is_light(self) -> bool:
        return self._number > 0

    @property
    def number(self) -> int:
        """Number of the actor on its host."""
        return self._number or (self.endpoint.number if self.endpoint is not None else 0)

    @property
    def incarnation(self) -> str:
        """The incarnation that is ready; empty if none is."""
        return self.endpoint.incarnation if self.endpoint is not None and self.is_ready else ""

    @property
    def is_ready(self) -> bool:
        # The host's endpoint stands for all its light actors, whether or not they have been made.
        is_made = self._light_events is None or self._number in self._light_events.ready
        return self.endpoint is not None and self._end is None and is_made

    @property
    def has_ended(self) -> bool:
        """True once it has ended for good."""
        return self._end is not None

    @property
    def status(self) -> ActorStatus:
        if self._end is not None:
            return ActorStatus.ENDED if self._is_orderly else ActorStatus.FAILED
        if self.is_ready:
            return ActorStatus.READY
        return ActorStatus.RESTARTING if self._was_ready else ActorStatus.CREATING

    @property
    def end_text(self) -> str:
        """Text about its end; empty if it has not ended."""
        return "" if self._end is None else self._end.text

    def end_error(self, label: str) -> FrayError:
        """Return the end of an actor that has ended, as an error."""
        return (self._end or _UNKNOWN).died(label)

    def call_error(self, label: str) -> BaseException:
        """Return the error of calls of an actor that has ended: its constructor's own error, if that raised.

        A constructor's error is the error itself, not the cause of an `ActorDied`: it says what to fix, and a caller
        that handles it catches its type. This holds only if the last incarnation never served: an actor that did, and
        failed, has died. Each call gets a copy of its own. Monitors and links report the end, so they keep `ActorDied`.
        """
        return (self._end or _UNKNOWN).undelivered(label)


_UNKNOWN = HostLoss(text="the reason is unknown")


def _loss_of(gone: ActorEnded) -> HostLoss:
    return HostLoss(text=gone.text) if gone.error is None else loss_of_error(gone.error, gone.text, gone.constructing)


class _LightActorEvents:
    """Events of one host of light actors, followed once for this runtime."""

    def __init__(self, runtime: Runtime, home: ActorId) -> None:
        self._ends: dict[int, ActorEnded] = {}
        """The last `ENDS_KEPT`."""
        self._old_ends = RangeSet()
        self.ready: set[int] = set()
        self.listeners: dict[int, list[Callable[[], object]]] = {}
        self._caller = runtime.caller
        self._route = runtime.caller.route(f"actor:{home}")
        runtime.nursery.start_soon(self._follow)

    async def _follow(self) -> None:
        while True:
            try:
                # A stream does not survive a reset of its connection; each new one begins with the whole state.
                with tracing.untraced():
                    stream = self._route.stream("events")
                async with stream:
                    async for events in stream:
                        for event in events:
                            self._on_event(event)
            # The next incarnation of the host makes its actors again and reports each as ready.
            except ActorDied:
                self.ready.clear()
                await self._route.wait_while_silent()
                if self._route.loss is not None:
                    return  # the directory reports the end of the host
            except FrayError:
                return  # this runtime is being closed

    def end_of(self, number: int) -> ActorEnded | None:
        """Return how an actor ended for good; None if it has not."""
        return self._ends.get(number) or (ActorEnded(number, LONG_AGO, None) if number in self._old_ends else None)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, EndedBefore):
            self._old_ends.update(event.numbers)
            changed = [number for number in self.listeners if number in self._old_ends]
        elif isinstance(event, ActorEnded):
            self._add_end(event)
            changed = [event.number]
        else:
            self.ready.add(event)
            changed = [event]
        for number in changed:
            # A listener may remove itself.
            for listener in list(self.listeners.get(number, [])):
                listener()

    def _add_end(self, gone: ActorEnded) -> None:
        self.ready.discard(gone.number)
        self._ends[gone.number] = gone
        while len(self._ends) > ENDS_KEPT:
            oldest = next(iter(self._ends))
            del self._ends[oldest]
            self._old_ends.add(oldest)


LIGHT_ACTOR_EVENTS: ServiceKey[dict[ActorId, _LightActorEvents]] = ServiceKey("light actor events")


def _light_events_of(runtime: Runtime, home: ActorId) -> _LightActorEvents:
    by_host = runtime.services.get_or_make(LIGHT_ACTOR_EVENTS, dict)
    if home not in by_host:
        by_host[home] = _LightActorEvents(runtime, home)
    return by_host[home]


async def request_end(runtime: Runtime, watch: ActorStatusWatch, reason: str) -> None:
    """Ask a ready actor for an orderly end; an actor that is not ready, or does not answer, is left alone."""
    if watch.endpoint is None:
        return
    with trio.move_on_after(REQUEST_S):
        # A request to the host and not a call: it must not wait behind the actor's calls.
        peer = runtime.caller.connect(watch.endpoint, keyed=True)
        try:
            await peer.request(RequestShutdown(number=watch.number, reason=reason))
        except FrayError:
            pass  # it is ending or has ended: the requester waits for its end
