"""What a call, a result or an item carries: a pickle, and the large buffers that stay outside it.

The buffers that `payload.pack` finds are views of the sender's objects. A parcel that outlives the statement that made
it must not change with them: `settle` copies what somebody else may still write to, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from mmap import mmap
from typing import Any, TypeAlias

from attrs import define, frozen

from fray.net.buffers import shared_memory as segments
from fray.net.buffers.mapped_segments import MappedSegments
from fray.net.buffers.shared_memory import SEGMENT_FROM_BYTES, Snapshot
from fray.net.codec import Bytes

Source: TypeAlias = "memoryview | Snapshot | BufferLoan"
"""A flat view of bytes, a copy of some in a segment of ours, or a loan that goes back as it is."""

BUFFERS_LIMIT = 4096
"""Buffers of one call, result or item. Of what has more all stay in the pickle: flows cost more than copies."""
INLINE_UP_TO_BYTES = 64 * 1024
"""Smaller buffers travel inside the frame and are always copied."""


@define(eq=False)
class BufferLoan:
    """All bytes of a loan of the receiver's, which nobody here can see any more."""

    loan: int
    lender: MappedSegments
    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)


@define(eq=False)
class PickledObject:
    """``pickle`` is empty where it is the first of ``sources`` itself, being large."""

    pickle: bytes
    sources: list[Source]
    pickled_first: bool = False
    in_segments: bool = False
    """What is large has been copied into segments, as far as there was room."""
    reserved_bytes: int = 0
    """Of its buffers, where its caller keeps count of those of all unanswered calls."""

    def __len__(self) -> int:
        """Bytes of everything."""
        return len(self.pickle) + self.bulk_bytes

    @property
    def bulk_bytes(self) -> int:
        """Of all buffers."""
        return sum(map(size_of, self.sources))


def size_of(source: Source) -> int:
    """Bytes of one buffer."""
    return len(source) if isinstance(source, memoryview) else source.size


def is_large(parcel: PickledObject) -> bool:
    """Whether any of its buffers is worth a segment."""
    return any(size_of(source) >= SEGMENT_FROM_BYTES for source in parcel.sources)


def _ignore() -> None:
    """Do nothing: no task waits for the buffers."""


class IncomingTransfer:
    """The buffers of one frame that has arrived; some may still be on their way."""

    __slots__ = ("buffers", "chunks", "missing_count", "on_ready", "pickled_first", "size")

    def __init__(self, count: int, pickled_first: bool, size: int) -> None:
        self.size = size
        self.buffers: list[Bytes] = [b""] * count
        self.pickled_first = pickled_first
        self.missing_count = 0
        self.chunks: list[int] = []
        """Numbers of the chunk transfers that bring the missing buffers."""
        self.on_ready: Callable[[], None] = _ignore
        """Called in the loop when the last missing buffer has arrived."""

    @property
    def is_ready(self) -> bool:
        return not self.missing_count

    def take(self, body: Bytes) -> tuple[Bytes, list[Bytes]]:
        """Return the pickle (``body``, unless it is a buffer itself) and its buffers; keep no reference to them."""
        buffers, self.buffers = self.buffers, []
        return (buffers[0], buffers[1:]) if self.pickled_first else (body, buffers)

    def buffer_setter(self, at: int) -> Callable[[Bytes], None]:
        """Return the function that stores buffer number ``at`` when it arrives."""

        def store(buffer: Bytes) -> None:
            self.buffers[at] = buffer
            self.missing_count -= 1
            if not self.missing_count:
                on_ready, self.on_ready = self.on_ready, _ignore  # no cycles: buffers are freed when last used
                on_ready()

        return store


@define(eq=False)
class ReceivedObject:
    """An answer or item as it arrived, with buffers outside its pickle."""

    transfer: IncomingTransfer
    body: Bytes

    def __len__(self) -> int:
        """Return its size in bytes, the same as `PickledObject` had."""
        return len(self.body) + self.transfer.size


