"""Large buffers beside the frames of one channel. Pure.

The law. A buffer travels as a *transfer*: a frame says its number and size first, then its bytes follow as frames of
kind BULK, numbered and resumed like all others. Frames go first; chunks fill the rest, one between two batches of
frames, and never more than `WINDOW_BYTES` that the peer has not acknowledged. Transfers take turns by *flow* (whose
calls they belong to), the first few flows at a time: a large buffer holds up what comes behind it on its own flow and
nobody else. Nothing is copied on the way out, and on the way in a chunk may be received straight into its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from math import inf
from typing import TypeAlias

from attrs import Factory, define

from fray.errors import MessageTooLarge, ProtocolMismatch
from fray.net.codec import ACK_BYTES, HEADER, HEADER_BYTES, Bytes, Kind

CHUNK_BYTES = 256 * 1024 - 64
WINDOW_BYTES = 8 * 1024 * 1024
"""Chunks of one channel that may be on their way unacknowledged; the sender keeps no copy of them."""
NEAR_WINDOW_BYTES = 2 * 1024 * 1024
"""The same where both ends are on one machine: what is on its way is what small calls wait behind."""
FLOWS_AT_ONCE = 4
"""Flows whose transfers take turns; more would only make all of them late."""
TRANSFER_LIMIT_BYTES = 4 * 1024**3
"""Largest sum of the buffers of one call, result or item."""
PLACE_BYTES = ACK_BYTES + HEADER_BYTES
"""So much of a transport message tells whether it is one chunk, and of which transfer."""
_BULK = int(Kind.BULK)
_pack = HEADER.pack

Allocate: TypeAlias = Callable[[int], Bytes]
Landed: TypeAlias = Callable[[Bytes], None]


def check_transfer(size_bytes: int, what: str) -> None:
    """Hold the buffers of one call, result or item to their limit.

    Raises:
        MessageTooLarge: they are over it.
    """
    if size_bytes > TRANSFER_LIMIT_BYTES:
        text = (
            f"{what} has {size_bytes} bytes in large buffers and the limit is {TRANSFER_LIMIT_BYTES}: "
            "write it to storage and send its path, or send it in pieces"
        )
        raise MessageTooLarge(text, size_bytes=size_bytes, limit_bytes=TRANSFER_LIMIT_BYTES)


# Sending -------------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Outgoing:
    number: int
    view: memoryview
    at: int = 0
    after: float = inf
    """Number of the frame that announces it."""


@define(eq=False)
class ChunkSender:
    """Transfers that are not wholly handed to a connection, by flow."""

    numbered: int = 0
    waiting_bytes: int = 0
    _flows: dict[Hashable, deque[_Outgoing]] = Factory(dict)
    _turns: deque[Hashable] = Factory(deque)

    def add(self, flow: Hashable, view: memoryview) -> int:
        """Queue a flat view of bytes, which must not change until it has been delivered; returns its number.

        Nothing of it is sent before `announced`.
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
        """The frame that announces these transfers is queued, and will have the number ``after``."""
        fresh = set(numbers)
        for queue in self._flows.values():
            for outgoing in reversed(queue):
                if outgoing.number in fresh:
                    outgoing.after = after
                elif outgoing.after < inf:
                    break

    def drop(self, numbers: Iterable[int]) -> None:
        """Nobody wants the rest of these any more."""
        doomed = set(numbers)
        for flow, queue in list(self._flows.items()):
            kept = deque(each for each in queue if each.number not in doomed)
            self.waiting_bytes -= sum(len(each.view) - each.at for each in queue if each.number in doomed)
            self._flows[flow] = kept
            if not kept:
                self._forget(flow)

    def is_due(self, numbered: int) -> bool:
        """Whether `take` has a chunk when so many frames have been sent."""
        return any(queue[0].after <= numbered for queue in self._flows.values())

    def take(self, numbered: int) -> tuple[bytes, memoryview] | None:
        """The next chunk as header and body, of a transfer that is announced by one of so many frames sent."""
        flow = next((flow for flow in self._turns if self._flows[flow][0].after <= numbered), None)
        if flow is None:
            return None
        queue = self._flows[flow]
        outgoing = queue[0]
        piece = outgoing.view[outgoing.at : outgoing.at + CHUNK_BYTES]
        outgoing.at += len(piece)
        self.waiting_bytes -= len(piece)
        if outgoing.at >= len(outgoing.view):
            queue.popleft()
        if queue:
            self._turns.remove(flow)
            self._turns.insert(min(len(self._turns), FLOWS_AT_ONCE - 1), flow)
        else:
            self._forget(flow)
        return _pack(len(piece), _BULK, 0, 0, 0, outgoing.number), piece

    def clear(self) -> None:
        self._flows.clear()
        self._turns.clear()
        self.waiting_bytes = 0

    def _forget(self, flow: Hashable) -> None:
        del self._flows[flow]
        self._turns.remove(flow)


# Receiving -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Incoming:
    size: int
    landed: Landed
    buffer: Bytes | None = None
    view: memoryview | None = None
    at: int = 0


@define(eq=False)
class ChunkReceiver:
    """Transfers that have been announced and are not whole."""

    allocate: Allocate = bytearray
    _expected: dict[int, _Incoming] = Factory(dict)

    def expect(self, number: int, size: int, on_complete: Landed) -> None:
        """Transfer ``number`` will come; ``landed`` is called with its buffer when it is whole."""
        if size <= 0 or size > TRANSFER_LIMIT_BYTES or number in self._expected:
            raise ProtocolMismatch(f"the peer announced transfer {number} of {size} bytes")
        self._expected[number] = _Incoming(size, on_complete)

    def forget(self, numbers: Iterable[int]) -> None:
        """What still comes of these is thrown away."""
        for number in numbers:
            self._expected.pop(number, None)

    def place(self, start: Bytes, message_bytes: int) -> memoryview | None:
        """Where the body of a transport message belongs that starts like this, if it is one chunk and expected.

        `placed` must follow once it is there. A chunk that comes again after a cut goes to the same place.
        """
        size, kind, _, _, _, number = HEADER.unpack_from(start, ACK_BYTES)
        incoming = self._expected.get(number) if kind == _BULK else None
        if incoming is None or size + PLACE_BYTES != message_bytes:
            return None
        return self._room(incoming, size)

    def placed(self, number: int, size: int) -> None:
        """The chunk has been received into its place."""
        incoming = self._expected.get(number)
        if incoming is not None:
            incoming.at += size
            if incoming.at == incoming.size:
                del self._expected[number]
                assert incoming.buffer is not None
                incoming.view = None
                incoming.landed(incoming.buffer)

    def on_chunk(self, number: int, body: Bytes) -> None:
        """A chunk that was not received into its place: copy it there."""
        incoming = self._expected.get(number)
        if incoming is not None:
            self._room(incoming, len(body))[:] = body
            self.placed(number, len(body))

    def clear(self) -> None:
        self._expected.clear()

    def __len__(self) -> int:
        return len(self._expected)

    def _room(self, incoming: _Incoming, size: int) -> memoryview:
        if incoming.at + size > incoming.size or size == 0:
            raise ProtocolMismatch(f"the peer sent more than the {incoming.size} bytes it announced")
        if incoming.view is None:
            incoming.buffer = self.allocate(incoming.size)
            incoming.view = memoryview(incoming.buffer)
        return incoming.view[incoming.at : incoming.at + size]
