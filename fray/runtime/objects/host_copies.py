"""Copies of other hosts' objects, one on each host, which all readers of the host share.

The owner of an object notes for each host the process that has received it, and sends other readers there, who map that
process's segment. When that process has ended, or has dropped its copy, the reader asks the owner again and receives
the object itself. A copy lives as long as its object and the process that has it, within `COPIES_LIMIT_BYTES`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from attrs import define, field

from fray.errors import ActorDied, ObjectLost
from fray.net.buffers import segment_directories, shared_memory
from fray.net.buffers.shared_memory import SEGMENT_FROM_BYTES
from fray.runtime.objects.exports import exports_of
from fray.runtime.objects.store import CopyAt, CopyToKeep, Home, Place, StoredObject, copy_buffer_in_loop, wait_to_share
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PickledObject

COPIES_LIMIT_BYTES = 1024**3
"""Total size of the copies in one process; above it, the one that was not read for longest is dropped."""


@define(eq=False)
class HostCopy:
    """Copy that arrives or has arrived; without a record it has not."""

    record: StoredObject | None = None
    ended: trio.Event = field(factory=trio.Event)


class HostCopies:
    """Copies that one process has for its host. Loop only.

    Args:
        call: calls a method of another process's exported object: ``call(home, method, *args)``.
    """

    def __init__(self, runtime: Runtime, call: Callable[..., Awaitable[Any]]) -> None:
        self._runtime, self._call = runtime, call
        self._copies: dict[Place, HostCopy] = {}
        """Copies in order of use, that of the longest ago first."""
        exports = exports_of(runtime)
        self._home: Home = (exports.actor_id, exports.export_object(self))

    async def read(self, place: Place) -> pickling.Boxed:
        """Return an object of another process, for `pickling.unbox`. Raises ObjectLost, ActorDied: its owner's end."""
        copy = self._copies.get(place)
        if copy is None or copy.record is None:
            return await self._receive(place, copy or HostCopy())
        self._copies[place] = self._copies.pop(place)
        return copy.record.box()

    async def _receive(self, place: Place, copy: HostCopy) -> pickling.Boxed:
        # Before the owner names this process to other readers.
        self._copies[place] = copy
        try:
            boxed = await self._ask_owner(place)
            if not isinstance(boxed, CopyToKeep):
                return boxed
            copy.record = await _kept(boxed.box)
            if copy.record is None:
                return boxed.box
            self._copies[place] = copy
            return copy.record.box()
        finally:
            # Those that wait for it read it, or ask the owner again.
            copy.ended.set()
            if copy.record is None and self._copies.get(place) is copy:
                del self._copies[place]
            self._drop_oldest()

    async def _ask_owner(self, place: Place) -> pickling.Boxed | CopyToKeep:
        home, number = place[:2], place[2]
        reader = segment_directories.host_key(), self._runtime.session, self._home
        failed: Home | None = None
        while True:
            try:
                found = await self._call(home, "fetch_for_host", number, *reader, failed)
            except AttributeError:  # an owner of the previous release
                found = await self._call(home, "fetch", number)
            if not isinstance(found, CopyAt):
                boxed: pickling.Boxed | CopyToKeep = found
                return boxed
            failed = found.home
            try:
                if failed == self._home:
                    return (await self._arrived(place)).box()
                boxed = await self._call(failed, "fetch", place)
                return boxed
            except (ActorDied, ObjectLost):
                continue  # that process has ended, or has dropped its copy

    async def _arrived(self, place: Place) -> StoredObject:
        copy = self._copies.get(place)
        if copy is not None and copy.record is None:
            await copy.ended.wait()
        if copy is None or copy.record is None:
            raise ObjectLost("this process has no copy of the object")
        return copy.record

    async def fetch(self, place: Place) -> PickledObject:
        """Return a copy to another reader of this host. Raises ObjectLost."""
        boxed = (await self._arrived(place)).boxed()
        await wait_to_share(boxed)
        return boxed

    async def drop(self, places: Sequence[Place]) -> None:
        """Drop copies of objects that have ended. What was read stays readable."""
        for place in places:
            self._copies.pop(place, None)

    def drop_all_of(self, home: Home) -> None:
        """Drop the copies of an owner's objects, as it has ended."""
        self._copies = {place: copy for place, copy in self._copies.items() if place[:2] != home}

    def _drop_oldest(self) -> None:
        arrived = [(place, copy.record.size) for place, copy in self._copies.items() if copy.record is not None]
        total = sum(size for _, size in arrived)
        for place, size in arrived:
            if total <= COPIES_LIMIT_BYTES:
                break
            del self._copies[place]
            total -= size


async def _kept(box: pickling.Boxed) -> StoredObject | None:
    """Return the object in segments that other processes can map; None if there is no room."""
    pickled, buffers, first = box
    views = [memoryview(buffer) for buffer in buffers]
    pieces = [await copy_buffer_in_loop(view) for view in views]
    large = [piece for piece, view in zip(pieces, views, strict=True) if len(view) >= SEGMENT_FROM_BYTES]
    if not all(isinstance(piece, shared_memory.Snapshot) for piece in large):
        return None
    return StoredObject(pickled, tuple(pieces), first)
