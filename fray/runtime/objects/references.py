"""References to stored objects that this process holds, and the updates it sends to their owners.

References are made and dropped on any thread, also by the garbage collector. Such events are queued there, and
reported in the loop, in order, as one message per burst and owner. A process reports once that it holds an object and
once that it has released it, however many references there are: so the traffic does not grow with the references.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import trio
from attrs import define, field

from fray.errors import ActorDied, FrayError, ObjectLost
from fray.model.ids import mint
from fray.model.service_key import ServiceKey
from fray.runtime.objects.exports import call_export, exports_of
from fray.runtime.objects.host_copies import HostCopies
from fray.runtime.objects.store import (
    ARRIVED,
    HOLD,
    IN_TRANSIT,
    OBJECT_STORE,
    RELEASE,
    Home,
    ObjectStore,
    Place,
    ReferenceUpdate,
)
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling

if TYPE_CHECKING:
    from fray.runtime.calls.futures import CallFuture

_STORED, _REFERENCED, _DROPPED = "stored", "referenced", "dropped"


@define(eq=False)
class RemoteOwner:
    """State of one process whose objects are held here: references per object, and updates not sent yet."""

    home: Home
    counts: dict[int, int] = field(factory=dict)
    updates: list[ReferenceUpdate] = field(factory=list)
    watch: CallFuture | None = None


class HeldReferences:
    """The references one runtime holds. Public methods may be called on any thread unless they say otherwise."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        # A deque, because `append` is atomic: finalizers run on any thread, within any lock, and must not block.
        self._events: deque[tuple[str, Place, Any]] = deque()
        self._scheduled = False
        self._owners: dict[Home, RemoteOwner] = {}
        self._copies: HostCopies | None = None

    def put(self, store: ObjectStore, pickle: bytes, views: Sequence[memoryview], first: bool) -> Place:
        """Put what `packed` returned into this process's own store, for the reference that is made next."""
        number, size = store.store(pickle, views, first)
        place = (*store.home, number)
        self._events.append((_STORED, place, (store, size)))  # queued before the reference, whenever the loop reads
        return place

    def added(self, place: Place, token: str = "") -> None:
        """Count a new reference; ``token`` is the one it arrived with, if it was unpickled."""
        self._events.append((_REFERENCED, place, token))
        self._schedule()

    def removed(self, place: Place) -> None:
        """Count a dropped reference. Called by finalizers."""
        self._events.append((_DROPPED, place, ""))
        self._schedule()

    def sent(self, place: Place) -> str:
        """Return a new token for a reference that is being pickled."""
        token = mint(self.runtime.rng)
        self._events.append((IN_TRANSIT, place, token))
        self._schedule()
        return token

    def _schedule(self) -> None:
        # One crossing into the loop for a burst. Two threads that see False at once cost one report too many.
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self.runtime.token.run_sync_soon(self._report)
        except trio.RunFinishedError:
            pass  # the loop has ended, and with it everything this process held

    def _report(self) -> None:
        self._scheduled = False  # first, so that events queued from here on schedule another report
        touched: dict[Home, RemoteOwner] = {}
        while self._events:
            event, place, token = self._events.popleft()
            home, number = place[:2], place[2]
            if event == _STORED:
                store, size = token
                store.add(number, size)
                continue
            owner = touched[home] = self._owners.setdefault(home, RemoteOwner(home))
            self._apply(owner, event, number, token)
        for owner in touched.values():
            # One message for each owner and burst: unpickling a list of 1,000 references is one update.
            updates, owner.updates = owner.updates, []
            if updates:
                self._send_updates(owner, updates)

    def _apply(self, owner: RemoteOwner, event: str, number: int, token: str) -> None:
        if event == IN_TRANSIT:
            owner.updates.append((IN_TRANSIT, number, token))
        elif event == _REFERENCED:
            count = owner.counts.get(number, 0)
            owner.counts[number] = count + 1
            # The first reference here makes this process a holder. Its own counts never travel.
            if not count:
                owner.updates.append((HOLD, number, ""))
            # After HOLD: the object must not be without a holder between the two updates.
            if token:
                owner.updates.append((ARRIVED, number, token))
        elif owner.counts[number] > 1:
            owner.counts[number] -= 1
        else:
            del owner.counts[number]
            owner.updates.append((RELEASE, number, ""))

    def _send_updates(self, owner: RemoteOwner, updates: list[ReferenceUpdate]) -> None:
        store, session = self.own_store(owner.home), self.runtime.session
        if store is not None:
            # Directly: this process may own the object itself, and need not be registered for that.
            store.apply_updates(session, updates)
            return
        try:
            # First, so that the owner watches this process before it counts it as a holder. The call stays open for
            # life: its end with the connection tells the owner that this process is gone.
            if owner.watch is None:
                exports = exports_of(self.runtime)
                # The owner follows the registry entry of these exports, which is the fastest way to notice this
                # process's end.
                exports.open()
                owner.watch = self._call_owner(owner.home, "watch_holder", session, exports.actor_id)
                owner.watch.add_done_callback(lambda _: self._on_owner_ended(owner))
            self._call_owner(owner.home, "update", session, updates)
        except FrayError:
            pass  # the cluster has ended, or the owner does not keep up: it will notice the end of this process

    def _on_owner_ended(self, owner: RemoteOwner) -> None:
        if self._copies is not None:
            self._copies.drop_all_of(owner.home)
        # With references left the entry stays: their removal still has to find its count.
        if self._owners.get(owner.home) is owner and not owner.counts:
            del self._owners[owner.home]

    def _call_owner(self, home: Home, method: str, *args: Any) -> CallFuture:
        return call_export(self.runtime, home[0], "use", home[1], method, *args)

    # Objects ---------------------------------------------------------------------------------------------------------

    def own_store(self, home: Home) -> ObjectStore | None:
        """Return the store at ``home`` if it belongs to this process."""
        store = self.runtime.services.get(OBJECT_STORE)
        return store if store is not None and store.home == home else None

    async def read(self, place: Place) -> pickling.Boxed:
        """Return an object of any process, for `pickling.unbox`. Loop only. Raises ObjectLost."""
        store = self.own_store(place[:2])
        return await (self.fetch(place) if store is None else store.read(place[2]))

    async def release(self, place: Place) -> None:
        """End an object, although references remain. Loop only."""
        store = self.own_store(place[:2])
        if store is not None:
            await store.end_object(place[2])
            return
        with contextlib.suppress(ActorDied):  # its owner has ended, and the object with it
            await self._call_owner(place[:2], "end_object", place[2])

    async def fetch(self, place: Place) -> pickling.Boxed:
        """Return an object of another process, for `pickling.unbox`. Loop only.

        Raises:
            ObjectLost: it no longer exists, or its owner has ended.
        """
        if self._copies is None:
            self._copies = HostCopies(self.runtime, self._call_owner)
        try:
            return await self._copies.read(place)
        # The caller of `get` thinks of objects, not of the actor that serves them.
        except ActorDied as error:
            raise ObjectLost("object no longer exists: the job or driver that owned it has ended") from error

    async def stats(self, place: Place) -> tuple[int, int, int, int]:
        """Return what `ObjectStore.stats` returns. Loop only. Raises ObjectLost."""
        store = self.own_store(place[:2])
        if store is not None:
            return await store.stats(place[2])
        try:
            found: tuple[int, int, int, int] = await self._call_owner(place[:2], "stats", place[2])
        except ActorDied as error:
            raise ObjectLost("object no longer exists: the job or driver that owned it has ended") from error
        return found

    async def deposit(self, home: Home, pickle: bytes, views: Sequence[memoryview], first: bool) -> tuple[Place, str]:
        """Put what `packed` returned into another process's store; return its address and token. Loop only.

        Raises:
            ObjectLost: that process has ended.
        """
        token = mint(self.runtime.rng)
        # Out-of-band, so that they travel beside the frame and in shared memory on the same machine.
        about = pickle, [pickling.PickleBuffer(view) for view in views], first, token
        route = self.runtime.caller.route(f"actor:{home[0]}", "the process that stores objects")
        try:
            number: int = await route.call("use", (home[1], "deposit", *about))
        except ActorDied as error:
            raise ObjectLost("cannot store the object: the job or driver that would own it has ended") from error
        return (*home, number), token


REFERENCES: ServiceKey[HeldReferences] = ServiceKey("held references")


def references_of(runtime: Runtime) -> HeldReferences:
    """Return the held references of a runtime, made at the first call."""
    return runtime.services.get_or_make(REFERENCES, lambda: HeldReferences(runtime))
