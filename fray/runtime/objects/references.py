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
from fray.runtime.objects.exports import call_export, shelf_of
from fray.runtime.objects.store import (
    ARRIVED,
    HOLD,
    LET_GO,
    TRAVELS,
    Home,
    ObjectStore,
    Told,
)
from fray.runtime.serialization import pickling

if TYPE_CHECKING:
    from fray.runtime.calls.call_future import CallFuture
    from fray.runtime.context import Runtime

Place: TypeAlias = tuple[ActorId, int, int]
"""An object: its home, and its number there."""
_ADDED, _BORN, _GONE = "added", "born", "gone"


@define(eq=False)
class ObjectOwner:
    """One process whose objects are held here."""

    home: Home
    counts: dict[int, int] = field(factory=dict)
    told: list[Told] = field(factory=list)
    staying: CallFuture | None = None


class HeldReferences:
    """Of one runtime. Public methods may be called on any thread but where they say otherwise."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._events: deque[tuple[str, Place, Any]] = deque()
        self._poked = False
        self._owners: dict[Home, ObjectOwner] = {}

    def put(self, store: ObjectStore, pickle: bytes, views: Sequence[memoryview], first: bool) -> Place:
        """Put what `packed` gave into this process's own store, for the reference that is made now."""
        number, size = store.keep(pickle, views, first)
        place = (*store.home, number)
        self._events.append((_ADDED, place, (store, size)))  # before the reference, whoever looks at the events when
        return place

    def born(self, place: Place, token: str = "") -> None:
        """A reference has been made here; ``token``: it has arrived with it."""
        self._events.append((_BORN, place, token))
        self._poke()

    def gone(self, place: Place) -> None:
        """A reference is gone. Called by finalizers."""
        self._events.append((_GONE, place, ""))
        self._poke()

    def travels(self, place: Place) -> str:
        """A reference is being pickled: its token."""
        token = mint(self.runtime.rng)
        self._events.append((TRAVELS, place, token))
        self._poke()
        return token

    def _poke(self) -> None:
        if self._poked:
            return
        self._poked = True
        try:
            self.runtime.token.run_sync_soon(self._tell)
        except trio.RunFinishedError:
            pass  # the loop has ended, and with it all that was held

    def _tell(self) -> None:
        """In the loop."""
        self._poked = False  # first: whoever comes from here on pokes again
        touched: dict[Home, ObjectOwner] = {}
        while self._events:
            what, place, token = self._events.popleft()
            home, number = place[:2], place[2]
            if what == _ADDED:
                store, size = token
                store.add(number, size)
                continue
            owner = touched[home] = self._owners.setdefault(home, ObjectOwner(home))
            self._note(owner, what, number, token)
        for owner in touched.values():
            told, owner.told = owner.told, []
            if told:
                self._say(owner, told)

    def _note(self, owner: ObjectOwner, what: str, number: int, token: str) -> None:
        if what == TRAVELS:
            owner.told.append((TRAVELS, number, token))
        elif what == _BORN:
            count = owner.counts.get(number, 0)
            owner.counts[number] = count + 1
            if not count:
                owner.told.append((HOLD, number, ""))
            if token:
                owner.told.append((ARRIVED, number, token))
        elif owner.counts[number] > 1:
            owner.counts[number] -= 1
        else:
            del owner.counts[number]
            owner.told.append((LET_GO, number, ""))

    def _say(self, owner: ObjectOwner, told: list[Told]) -> None:
        store, session = self.own_store(owner.home), self.runtime.session
        if store is not None:
            store.hear(session, told)
            return
        try:
            if owner.staying is None:
                shelf = shelf_of(self.runtime)
                shelf.stand()
                owner.staying = self._ask(owner.home, "stay", session, shelf.actor_id)
                owner.staying.add_done_callback(lambda _: self._left(owner))
            self._ask(owner.home, "tell", session, told)
        except FrayError:
            pass  # the cluster has ended, or the owner does not keep up: it will notice our end

    def _left(self, owner: ObjectOwner) -> None:
        """The owner has ended."""
        if self._owners.get(owner.home) is owner and not owner.counts:
            del self._owners[owner.home]

    def _ask(self, home: Home, method: str, *args: Any) -> CallFuture:
        return call_export(self.runtime, home[0], "use", home[1], method, *args)

    # Objects ---------------------------------------------------------------------------------------------------------

    def own_store(self, home: Home) -> ObjectStore | None:
        """The store, if it is this process's own."""
        store = self.runtime.extras.get("objects")
        mine = isinstance(store, ObjectStore) and store.home == home
        return store if mine else None  # type: ignore[return-value]

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
            number: int = await self.runtime.caller.call(route, "use", (home[1], "deposit", *about))
        except ActorDied as error:
            raise ObjectLost("nothing can be put: the job or driver that would own it is gone") from error
        return (*home, number), token


def holdings_of(runtime: Runtime) -> HeldReferences:
    """Those of a runtime, made when first asked for."""
    found = runtime.extras.get("holdings")
    if found is None:
        found = runtime.extras.setdefault("holdings", HeldReferences(runtime))
    assert isinstance(found, HeldReferences)
    return found
