"""Whether one actor is there: what the directory says of it, kept up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from fray.errors import ActorDied, FrayError
from fray.model.actors import ActorStatus
from fray.model.ids import ActorId, split_actor_id
from fray.model.messages.calls import RequestShutdown
from fray.model.messages.client import ActorEndpoint, Names
from fray.model.specs import EndReason
from fray.net.codec import Bytes
from fray.runtime.actors.light import ActorEnded, EndedBefore, Event
from fray.runtime.calls.range_set import ENDS_KEPT, LONG_AGO, RangeSet
from fray.runtime.calls.route import failed_with, why_ended
from fray.runtime.calls.wire import HostLoss
from fray.runtime.context import Runtime

ASK_S = 5.0
"""How long the question whether an actor would please end may take to arrive."""
_IN_ORDER = frozenset({EndReason.SUCCEEDED, EndReason.STOPPED, EndReason.OWNER_ENDED})


class ActorStatusWatch:
    """Follows one actor from now on; ``on_change`` is called, in the loop, whenever it comes, goes, or has ended.

    Of a light actor the directory knows the host, and the host tells its end: it is there when its host is.
    """

    def __init__(self, runtime: Runtime, actor_id: ActorId, on_change: Callable[[], object]) -> None:
        self.actor_id = actor_id
        self.home, self._number = split_actor_id(actor_id)
        """``home`` is its own id, or that of its host."""
        self.endpoint: ActorEndpoint | None = None
        self._end: HostLoss | None = None
        self._in_order = False
        self._was_there = False
        self._on_change = on_change
        self._unwatch: Callable[[], None] = lambda: None
        self._tidings = _tidings_of(runtime, self.home) if self._number else None
        if self._tidings is not None:
            self._tidings.listeners.setdefault(self._number, []).append(self._on_light)
            self._on_light()
        self._unwatch = runtime.link.names.watch(f"actor:{self.home}", self._on_names)
        if self.has_ended:
            self.close()

    def _on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        self.endpoint = names.endpoints[-1] if names.endpoints else None
        if names.ended is not None and self._end is None:
            self._end, self._in_order = why_ended(names.ended, blobs), names.ended.cause in _IN_ORDER
        self._was_there = self._was_there or self.is_ready
        if self.has_ended:
            self.close()  # there is nothing more to hear
        self._on_change()

    def _on_light(self) -> None:
        gone = None if self._tidings is None else self._tidings.end_of(self._number)
        if gone is not None and self._end is None:
            self._end, self._in_order = _end_of(gone), gone.error is None
            self.close()
        self._on_change()

    def close(self) -> None:
        """Follow it no longer."""
        self._unwatch()
        if self._tidings is not None and self._on_light in (listeners := self._tidings.listeners.get(self._number, [])):
            listeners.remove(self._on_light)
            if not listeners:
                del self._tidings.listeners[self._number]

    @property
    def is_light(self) -> bool:
        return self._number > 0

    @property
    def number(self) -> int:
        """Its number on its host."""
        return self._number or (self.endpoint.number if self.endpoint is not None else 0)

    @property
    def incarnation(self) -> str:
        """Of the one that is there; empty when none is."""
        return self.endpoint.incarnation if self.endpoint is not None and self.is_ready else ""

    @property
    def is_ready(self) -> bool:
        is_made = self._tidings is None or self._number in self._tidings.there
        return self.endpoint is not None and self._end is None and is_made

    @property
    def has_ended(self) -> bool:
        """It will never be there (again)."""
        return self._end is not None

    @property
    def status(self) -> ActorStatus:
        if self._end is not None:
            return ActorStatus.ENDED if self._in_order else ActorStatus.FAILED
        if self.is_ready:
            return ActorStatus.READY
        return ActorStatus.RESTARTING if self._was_there else ActorStatus.CREATING

    @property
    def end_text(self) -> str:
        """How it ended."""
        return "" if self._end is None else self._end.text

    def end_error(self, label: str) -> FrayError:
        """The end of an actor that is over, as an error."""
        return (self._end or _UNKNOWN).died(label)

    def call_error(self, label: str) -> BaseException:
        """What calls of an actor that is over get: its constructor's own error, if that raised."""
        return (self._end or _UNKNOWN).undelivered(label)


_UNKNOWN = HostLoss(text="nobody knows why")


def _end_of(gone: ActorEnded) -> HostLoss:
    return HostLoss(text=gone.text) if gone.error is None else failed_with(gone.error, gone.text, gone.constructing)


class _LightActorEvents:
    """What one host of light actors tells of them, in this place in the cluster."""

    def __init__(self, runtime: Runtime, home: ActorId) -> None:
        self._gone: dict[int, ActorEnded] = {}
        """The last `ENDS_KEPT`."""
        self._past = RangeSet()
        self.there: set[int] = set()
        self.listeners: dict[int, list[Callable[[], object]]] = {}
        self._caller = runtime.caller
        self._route = runtime.caller.route(f"actor:{home}")
        runtime.nursery.start_soon(self._follow)

    async def _follow(self) -> None:
        while True:
            try:
                async with self._caller.stream(self._route, "events") as news:
                    async for events in news:
                        for event in events:
                            self._learn(event)
            except ActorDied:
                self.there.clear()
                await trio.lowlevel.checkpoint()
                if self._route.end is not None:
                    return  # the directory tells the rest
            except FrayError:
                return  # this place is being left

    def end_of(self, number: int) -> ActorEnded | None:
        """How an actor ended for good, if it has."""
        return self._gone.get(number) or (ActorEnded(number, LONG_AGO, None) if number in self._past else None)

    def _learn(self, event: Event) -> None:
        if isinstance(event, EndedBefore):
            self._past.update(event.numbers)
            concerned = [number for number in self.listeners if number in self._past]
        elif isinstance(event, ActorEnded):
            self._bury(event)
            concerned = [event.number]
        else:
            self.there.add(event)
            concerned = [event]
        for number in concerned:
            for listener in list(self.listeners.get(number, [])):
                listener()

    def _bury(self, gone: ActorEnded) -> None:
        self.there.discard(gone.number)
        self._gone[gone.number] = gone
        while len(self._gone) > ENDS_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._past.add(oldest)


def _tidings_of(runtime: Runtime, home: ActorId) -> _LightActorEvents:
    tidings = runtime.extras.get(f"tidings of {home}")
    if not isinstance(tidings, _LightActorEvents):
        tidings = runtime.extras[f"tidings of {home}"] = _LightActorEvents(runtime, home)
    return tidings


async def request_end(runtime: Runtime, watch: ActorStatusWatch, reason: str) -> None:
    """Ask an actor that is there to end in order; one that is not there, or does not answer, is left as it is."""
    if watch.endpoint is None:
        return
    with trio.move_on_after(ASK_S):
        peer = runtime.caller.peer(watch.endpoint, keyed=True)
        try:
            await peer.request(RequestShutdown(number=watch.number, reason=reason))
        except FrayError:
            pass  # it is going, or gone: whoever asks waits for its end
