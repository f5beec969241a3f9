"""Large buffers between the frames of one channel. Pure.

Contract: a buffer is sent as a *transfer*: a frame announces its number and size, then its bytes follow as frames of
kind BULK, numbered and resumed like all others, but numbered when they are sent, so that they never queue in front of a
call. Frames go first; chunks fill the rest, one between two batches of frames, and at most `WINDOW_BYTES` are
unacknowledged. Transfers take turns by *flow* (the calls they belong to), the first few flows at a time: a large buffer
delays only later buffers of its own flow. Nothing is copied when sending, and a received chunk may be read straight
into its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from math import inf
from typing import TypeAlias

from attrs import Factory, define, field

from fray.errors import ProtocolMismatch
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.net.codec import ACK_BYTES, HEADER, HEADER_BYTES, Bytes, Kind

CHUNK_BYTES = 256 * 1024 - 64
WINDOW_BYTES = 8 * 1024 * 1024
"""Limit of unacknowledged chunks of one channel; the sender keeps no copy of them."""
NEAR_WINDOW_BYTES = 2 * 1024 * 1024
"""The same limit between processes of one machine: small calls wait behind chunks in flight."""
FLOWS_AT_ONCE = 4
"""Number of flows whose transfers take turns; more would only delay all of them."""
PLACE_BYTES = ACK_BYTES + HEADER_BYTES
"""Number of bytes of a transport message that identify a chunk and its transfer."""
COUNTED_BYTES = 4 * 1024 * 1024
"""Step in which the memory of an incomplete transfer is counted: a large buffer takes memory as it is filled."""
_BULK = int(Kind.BULK)
_pack = HEADER.pack

Allocate: TypeAlias = Callable[[int], Bytes]
OnComplete: TypeAlias = Callable[[Bytes], None]


# Sending -------------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Outgoing:
    number: int
    view: memoryview
    at: int = 0
    after: float = inf
    """Number of frames that have been taken from the queue once its announcement has; `inf` before that is queued."""


@define(eq=False)
class ChunkSender:
    """Transfers that have not been completely passed to a connection, by flow."""

    numbered: int = 0
    waiting_bytes: int = 0
    _flows: dict[Hashable, deque[_Outgoing]] = Factory(dict)
    _turns: deque[Hashable] = Factory(deque)

    def add(self, flow: Hashable, view: memoryview) -> int:
        """Queue a flat view of bytes, which must not change until it has been delivered; return its number.

        Nothing of it is sent before `mark_announced`.
        """
        self.numbered += 1
        queue = self._flows.get(flow)
        if queue is None:
            queue = self._flows[flow] = deque()
            self._turns.append(flow)
        queue.append(_Outgoing(self.numbered, view))
        self.waiting_bytes += len(view)
        return self.numbered

    def mark_announced(self, numbers: Iterable[int], after: int) -> None:
        """Record that the frame that announces these transfers is queued, and will be taken as number ``after``."""
        fresh = set(numbers)
        for queue in self._flows.values():
            # From the end: a sender announces right after adding, so those in front of an announced one are announced
            # too.
            for outgoing in reversed(queue):
                if outgoing.number in fresh:
                    outgoing.after = after
                elif outgoing.after < inf:
                    break

    def drop(self, numbers: Iterable[int]) -> None:
        """Cancel the rest of these transfers."""
        cancelled = set(numbers)
        for flow, queue in list(self._flows.items()):
            remaining = deque(each for each in queue if each.number not in cancelled)
            # A part of the first one may have been sent, and has left the count then.
            self.waiting_bytes -= sum(len(each.view) - each.at for each in queue if each.number in cancelled)
            self._flows[flow] = remaining
            if not remaining:
                self._forget(flow)

    def is_due(self, taken: int) -> bool:
        """Return whether `take` has a chunk when so many frames have been taken from the queue."""
        # The first transfer of each flow only: the buffers of one flow keep the order of its calls.
        return any(queue[0].after <= taken for queue in self._flows.values())

    def take(self, taken: int) -> tuple[bytes, memoryview] | None:
        """Return the next chunk as header and body, of a transfer announced within so many frames taken."""
        # A chunk must not overtake the frame that announces it, or the peer could not place it.
        flow = next((flow for flow in self._turns if self._flows[flow][0].after <= taken), None)
        if flow is None:
            return None
        queue = self._flows[flow]
        outgoing = queue[0]
        part = outgoing.view[outgoing.at : outgoing.at + CHUNK_BYTES]
        outgoing.at += len(part)
        self.waiting_bytes -= len(part)
        if outgoing.at >= len(outgoing.view):
            queue.popleft()
        if queue:
            # Not at the end of the turns but behind the first few, which so finish before others begin.
            self._turns.remove(flow)
            self._turns.insert(min(len(self._turns), FLOWS_AT_ONCE - 1), flow)
        else:
            self._forget(flow)
        # The number of the transfer and no offset: chunks arrive in order, also after a resume.
        return _pack(len(part), _BULK, 0, 0, 0, outgoing.number), part

    def clear(self) -> None:
        self._flows.clear()
        self._turns.clear()
        self.waiting_bytes = 0

    def _forget(self, flow: Hashable) -> None:
        del self._flows[flow]
        self._turns.remove(flow)


# Receiving -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class TransferGroup:
    """Transfers of one object: a complete one takes memory until the others are complete, too."""

    missing: int = 0
    held_bytes: int = 0
    """Memory of its complete transfers, and of what has arrived beside them."""


@define(eq=False)
class _Incoming:
    size: int
    on_complete: OnComplete
    group: TransferGroup
    buffer: Bytes | None = None
    view: memoryview | None = None
    at: int = 0
    counted: int = 0
    """Bytes of memory it is counted with."""


@define(eq=False)
class ChunkReceiver:
    """Announced transfers of which not all of their group are complete."""

    allocate: Allocate = bytearray
    held_bytes: int = 0
    """Memory of all incomplete transfers, in steps of `COUNTED_BYTES`, and of their groups."""
    on_held: Callable[[int], None] = field(default=lambda held_bytes: None, repr=False)
    """Called with `held_bytes` when it has changed. It may clear this receiver."""
    _expected: dict[int, _Incoming] = Factory(dict)

    def expect(self, number: int, size: int, on_complete: OnComplete, group: TransferGroup | None = None) -> None:
        """Expect transfer ``number``; ``on_complete`` is called with its whole buffer. No group: one of its own."""
        # Size and number are the peer's word, and the size will be allocated.
        if size <= 0 or size > SIZE_LIMIT_BYTES or number in self._expected:
            raise ProtocolMismatch(f"the peer announced transfer {number} of {size} bytes")
        group = group or TransferGroup()
        group.missing += 1
        self._expected[number] = _Incoming(size, on_complete, group)

    def add_beside(self, group: TransferGroup, size_bytes: int) -> None:
        """Count what has arrived of the object beside its transfers, until they are complete."""
        group.held_bytes += size_bytes
        self._change_held(size_bytes)

    def forget(self, numbers: Iterable[int]) -> None:
        """Discard the rest of these transfers."""
        for number in numbers:
            incoming = self._expected.pop(number, None)
            if incoming is not None:
                self._leave_group(incoming.group, incoming.counted)

    def place(self, start: Bytes, message_bytes: int) -> memoryview | None:
        """Return where to receive the body of a transport message that starts like this, if it is an expected chunk.

        `placed` must follow once it is received. A chunk that is sent again after a lost connection goes to the same
        place.
        """
        size, kind, _, _, _, number = HEADER.unpack_from(start, ACK_BYTES)
        incoming = self._expected.get(number) if kind == _BULK else None
        # Only for a message that is this chunk alone; a connection sends them so.
        if incoming is None or size + PLACE_BYTES != message_bytes:
            return None
        return self._room(incoming, size)

    def placed(self, number: int, size: int) -> None:
        """Record that a chunk has been received into its place."""
        incoming = self._expected.get(number)
        if incoming is not None:
            # Only here, after the whole chunk: what a lost connection has placed in part is written again at the same
            # position.
            incoming.at += size
            if incoming.at == incoming.size:
                del self._expected[number]
                incoming.group.held_bytes += incoming.counted
                self._leave_group(incoming.group)
                assert incoming.buffer is not None
                incoming.view = None
                incoming.on_complete(incoming.buffer)

    def on_chunk(self, number: int, body: Bytes) -> None:
        """Copy a chunk that was not received into its place to there."""
        incoming = self._expected.get(number)
        # Unknown: its call was cancelled here, and the peer has not learned of that yet.
        if incoming is not None:
            self._room(incoming, len(body))[:] = body
            self.placed(number, len(body))

    def clear(self) -> None:
        self._expected.clear()
        if self.held_bytes:
            self.held_bytes = 0
            self.on_held(0)

    def _count(self, incoming: _Incoming, size: int) -> None:
        """Count the memory of a transfer that takes another ``size`` bytes."""
        if incoming.at + size > incoming.counted:
            steps = (incoming.at + size - 1) // COUNTED_BYTES + 1
            counted, incoming.counted = incoming.counted, min(incoming.size, steps * COUNTED_BYTES)
            self._change_held(incoming.counted - counted)

    def _leave_group(self, group: TransferGroup, released_bytes: int = 0) -> None:
        group.missing -= 1
        # In one step, as `on_held` may clear this receiver.
        self._change_held(-released_bytes - (0 if group.missing else group.held_bytes))

    def _change_held(self, by_bytes: int) -> None:
        if by_bytes:
            self.held_bytes += by_bytes
            self.on_held(self.held_bytes)

    def __len__(self) -> int:
        return len(self._expected)

    def _room(self, incoming: _Incoming, size: int) -> memoryview:
        if incoming.at + size > incoming.size or size == 0:
            raise ProtocolMismatch(f"the peer sent more than the {incoming.size} bytes it announced")
        self._count(incoming, size)
        # Allocated with the first chunk: announcements cost the peer nothing, so they must not cost memory here.
        if incoming.view is None:
            incoming.buffer = self.allocate(incoming.size)
            incoming.view = memoryview(incoming.buffer)
        return incoming.view[incoming.at : incoming.at + size]
