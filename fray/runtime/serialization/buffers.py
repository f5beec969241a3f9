"""Pickled objects with out-of-band buffers: the payload of a call, a result or an item.

The buffers that `pickling.pack` finds are views of the sender's objects. A `PickledObject` that outlives the statement
that made it must not change with them: `detach_buffers` copies the buffers that other code may still write to, and
no others. Buffers are never inside the pickle: 100 MB take 77 ms in it, and 8 µs beside it.
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
"""A flat view of bytes, a copy in a segment of this process, or a loan that is returned with its content."""

BUFFERS_LIMIT = 4096
"""Maximum buffers per object. Objects with more have all of them in the pickle: so many flows cost more than copies."""
INLINE_UP_TO_BYTES = 64 * 1024
"""Size up to which buffers are sent inside the frame, and always copied."""


@define(eq=False)
class BufferLoan:
    """All bytes of a loan from the receiver that no object of this process refers to any more."""

    loan: int
    lender: MappedSegments
    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)


@define(eq=False)
class PickledObject:
    """A pickle and its out-of-band buffers; a large pickle is itself the first of ``sources``, and ``pickle`` empty."""

    pickle: bytes
    sources: list[Source]
    pickled_first: bool = False
    in_segments: bool = False
    """Flag: large buffers have been copied into segments, as far as there was room."""
    reserved_bytes: int = 0
    """Bytes of its buffers that its caller counts towards the limit of unanswered calls."""

    def __len__(self) -> int:
        """Return the bytes of the pickle and all buffers."""
        return len(self.pickle) + self.bulk_bytes

    @property
    def bulk_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(map(size_of, self.sources))


def size_of(source: Source) -> int:
    """Return the size of one buffer in bytes."""
    return len(source) if isinstance(source, memoryview) else source.size


def is_large(pickled: PickledObject) -> bool:
    """Return whether any of its buffers is large enough for a segment."""
    return any(size_of(source) >= SEGMENT_FROM_BYTES for source in pickled.sources)


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
    """Ways in which the receiver of an object can take its buffers."""

    segments: bool = False
    """Flag: it is another process of this host, so copies may be made in segments, where memory is warm."""
    lender: MappedSegments | None = None
    """Segments borrowed from it: a buffer in them is returned without a copy if nothing here refers to it any more."""


PRIVATE = TransferCapabilities()


def detach_buffers(pickled: PickledObject, terms: TransferCapabilities = PRIVATE) -> None:
    """Make ``pickled`` independent of the objects it was made of, once the sender has dropped its references."""
    sources, pickled.sources = pickled.sources, []
    sources.reverse()
    while sources:
        pickled.sources.append(_detached(sources, terms))


def _detached(sources: list[Source], terms: TransferCapabilities) -> Source:
    """Pop the last of ``sources``, so that no reference is left behind, and return it or a copy."""
    source = sources.pop()
    # Immutable, so nothing can change it.
    if not isinstance(source, memoryview) or type(source.obj) is bytes:
        return source
    alone = _is_array_alone(source)
    owner = None if alone else _received_owner(source)
    if owner is not None:
        # Its reference would be counted.
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
    # Copied directly to where the receiver can map it, instead of twice.
    pool = segments.pool() if terms.segments and len(source) >= SEGMENT_FROM_BYTES else None
    snapshot = None if pool is None else pool.store(source)
    return copy_to_heap(source) if snapshot is None else snapshot


def copy_to_heap(source: memoryview) -> memoryview:
    """Return a copy outside of segments, in memory as it is used to receive large buffers."""
    copy = memoryview(segments.allocate_receive_buffer(len(source)))
    copy[:] = source
    return copy


# References to a buffer from elsewhere -------------------------------------------------------------------------------
#
# A result must be a snapshot, and only counting references can show that no other code sees its memory. A count that
# is too high costs an unneeded copy; a count that is too low would be wrong. An array that owns its memory, or is a
# view of such an array, is reached over counted links only. The owner of received bytes is reached over memory views,
# which share their links; so all references of this module are dropped first, and then the owner must have no
# reference but that of the function that counts.


def _count(view: memoryview) -> int:
    return sys.getrefcount(view.obj)


def _calibrate() -> tuple[int, int, int]:
    """Return the counts for an object with one reference: from a view, from an attribute, from a local name."""

    class Holder:
        base: Any

    holder = Holder()
    holder.base = bytearray(1)
    name = bytearray(1)
    return _count(memoryview(bytearray(1))), sys.getrefcount(holder.base), sys.getrefcount(name)


_BY_VIEW, _BY_BASE, _BY_NAME = _calibrate()
_CHAIN_LIMIT = 8


def _is_array_alone(view: memoryview) -> bool:
    """Return whether ``view`` is the only way to a numpy array that owns its memory, or to the only view of one."""
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
    """Return the owner of the memory if ``view`` spans all of a buffer that Fray received or mapped."""
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
