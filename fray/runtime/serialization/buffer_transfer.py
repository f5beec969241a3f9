"""Transfer of out-of-band buffers over one channel: inside the frame, as chunks beside it, or lent in shared memory.

A frame flagged BUFFERS has a table in front of its body, with one entry per buffer. Each side of a conversation has a
`BufferTransfer`. A side with something large to send to a process that may be on the same host offers its segments
first (SHARE); the other side answers whether it can map them. Only a first large buffer makes the offer and waits for
that answer, so that it is not a gigabyte through a socket. A lent buffer comes back as LOAN_RETURNED when the last
view of it is gone at the borrower, or as part of an answer.

A segment is reused only after the borrower has returned all loans of it. A reset or an end of the conversation proves
nothing about the borrower, which may still read: segments whose loans are open then are never reused, but dropped
(`fray.net.buffers.segment_allocator`). Tunnels and in-memory networks never share segments.
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
from fray.model.messages.large_values import check_size
from fray.net.buffers import shared_memory
from fray.net.buffers.chunks import TransferGroup
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

SHARE, LOAN_RETURNED, SEGMENTS_REMOVED = int(Kind.SHARE), int(Kind.LOAN_RETURNED), int(Kind.SEGMENTS_REMOVED)
ANSWER = 4
"""Flag of a SHARE frame that answers an offer; its body is one byte: 1 if the segments can be mapped."""
# A frame is one unit on the wire: a larger one would delay the frames behind it.
INLINE_TOTAL_BYTES = 192 * 1024
"""Limit of the buffers inside one frame; further ones are sent as chunks."""
_COUNT = struct.Struct("<HB")
_ENTRY = struct.Struct("<BQQQ")
_INLINE, _CHUNKS, _LENT, _RETURNED = range(4)


@define(eq=False)
class OutgoingTransfer:
    """Chunks and loans of one sent object, to be undone if its frame was not sent or its call was cancelled."""

    table: bytes
    chunks: list[int] = field(factory=list)
    loans: list[int] = field(factory=list)


class BufferTransfer:
    """Buffers sent and received by one side of a conversation; it outlives the conversation's channels."""

    def __init__(self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
        """Make one side; ``spawn`` runs a task as long as it lives."""
        self._spawn = spawn
        self.peer_reads_segments: bool | None = None
        """Flag: the peer can map this process's segments; None: not known yet."""
        self.on_peer_reply: Callable[[], None] = lambda: None
        self.borrowed: MappedSegments | None = None
        """The peer's segments, as mapped here."""
        self.has_borrowed = False
        """Flag: the peer has lent segments, which may be left over on disk if it is dead."""
        self._channel: Channel | None = None
        self._offered = False
        self._pool: SegmentPool | None = None
        self._loans: dict[int, int] = {}
        """Number of the segment behind each open loan."""
        self._next_loan = 1
        self._removed_segments: deque[int] = deque()
        self._token = trio.lowlevel.current_trio_token()

    def __repr__(self) -> str:
        return f"<BufferTransfer: {len(self._loans)} open loans, borrows from peer: {self.borrowed is not None}>"

    # Lifecycle -------------------------------------------------------------------------------------------------------

    def attach(self, channel: Channel) -> None:
        """Continue the conversation over this channel."""
        self._channel = channel

    def reset(self) -> None:
        """Start over after a reset of the conversation: it is unknown which frames have arrived."""
        self._spoil_loans()
        self.has_borrowed = self.has_borrowed or self.borrowed is not None
        # The peer may be another process now, so the offer is made again.
        self.peer_reads_segments, self._offered = None, False
        if self.borrowed is not None:
            self.borrowed.close()
            self.borrowed = None

    def end(self) -> None:
        """End this side for good."""
        self.reset()
        self._channel = None
        if self._pool is not None:
            self._pool.on_removed.remove(self._on_segments_removed)
            self._pool.trim(all_free=not self._pool.on_removed)
            self._pool = None
        if self.has_borrowed:
            # A peer that was killed cannot remove its segments, and its memory would stay occupied.
            shared_memory.sweep()

    # Sharing ---------------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        """Return whether the peer is known to map this process's segments."""
        return self.peer_reads_segments is True

    @property
    def capabilities(self) -> TransferCapabilities:
        """Return what `buffers.detach_buffers` may use. May be called on any thread."""
        channel = self._channel
        return TransferCapabilities(segments=channel is not None and channel.may_share_memory, lender=self.borrowed)

    def must_wait(self) -> bool:
        """Offer this process's segments, if useful and not done before; return True until the peer answers."""
        channel = self._channel
        if self.peer_reads_segments is None and channel is not None and not self._offered:
            self._offered = True
            # Tunnels and memory networks never share: their ends may be on different hosts, or be one process.
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
        """Return segments that have been unused for a while to the system."""
        while self._pool is not None:
            await trio.sleep(shared_memory.IDLE_S / 2)
            if self._pool is not None:
                self._pool.trim()

    def on_frame(self, kind: int, flags: int, body: Bytes) -> None:
        """Handle a SHARE, LOAN_RETURNED or SEGMENTS_REMOVED frame."""
        if kind == LOAN_RETURNED:
            for loan in unpack_numbers(body):
                self._end_loan(loan)
        elif kind == SEGMENTS_REMOVED:
            if self.borrowed is not None:
                self.borrowed.forget(list(unpack_numbers(body)))
        elif flags & ANSWER:
            self.peer_reads_segments = bytes(body) == b"\1"
            self.on_peer_reply()
        else:
            self._on_offer(body)

    def _on_offer(self, body: Bytes) -> None:
        try:
            fields = json.loads(bytes(body))
            offer = SharedMemoryOffer(directory=str(fields["directory"]), nonce=str(fields["nonce"]))
        except (ValueError, KeyError, TypeError):
            raise ProtocolMismatch("malformed offer of shared memory segments") from None
        if (
            # Only if this process can and may use shared memory itself, and the nonce proves that both see the same
            # directory.
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
            self.must_wait()  # a peer that lends segments can probably map ours, too

    # Sending ---------------------------------------------------------------------------------------------------------

    def send(self, pickled: PickledObject, flow: Hashable) -> OutgoingTransfer:
        """Start to send buffers.

        The caller must send the returned table in a frame at once, then `commit` or `abort`.
        """
        transfer = OutgoingTransfer(b"")
        inline: list[Bytes] = []
        entries = [self._entry(source, flow, transfer, inline, pickled.in_segments) for source in pickled.sources]
        transfer.table = b"".join((_COUNT.pack(len(entries), pickled.pickled_first), *entries, *inline))
        return transfer

    def can_copy_to_segments(self, pickled: PickledObject) -> bool:
        """Return whether `copy_to_segments` would copy anything."""
        if pickled.in_segments or not self.shares:
            return False
        return any(isinstance(source, memoryview) and len(source) >= SEGMENT_FROM_BYTES for source in pickled.sources)

    async def copy_to_segments(self, pickled: PickledObject) -> None:
        """Copy large buffers into segments, as far as there is room, with checkpoints in between.

        Otherwise `send` copies them at once, and blocks the loop meanwhile.
        """
        pickled.in_segments = True
        for at, source in enumerate(pickled.sources):
            if self._pool is not None and isinstance(source, memoryview) and len(source) >= SEGMENT_FROM_BYTES:
                for snapshot in self._pool.store_in_steps(source):
                    if snapshot is not None:
                        pickled.sources[at] = snapshot
                    else:
                        await trio.lowlevel.checkpoint()

    def commit(self, transfer: OutgoingTransfer) -> None:
        """Release the chunks for sending, after the frame with the table was passed to the channel."""
        if transfer.chunks and self._channel is not None:
            self._channel.mark_announced(transfer.chunks)

    def abort(self, transfer: OutgoingTransfer) -> None:
        """Undo a transfer whose frame was not sent."""
        self.cancel(transfer)
        for loan in transfer.loans:
            self._end_loan(loan)

    def cancel(self, transfer: OutgoingTransfer) -> None:
        """Drop the chunks that have not been sent yet: the receiver does not need them any more."""
        if self._channel is not None and transfer.chunks:
            self._channel.bulk_out.drop(transfer.chunks)

    def _entry(
        self, source: Source, flow: Hashable, transfer: OutgoingTransfer, inline: list[Bytes], in_segments: bool
    ) -> bytes:
        assert self._channel is not None
        size = size_of(source)
        if isinstance(source, BufferLoan):
            # The buffer lies in memory of its receiver: sending back the loan costs no copy.
            if source.lender is self.borrowed:
                return _ENTRY.pack(_RETURNED, source.loan, 0, size)
            source = source.view
        if isinstance(source, Snapshot):
            if self.shares and self._pool is not None:
                return self._lend(source, size, transfer)
            source = source.view
        # Buffers that did not fit into segments before are not tried again.
        elif not in_segments and self.shares and size >= SEGMENT_FROM_BYTES and self._pool is not None:
            snapshot = self._pool.store(source)
            if snapshot is not None:
                return self._lend(snapshot, size, transfer)
        # Small buffers inside the frame, as a transfer of its own would cost more than the copy.
        if size <= INLINE_UP_TO_BYTES and sum(map(len, inline)) + size <= INLINE_TOTAL_BYTES:
            inline.append(source)
            return _ENTRY.pack(_INLINE, 0, 0, size)
        number = self._channel.bulk_out.add(flow, source)
        transfer.chunks.append(number)
        return _ENTRY.pack(_CHUNKS, number, 0, size)

    def _lend(self, snapshot: Snapshot, size: int, transfer: OutgoingTransfer) -> bytes:
        assert self._pool is not None
        self._pool.hold(snapshot.number)
        loan, self._next_loan = self._next_loan, self._next_loan + 1
        self._loans[loan] = snapshot.number
        transfer.loans.append(loan)
        return _ENTRY.pack(_LENT, loan, snapshot.number, size)

    # Receiving -------------------------------------------------------------------------------------------------------

    def receive(self, body: Bytes) -> tuple[IncomingTransfer, memoryview]:
        """Split a body into the transfer its table describes and the rest.

        Raises:
            ProtocolMismatch: the table is malformed, or names an unknown loan.
        """
        view = memoryview(body)
        try:
            count, pickled_first = _COUNT.unpack_from(view)
            at = _COUNT.size + count * _ENTRY.size
            entries = [_ENTRY.unpack_from(view, _COUNT.size + i * _ENTRY.size) for i in range(count)]
        except struct.error:
            raise ProtocolMismatch("truncated table of buffers") from None
        arrival = IncomingTransfer(count, bool(pickled_first), sum(entry[3] for entry in entries))
        check_size(arrival.size, "what the peer sent")
        group, inline_bytes = TransferGroup(), 0
        for index, (how, a, b, size) in enumerate(entries):
            if how == _INLINE:
                # A copy: writable, as users expect of arrays, and it does not keep the whole frame in memory.
                arrival.buffers[index] = bytearray(view[at : at + size])
                at += size
                inline_bytes += size
            else:
                self._receive_one(arrival, group, index, how, a, b, size)
        if group.missing and self._channel is not None:
            self._channel.bulk_in.add_beside(group, inline_bytes)
        return arrival, view[at:]

    def forget(self, arrival: IncomingTransfer) -> None:
        """Ignore the chunks of ``arrival`` that are still to come."""
        if self._channel is not None:
            self._channel.bulk_in.forget(arrival.chunks)

    def _receive_one(
        self, arrival: IncomingTransfer, group: TransferGroup, index: int, how: int, a: int, b: int, size: int
    ) -> None:
        if how == _CHUNKS:
            assert self._channel is not None
            self._channel.bulk_in.allocate = allocate_receive_buffer
            self._channel.bulk_in.expect(a, size, arrival.buffer_setter(index), group)
            arrival.chunks.append(a)
            arrival.missing_count += 1
        elif how == _LENT and self.borrowed is not None:
            arrival.buffers[index] = self.borrowed.lease(a, b, size)
        # An unknown loan would give the peer access to any segment.
        elif how == _RETURNED and a in self._loans and self._pool is not None:
            arrival.buffers[index] = self._pool.reopen(self._loans[a], 0, size).view
            self._end_loan(a)
        else:
            raise ProtocolMismatch(f"buffer sent in a way that was not negotiated ({how})")

    # Loans -----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Notify the peer of its loans that have ended here, and of this process's segments that were removed."""
        ended: list[int] = []
        while self.borrowed is not None and self.borrowed.ended:
            ended.append(self.borrowed.ended.popleft())
        if ended:
            self._send(LOAN_RETURNED, pack_numbers(ended))
        removed: list[int] = []
        while self._removed_segments:
            removed.append(self._removed_segments.popleft())
        if removed:
            self._send(SEGMENTS_REMOVED, pack_numbers(removed))

    def _end_loan(self, loan: int) -> None:
        number = self._loans.pop(loan, None)
        if number is not None and self._pool is not None:
            self._pool.drop(number)

    def _spoil_loans(self) -> None:
        loans, self._loans = self._loans, {}
        for number in loans.values():
            assert self._pool is not None
            self._pool.drop(number, spoil=True)

    # Mapped segments occupy memory at the peer as long as it is not informed.
    def _on_segments_removed(self, numbers: list[int]) -> None:
        """Notify the peer of segments the pool has removed. Any thread."""
        if self.shares:
            self._removed_segments.extend(numbers)
            self._call_flush()

    def _call_flush(self) -> None:
        try:
            self._token.run_sync_soon(self.flush, idempotent=True)
        except trio.RunFinishedError:
            pass  # the loop has ended, and the conversation with it

    def _send(self, kind: int, body: bytes, *, flags: int = 0) -> None:
        if self._channel is not None:
            try:
                self._channel.send_nowait(kind, 0, body, flags=flags)
            except (ChannelClosed, ChannelFull):
                pass  # the end of a channel ends all loans; a full channel costs warm memory at worst