@frozen
class TransferCapabilities:
    """What is known of the receiver of a parcel."""

    segments: bool = False
    """It is another process: copies may be made in segments, where memory is warm."""
    lender: MappedSegments | None = None
    """Its segments: what lies there goes back as it is, if nobody here can see it any more."""


PRIVATE = TransferCapabilities()


def detach_buffers(parcel: PickledObject, terms: TransferCapabilities = PRIVATE) -> None:
    """Make the parcel independent of the objects it was made of. Call it when the sender has let go of them."""
    sources, parcel.sources = parcel.sources, []
    sources.reverse()
    while sources:
        parcel.sources.append(_detached(sources, terms))


def _detached(sources: list[Source], terms: TransferCapabilities) -> Source:
    """The last of ``sources``, taken from there so that no reference is left behind, and settled."""
    source = sources.pop()
    if not isinstance(source, memoryview) or type(source.obj) is bytes:
        return source
    alone = _is_array_alone(source)
    owner = None if alone else _received_owner(source)
    if owner is not None:
        del source
        alone = sys.getrefcount(owner) == _BY_NAME
        lender = terms.lender if alone else None
        loan = lender.find(owner) if lender is not None else None
        if loan is not None and lender is not None:
            lender.give_up(loan)
            return BufferLoan(loan, lender, memoryview(owner).cast("B"))
        source = memoryview(owner).cast("B")
    if alone:
        return source
    pool = segments.pool() if terms.segments and len(source) >= SEGMENT_FROM_BYTES else None
    kept = None if pool is None else pool.store(source)
    return _copied(source) if kept is None else kept


def _copied(source: memoryview) -> memoryview:
    copy = memoryview(segments.allocate_receive_buffer(len(source)))
    copy[:] = source
    return copy


# Whether anybody else can still see a buffer -------------------------------------------------------------------------
#
# Only counting references can tell. A count that is too high costs a copy that was not needed; it must never say
# "alone" wrongly. An array that owns its memory, or is a view of such an array, is reached over counted links only.
# What owns received bytes is reached over memory views, which share their links; so there everything of ours is
# dropped first, and then the owner must have no reference but the one that asks.


def _count(view: memoryview) -> int:
    return sys.getrefcount(view.obj)


def _calibrate() -> tuple[int, int, int]:
    """What is counted for an object that only a view, only an attribute, and only a local name holds."""

    class Holder:
        base: Any

    holder = Holder()
    holder.base = bytearray(1)
    name = bytearray(1)
    return _count(memoryview(bytearray(1))), sys.getrefcount(holder.base), sys.getrefcount(name)


_BY_VIEW, _BY_BASE, _BY_NAME = _calibrate()
_CHAIN_LIMIT = 8


def _is_array_alone(view: memoryview) -> bool:
    """Whether ``view`` is the only way to a numpy array that owns its memory, or to the only view of one."""
    array: Any = view.obj
    if type(array).__module__ != "numpy" or sys.getrefcount(array) != _BY_VIEW + 1:
        return False
    for _ in range(_CHAIN_LIMIT):
        base = getattr(array, "base", None)
        if base is None:
            return bool(array.flags.owndata)
        if type(base).__module__ != "numpy" or sys.getrefcount(base) != _BY_BASE + 1:
            return False
        array = base
    return False


def _received_owner(view: memoryview) -> Any | None:
    """What owns the memory, if these are all bytes of a buffer that Fray received or mapped."""
    found: Any = view.obj
    for _ in range(_CHAIN_LIMIT):
        if isinstance(found, memoryview):
            found = found.obj
        elif getattr(found, "base", None) is not None:
            found = found.base
        else:
            break
    if type(found) in (bytearray, mmap) or hasattr(type(found), "_length_"):
        return found if memoryview(found).nbytes == len(view) else None
    return None
