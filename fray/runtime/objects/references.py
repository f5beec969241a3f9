"""References to objects that were put: how many of each this process has, and what their owners are told of it.

References come and go on any thread, also where the collector runs; what happens is written down there and told in the
loop, in order, one message a burst and owner. A process says once that it has an object and once that it has it no
more, however many references there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import trio
from attrs import define, field

from fray.errors import ActorDied, FrayError, ObjectLost
from fray.model.ids import ActorId, mint
from fray.model.service_key import ServiceKey
from fray.runtime.objects.exports import call_export, exports_of
from fray.runtime.objects.store import (
    ARRIVED,
    HOLD,
    LET_GO,
    OBJECT_STORE,
    TRAVELS,
    Home,
    ObjectStore,
    ReferenceUpdate,
)
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling

if TYPE_CHECKING:
    from fray.runtime.calls.futures import CallFuture

Place: TypeAlias = tuple[ActorId, int, int]
"""An object: its home, and its number there."""
_ADDED, _BORN, _GONE = "added", "born", "gone"


@define(eq=False)
class ObjectOwner:
    """One process whose objects are held here."""

    home: Home
    counts: dict[int, int] = field(factory=dict)
    updates: list[ReferenceUpdate] = field(factory=list)
    watch: CallFuture | None = None


class HeldReferences:
    """Of one runtime. Public methods may be called on any thread but where they say otherwise."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._events: deque[tuple[str, Place, Any]] = deque()
        self._scheduled = False
        self._owners: dict[Home, ObjectOwner] = {}

    def put(self, store: ObjectStore, pickle: bytes, views: Sequence[memoryview], first: bool) -> Place:
        """Put what `packed` gave into this process's own store, for the reference that is made now."""
        number, size = store.store(pickle, views, first)
        place = (*store.home, number)
        self._events.append((_ADDED, place, (store, size)))  # before the reference, whoever looks at the events when
        return place

    def added(self, place: Place, token: str = "") -> None:
        """A reference has been made here; ``token``: it has arrived with it."""
        self._events.append((_BORN, place, token))
        self._schedule()

    def removed(self, place: Place) -> None:
        """A reference is gone. Called by finalizers."""
        self._events.append((_GONE, place, ""))
        self._schedule()

    def sent(self, place: Place) -> str:
        """A reference is being pickled: its token."""
        token = mint(self.runtime.rng)
        self._events.append((TRAVELS, place, token))
        self._schedule()
        return token

    def _schedule(self) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self.runtime.token.run_sync_soon(self._report)
        except trio.RunFinishedError:
            pass  # the loop has ended, and with it all that was held

    def _report(self) -> None:
        """In the loop."""
        self._scheduled = False  # first: whoever comes from here on pokes again
        touched: dict[Home, ObjectOwner] = {}
        while self._events:
            what, place, token = self._events.popleft()
            home, number = place[:2], place[2]
            if what == _ADDED:
                store, size = token
                store.add(number, size)
                continue
            owner = touched[home] = self._owners.setdefault(home, ObjectOwner(home))
            self._apply(owner, what, number, token)
        for owner in touched.values():
            told, owner.updates = owner.updates, []
            if told:
                self._send_updates(owner, told)

    def _apply(self, owner: ObjectOwner, what: str, number: int, token: str) -> None:
        if what == TRAVELS:
            owner.updates.append((TRAVELS, number, token))
        elif what == _BORN:
            count = owner.counts.get(number, 0)
            owner.counts[number] = count + 1
            if not count:
                owner.updates.append((HOLD, number, ""))
            if token:
                owner.updates.append((ARRIVED, number, token))
        elif owner.counts[number] > 1:
            owner.counts[number] -= 1
        else:
            del owner.counts[number]
            owner.updates.append((LET_GO, number, ""))

    def _send_updates(self, owner: ObjectOwner, told: list[ReferenceUpdate]) -> None:
        store, session = self.own_store(owner.home), self.runtime.session
        if store is not None:
            store.apply_updates(session, told)
            return
        try:
            if owner.watch is None:
                shelf = exports_of(self.runtime)
                shelf.open()
                owner.watch = self._ask(owner.home, "watch_holder", session, shelf.actor_id)
                owner.watch.add_done_callback(lambda _: self._on_owner_ended(owner))
            self._ask(owner.home, "update", session, told)
        except FrayError:
            pass  # the cluster has ended, or the owner does not keep up: it will notice our end

    def _on_owner_ended(self, owner: ObjectOwner) -> None:
        """The owner has ended."""
        if self._owners.get(owner.home) is owner and not owner.counts:
            del self._owners[owner.home]

    def _ask(self, home: Home, method: str, *args: Any) -> CallFuture:
        return call_export(self.runtime, home[0], "use", home[1], method, *args)

    # Objects ---------------------------------------------------------------------------------------------------------

    def own_store(self, home: Home) -> ObjectStore | None:
        """The store, if it is this process's own."""
        store = self.runtime.services.get(OBJECT_STORE)
        return store if store is not None and store.home == home else None

    async def fetch(self, place: Place) -> pickling.Boxed:
        """In the loop: the object of another process, for `payload.unboxed`.

        Raises:
            ObjectLost: it is gone, or its owner is.
        """
        try:
            boxed: pickling.Boxed = await self._ask(place[:2], "fetch", place[2])
        except ActorDied as error:
            raise ObjectLost("this object is gone with the job or driver that owned it") from error
        return boxed

    async def deposit(self, home: Home, pickle: bytes, views: Sequence[memoryview], first: bool) -> tuple[Place, str]:
        """In the loop: put what `packed` gave into another process's store; where it is, and its token.

        Raises:
            ObjectLost: that process is gone.
        """
        token = mint(self.runtime.rng)
        about = pickle, [pickling.PickleBuffer(view) for view in views], first, token
        route = self.runtime.caller.route(f"actor:{home[0]}", "the process that keeps objects")
        try:
            number: int = await route.call("use", (home[1], "deposit", *about))
        except ActorDied as error:
            raise ObjectLost("nothing can be put: the job or driver that would own it is gone") from error
        return (*home, number), token


REFERENCES: ServiceKey[HeldReferences] = ServiceKey("held references")


def references_of(runtime: Runtime) -> HeldReferences:
    """Those of a runtime, made when first asked for."""
    return runtime.services.get_or_make(REFERENCES, lambda: HeldReferences(runtime))
