"""How the buffers of one conversation travel: inside the frame, as chunks beside it, or lent in shared memory.

A frame flagged BUFFERS has a table in front of its body, one entry a buffer. Each side of a conversation has an
`Exchange`. A side that has something large to send, to a process that may be on the same host, offers its segments
first (SHARE); the other proves that it can read them by answering so. What is lent then comes back as GIVEN_BACK when
the last view of it is gone there, or with its content as part of an answer. Loans that a break of the conversation
leaves open are spoilt: the borrower may live on and look at them (`fray.net.buffers.segment_allocator`).
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import trio
from attrs import define, field

from fray.errors import ChannelClosed, ChannelFull, ProtocolMismatch
from fray.net.buffers import shared_memory
from fray.net.buffers.chunks import check_transfer
from fray.net.buffers.mapped_segments import MappedSegments, SharedMemoryOffer
from fray.net.buffers.shared_memory import (
    SEGMENT_FROM_BYTES,
    SegmentPool,
    Snapshot,
    allocate_receive_buffer,
)
from fray.net.channel.public import Channel
from fray.net.codec import Bytes, Kind
from fray.runtime.serialization.buffers import (
    INLINE_UP_TO_BYTES,
    BufferLoan,
    IncomingTransfer,
    PickledObject,
    Source,
    TransferCapabilities,
    size_of,
)
from fray.runtime.serialization.number_list import pack_numbers, unpack_numbers

SHARE, GIVEN_BACK, WITHDRAWN = int(Kind.SHARE), int(Kind.LOAN_RETURNED), int(Kind.SEGMENTS_REMOVED)
ANSWER = 4
"""Flag of SHARE: the body says whether the offer could be read (one byte)."""
INLINE_TOTAL_BYTES = 192 * 1024
"""What all small buffers of one frame may take; more travel as chunks."""
_COUNT = struct.Struct("<HB")
_ENTRY = struct.Struct("<BQQQ")
_INLINE, _CHUNKS, _LENT, _RETURNED = range(4)


@define(eq=False)
class OutgoingTransfer:
    """What sending one parcel has set going, to be undone if its frame could not be sent, or nobody wants it."""

    table: bytes
    chunks: list[int] = field(factory=list)
    loans: list[int] = field(factory=list)


class BufferTransfer:
    """One side of one conversation; it outlives the conversation's channels."""

    def __init__(self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
        """``spawn`` runs a task as long as this end lives."""
        self._spawn = spawn
        self.peer_reads_segments: bool | None = None
        """Whether the peer reads our segments; None while nobody knows."""
        self.on_peer_reply: Callable[[], None] = lambda: None
        self.borrowed: MappedSegments | None = None
        """The peer's segments."""
        self.has_borrowed = False
        """It had some: they may be left over, if it is dead."""
        self._channel: Channel | None = None
        self._offered = False
        self._pool: SegmentPool | None = None
        self._loans: dict[int, int] = {}
        """Segment by loan."""
        self._next_loan = 1
        self._withdrawn: deque[int] = deque()
        self._token = trio.lowlevel.current_trio_token()

    def __repr__(self) -> str:
        return f"<Exchange: {len(self._loans)} loans out, the peer shares {self.borrowed is not None}>"

    # Life ------------------------------------------------------------------------------------------------------------

    def attach(self, channel: Channel) -> None:
        """The conversation goes on over this channel."""
        self._channel = channel

    def reset(self) -> None:
        """The conversation begins anew: nobody knows what of the old one has arrived."""
        self._spoil_loans()
        self.has_borrowed = self.has_borrowed or self.borrowed is not None
        self.peer_reads_segments, self._offered = None, False
        if self.borrowed is not None:
            self.borrowed.close()
            self.borrowed = None

    def end(self) -> None:
        """The conversation is over."""
        self.reset()
        self._channel = None
        if self._pool is not None:
            self._pool.on_removed.remove(self._on_segments_removed)
            self._pool.trim(all_free=not self._pool.on_removed)
            self._pool = None
        if self.has_borrowed:
            shared_memory.sweep()

    # Sharing ---------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        """Whether the peer reads our segments."""
        return self.peer_reads_segments is True

    @property
    def capabilities(self) -> TransferCapabilities:
        """For `parcel.settle`. May be asked on any thread."""
        channel = self._channel
        return TransferCapabilities(segments=channel is not None and channel.may_share_memory, lender=self.borrowed)

    def must_wait(self) -> bool:
        """Offer our segments, if that makes sense and has not been done; True while the answer is to come."""
        channel = self._channel
        if self.peer_reads_segments is None and channel is not None and not self._offered:
            self._offered = True
            pool = shared_memory.pool() if channel.may_share_memory else None
            if pool is None:
                self.peer_reads_segments = False
            else:
                offer = json.dumps({"directory": pool.directory, "nonce": pool.nonce}).encode()
                self._send(SHARE, offer)
                if self._pool is None:
                    self._pool = pool
                    pool.on_removed.append(self._on_segments_removed)
                    self._spawn(self._trim)
        return self.peer_reads_segments is None and channel is not None

    async def _trim(self) -> None:
        """Segments that nobody has used for a while go back to the system."""
        while self._pool is not None:
            await trio.sleep(shared_memory.IDLE_S / 2)
            if self._pool is not None:
                self._pool.trim()

    def on_frame(self, kind: int, flags: int, body: Bytes) -> None:
        """SHARE, GIVEN_BACK or WITHDRAWN has come."""
        if kind == GIVEN_BACK:
            for loan in unpack_numbers(body):
                self._give_back(loan)
        elif kind == WITHDRAWN:
            if self.borrowed is not None:
                self.borrowed.forget(list(unpack_numbers(body)))
        elif flags & ANSWER:
            self.peer_reads_segments = bytes(body) == b"\1"
            self.on_peer_reply()
        else:
            self._on_offer(body)

    def _on_offer(self, body: Bytes) -> None:
        try:
            said = json.loads(bytes(body))
            offer = SharedMemoryOffer(directory=str(said["directory"]), nonce=str(said["nonce"]))
        except (ValueError, KeyError, TypeError):
            raise ProtocolMismatch("an offer of segments cannot be read") from None
        if (
            self.borrowed is None
            and self._channel is not None
            and self._channel.may_share_memory
            and shared_memory.limit_bytes()
        ):
            self.borrowed = MappedSegments.open(offer)
        if self.borrowed is not None:
            self.borrowed.on_ended = self._call_flush
        self._send(SHARE, b"\1" if self.borrowed is not None else b"\0", flags=ANSWER)
        if self.borrowed is not None:
            self.must_wait()  # who lends to us may as well borrow from us

    # Sending ---------------------------------------------------------------------------------------------------------

    def send(self, parcel: PickledObject, flow: Hashable) -> OutgoingTransfer:
        """Set the buffers of ``parcel`` going; the table must go out in a frame now, then `sent` or `recall` is due."""
        shipped = OutgoingTransfer(b"")
        inline: list[Bytes] = []
        entries = [self._entry(source, flow, shipped, inline, parcel.in_segments) for source in parcel.sources]
        shipped.table = b"".join((_COUNT.pack(len(entries), parcel.pickled_first), *entries, *inline))
        return shipped

    def can_copy_to_segments(self, parcel: PickledObject) -> bool:
        """Whether `place` would do anything."""
        if parcel.in_segments or not self.shares:
            return False
        return any(isinstance(source, memoryview) and len(source) >= SEGMENT_FROM_BYTES for source in parcel.sources)

    async def copy_to_segments(self, parcel: PickledObject) -> None:
        """Copy what is large into segments, as far as there is room, and let others run meanwhile.

        Without it `ship` does so at once, and nothing else runs until it is done.
        """
        parcel.in_segments = True
        for at, source in enumerate(parcel.sources):
            if self._pool is not None and isinstance(source, memoryview) and len(source) >= SEGMENT_FROM_BYTES:
                for kept in self._pool.store_in_steps(source):
                    if kept is not None:
                        parcel.sources[at] = kept
                    else:
                        await trio.lowlevel.checkpoint()

    def commit(self, shipped: OutgoingTransfer) -> None:
        """The frame with the table has been handed to the channel."""
        if shipped.chunks and self._channel is not None:
            self._channel.mark_announced(shipped.chunks)

    def abort(self, shipped: OutgoingTransfer) -> None:
        """The frame was not sent after all."""
        self.cancel(shipped)
        for loan in shipped.loans:
            self._give_back(loan)

    def cancel(self, shipped: OutgoingTransfer) -> None:
        """Nobody waits for what is still to be sent of it."""
        if self._channel is not None and shipped.chunks:
            self._channel.bulk_out.drop(shipped.chunks)

    def _entry(
        self, source: Source, flow: Hashable, shipped: OutgoingTransfer, inline: list[Bytes], placed: bool
    ) -> bytes:
        assert self._channel is not None
        size = size_of(source)
        if isinstance(source, BufferLoan):
            if source.lender is self.borrowed:
                return _ENTRY.pack(_RETURNED, source.loan, 0, size)
            source = source.view
        if isinstance(source, Snapshot):
            if self.shares and self._pool is not None:
                return self._lend(source, size, shipped)
            source = source.view
        elif not placed and self.shares and size >= SEGMENT_FROM_BYTES and self._pool is not None:
            kept = self._pool.store(source)
            if kept is not None:
                return self._lend(kept, size, shipped)
        if size <= INLINE_UP_TO_BYTES and sum(map(len, inline)) + size <= INLINE_TOTAL_BYTES:
            inline.append(source)
            return _ENTRY.pack(_INLINE, 0, 0, size)
        number = self._channel.bulk_out.add(flow, source)
        shipped.chunks.append(number)
        return _ENTRY.pack(_CHUNKS, number, 0, size)

    def _lend(self, kept: Snapshot, size: int, shipped: OutgoingTransfer) -> bytes:
        assert self._pool is not None
        self._pool.hold(kept.number)
        loan, self._next_loan = self._next_loan, self._next_loan + 1
        self._loans[loan] = kept.number
        shipped.loans.append(loan)
        return _ENTRY.pack(_LENT, loan, kept.number, size)

    # Receiving -------------------------------------------------------------------------------------------------------

    def receive(self, body: Bytes) -> tuple[IncomingTransfer, memoryview]:
        """Take the table off a body: what arrives with it, and the rest.

        Raises:
            ProtocolMismatch: it is no sound table, or names what is not there.
        """
        view = memoryview(body)
        try:
            count, pickled_first = _COUNT.unpack_from(view)
            at = _COUNT.size + count * _ENTRY.size
            entries = [_ENTRY.unpack_from(view, _COUNT.size + i * _ENTRY.size) for i in range(count)]
        except struct.error:
            raise ProtocolMismatch("a table of buffers is cut short") from None
        arrival = IncomingTransfer(count, bool(pickled_first), sum(entry[3] for entry in entries))
        check_transfer(arrival.size, "what the peer sent")
        for index, (how, a, b, size) in enumerate(entries):
            if how == _INLINE:
                arrival.buffers[index] = bytearray(view[at : at + size])
                at += size
            else:
                self._receive_one(arrival, index, how, a, b, size)
        return arrival, view[at:]

    def forget(self, arrival: IncomingTransfer) -> None:
        """Nobody waits for the rest of it."""
        if self._channel is not None:
            self._channel.bulk_in.forget(arrival.chunks)

    def _receive_one(self, arrival: IncomingTransfer, index: int, how: int, a: int, b: int, size: int) -> None:
        if how == _CHUNKS:
            assert self._channel is not None
            self._channel.bulk_in.allocate = allocate_receive_buffer
            self._channel.bulk_in.expect(a, size, arrival.buffer_setter(index))
            arrival.chunks.append(a)
            arrival.missing_count += 1
        elif how == _LENT and self.borrowed is not None:
            arrival.buffers[index] = self.borrowed.lease(a, b, size)
        elif how == _RETURNED and a in self._loans and self._pool is not None:
            arrival.buffers[index] = self._pool.reopen(self._loans[a], 0, size).view
            self._give_back(a)
        else:
            raise ProtocolMismatch(f"the peer sent a buffer in a way that was not agreed on ({how})")

    # Loans -----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Tell the peer which of its loans are of no use here any more."""
        ended: list[int] = []
        while self.borrowed is not None and self.borrowed.ended:
            ended.append(self.borrowed.ended.popleft())
        if ended:
            self._send(GIVEN_BACK, pack_numbers(ended))
        withdrawn: list[int] = []
        while self._withdrawn:
            withdrawn.append(self._withdrawn.popleft())
        if withdrawn:
            self._send(WITHDRAWN, pack_numbers(withdrawn))

    def _give_back(self, loan: int) -> None:
        number = self._loans.pop(loan, None)
        if number is not None and self._pool is not None:
            self._pool.drop(number)

    def _spoil_loans(self) -> None:
        loans, self._loans = self._loans, {}
        for number in loans.values():
            assert self._pool is not None
            self._pool.drop(number, spoil=True)

    def _on_segments_removed(self, numbers: list[int]) -> None:
        """On any thread: our pool has thrown these away."""
        if self.shares:
            self._withdrawn.extend(numbers)
            self._call_flush()

    def _call_flush(self) -> None:
        try:
            self._token.run_sync_soon(self.flush, idempotent=True)
        except trio.RunFinishedError:
            pass  # the loop has ended, and so has the conversation

    def _send(self, kind: int, body: bytes, *, flags: int = 0) -> None:
        if self._channel is not None:
            try:
                self._channel.send_nowait(kind, 0, body, flags=flags)
            except (ChannelClosed, ChannelFull):
                pass  # the end of the channel ends all loans; a full one costs warm memory at worst
