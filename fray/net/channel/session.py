"""The table of one session: what is numbered, what is owed again after a cut, who may resume what. Pure.

The law of resume. Both ends count the sequenced frames they have *dispatched* (`Inbox.received`) and keep those they
sent until the other's count covers them (`Outbox`). When a connection is lost, both counts survive; the next hello and
welcome exchange them, and each side sends again exactly what the other has not counted. So every frame is dispatched
once and in order as long as both ends remember the session.

An end that forgot (it restarted, or waited too long) makes a new *life* of the session. A life has a random name, told
in the welcome; a hello that names another life than the listener's gets a new one, and both counts start from zero. A
life whose welcome was perhaps never read is offered again until the dialer confirms it by sending something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

from attrs import Factory, define, field

from fray.errors import ActorDied, ChannelFull, FrayError, MessageTooLarge, ProtocolMismatch, Unauthorized
from fray.model.messages.session import Hello, Refuse, Welcome

PROTOCOL = (2, 0)
"""Major and minor version. Majors must match."""

BATCH_BYTES = 32 * 1024
"""What one transport message gathers (a fragment may be larger): 600 calls, 5 ms of work, so that both ends work."""
BUFFER_LIMIT_BYTES = 128 * 1024 * 1024
"""Unsent and unacknowledged frames of one session; more is `ChannelFull`."""
BUFFER_LIMIT_FRAMES = 1_000_000
HIGH_WATER_BYTES = 16 * 1024 * 1024
"""Above this, `Channel.wait_room` waits."""
ACK_AFTER_BYTES = 256 * 1024
ACK_AFTER_FRAMES = 128
ACK_AFTER_S = 1.0
"""A lone acknowledgement is sent after any of these."""
HEARTBEAT_S = 20.0
SILENT_PERIODS = 3
"""A peer that has not been heard for so many of them is not there."""
STALE_S = 120.0
"""Orders that lay unread for so long may not hold any more: `Channel.stale_s` of who takes orders. Only a process that
was stopped itself (SIGSTOP, a laptop asleep, code that held its loop) ever finds such words."""

Bytes: TypeAlias = bytes | bytearray | memoryview
Parts: TypeAlias = bytes | tuple[bytes, Bytes]
"""One frame ready to send: whole, or header and body where joining them would copy much."""


# Sending -------------------------------------------------------------------------------------------------------------


@define
class SendQueue:
    """Frames on their way, in order: acknowledged ones are gone, then ``sent`` batches, then ``unsent`` frames."""

    unsent: deque[Parts] = Factory(deque)
    unsent_bytes: int = 0
    large: int = 0
    """Frames of ``unsent`` that are kept in two parts."""
    sent: deque[tuple[int, int, Sequence[Parts]]] = Factory(deque)
    """(number after the last frame, bytes, frames) of each batch not wholly acknowledged; chunks count no bytes."""
    bulk_sent: deque[tuple[int, int]] = Factory(deque)
    """(number, bytes) of each chunk that is not acknowledged."""
    bulk_bytes: int = 0
    """Bytes of `bulk_sent`."""
    resend_until: int = 0
    """After a rewind: frames up to this number were sent before, and go again before any new chunk."""
    numbered: int = 0
    """Frames handed to a connection so far."""
    acked: int = 0
    size_bytes: int = 0
    """All that is held."""
    deferred: int = 0
    """So many of ``unsent`` need no message of their own: they ride with the next, or go within `ACK_AFTER_S`."""

    def push(self, frame: Parts, size_bytes: int) -> None:
        """Append one frame."""
        self.unsent.append(frame)
        self.unsent_bytes += size_bytes
        self.size_bytes += size_bytes
        if type(frame) is tuple:
            self.large += 1

    def check_room(self, more_bytes: int) -> None:
        """Raises:
        ChannelFull: ``more_bytes`` would pass a bound.
        """
        held = self.numbered - self.acked + len(self.unsent)
        if self.size_bytes + more_bytes > BUFFER_LIMIT_BYTES or held >= BUFFER_LIMIT_FRAMES:
            raise ChannelFull(
                f"the peer does not keep up: {self.size_bytes} bytes in {held} frames wait for it "
                f"(limits {BUFFER_LIMIT_BYTES} bytes, {BUFFER_LIMIT_FRAMES} frames); wait for room before sending more",
                held_bytes=self.size_bytes,
                held_frames=held,
                limit_bytes=BUFFER_LIMIT_BYTES,
                limit_frames=BUFFER_LIMIT_FRAMES,
            )

    def take(self, limit_bytes: int = BATCH_BYTES) -> list[Bytes]:
        """Number the next frames, up to ``limit_bytes`` (at least one), and return their parts; empty if none."""
        unsent = self.unsent
        self.deferred = 0
        if self.unsent_bytes <= limit_bytes and not self.large:
            frames, size = list(unsent), self.unsent_bytes
            unsent.clear()
            self.unsent_bytes = 0
            parts: list[Any] = frames
        else:
            frames, size = self._gather(limit_bytes)
            parts = _flat(frames)
        if frames:
            self.numbered += len(frames)
            self.sent.append((self.numbered, size, frames))
        return parts

    def number_chunk(self, frame: tuple[bytes, Bytes]) -> list[Bytes]:
        """Number one chunk, which goes out now beside the frames (`fray.net.buffers.chunks`), and return its parts."""
        self.numbered += 1
        size = len(frame[1])
        self.sent.append((self.numbered, 0, (frame,)))
        self.bulk_sent.append((self.numbered, size))
        self.bulk_bytes += size
        return list(frame)

    def _gather(self, limit_bytes: int) -> tuple[list[Parts], int]:
        frames: list[Parts] = []
        total = 0
        while self.unsent:
            size = frame_bytes(self.unsent[0])
            if frames and total + size > limit_bytes:
                break
            frame = self.unsent.popleft()
            self.large -= type(frame) is tuple
            frames.append(frame)
            total += size
        self.unsent_bytes -= total
        return frames, total

    def ack(self, count: int) -> None:
        """The peer has dispatched ``count`` frames in all. Counts that are known already change nothing.

        Raises:
            ProtocolMismatch: more than were ever sent.
        """
        if count > self.numbered:
            raise ProtocolMismatch(f"the peer acknowledges {count} frames and {self.numbered} were sent")
        if count > self.acked:
            self.acked = count
            sent = self.sent
            while sent and sent[0][0] <= count:
                self.size_bytes -= sent.popleft()[1]
            bulk = self.bulk_sent
            while bulk and bulk[0][0] <= count:
                self.bulk_bytes -= bulk.popleft()[1]

    def rewind(self, count: int) -> None:
        """The connection is new and the peer has ``count`` frames: what comes after is unsent again.

        Raises:
            ProtocolMismatch: ``count`` is not between what was acknowledged and what was sent.
        """
        if count < self.acked:
            raise ProtocolMismatch(f"the peer has {count} frames and acknowledged {self.acked} before")
        self.ack(count)
        self.resend_until = max(self.resend_until, self.numbered)
        again = [frame for _, _, frames in self.sent for frame in frames]
        again = again[len(again) - (self.numbered - count) :]
        self.sent.clear()
        self.unsent.extendleft(reversed(again))
        self.numbered = count
        self._recount()

    def clear(self) -> None:
        """Forget everything: a new life starts at zero."""
        self.unsent.clear()
        self.sent.clear()
        self.numbered = self.acked = self.resend_until = 0
        self._recount()

    def _recount(self) -> None:
        self.deferred = 0
        self.size_bytes = self.unsent_bytes = sum(map(frame_bytes, self.unsent))
        self.bulk_sent.clear()
        self.bulk_bytes = 0
        self.large = sum(type(frame) is tuple for frame in self.unsent)


def frame_bytes(frame: Parts) -> int:
    """Size of one frame with its header."""
    return len(frame[0]) + len(frame[1]) if type(frame) is tuple else len(frame)


def _flat(frames: Sequence[Parts]) -> list[Bytes]:
    parts: list[Bytes] = []
    for frame in frames:
        if type(frame) is tuple:
            parts.extend(frame)
        else:
            parts.append(frame)  # type: ignore[arg-type]
    return parts


# Receiving -----------------------------------------------------------------------------------------------------------


@define
class ReceiveState:
    """Frames dispatched, and the fragments of one that is not whole yet (they survive a resume)."""

    received: int = 0
    acked: int = 0
    """What the last message sent has acknowledged."""
    unacked_bytes: int = 0
    fragments: list[Bytes] = Factory(list)
    fragments_bytes: int = 0

    def is_ack_due(self) -> bool:
        """Enough came in to acknowledge it without waiting for a message to ride on."""
        return self.received - self.acked >= ACK_AFTER_FRAMES or self.unacked_bytes >= ACK_AFTER_BYTES

    def take_ack(self) -> int:
        """The acknowledgement for a message that is about to be sent."""
        self.acked = self.received
        self.unacked_bytes = 0
        return self.received

    def add_fragment(self, body: Bytes, limit_bytes: int) -> None:
        """Keep one piece.

        Raises:
            MessageTooLarge: together they pass ``limit_bytes``.
        """
        self.fragments_bytes += len(body)
        if self.fragments_bytes > limit_bytes:
            raise MessageTooLarge(
                f"the peer sent a body of more than {limit_bytes} bytes",
                size_bytes=self.fragments_bytes,
                limit_bytes=limit_bytes,
            )
        self.fragments.append(body)

    def take_fragments(self) -> bytes:
        """All pieces as one body."""
        body = b"".join(self.fragments)
        self.fragments = []
        self.fragments_bytes = 0
        return body

    def clear(self) -> None:
        """A new life starts at zero."""
        self.received = self.acked = self.unacked_bytes = self.fragments_bytes = 0
        self.fragments = []


# Hello and welcome ---------------------------------------------------------------------------------------------------


class HelloDecision(Enum):
    """What a listener does with a hello."""

    FRESH = "make a new life of the session; an old one has ended"
    OFFER = "offer the present life again: its welcome was never confirmed"
    RESUME = "go on where the counts say"
    STALE = "drop the connection: a newer one of this session came before it"


@define
class SessionRecord:
    """What a listener remembers of one session."""

    key_id: str
    incarnation: str
    """Of the dialer's process."""
    instance: str
    dial: int
    outbox: SendQueue = field(repr=False)
    confirmed: bool = False
    """The dialer has sent something in this life, so it has read the welcome."""


def decide_hello(hello: Hello, key_id: str, record: SessionRecord | None, incarnation: str) -> HelloDecision:
    """Decide about a hello from a dialer that has proven ``key_id``.

    Raises:
        ProtocolMismatch: another major version.
        ActorDied: it looks for another incarnation than ours.
        Unauthorized: the session belongs to another key.
    """
    check_protocol(hello.protocol)
    if hello.expects is not None and hello.expects != incarnation:
        raise _gone(hello.expects, incarnation)
    if record is None:
        return HelloDecision.FRESH
    if record.key_id != key_id:
        raise Unauthorized("the session belongs to another key")
    if record.incarnation != hello.incarnation:
        return HelloDecision.FRESH
    if hello.dial < record.dial:
        return HelloDecision.STALE
    if hello.resume and hello.instance == record.instance:
        known = record.outbox.acked <= hello.received <= record.outbox.numbered
        return HelloDecision.RESUME if known else HelloDecision.FRESH
    return HelloDecision.FRESH if record.confirmed else HelloDecision.OFFER


def check_welcome(welcome: Welcome, expects: str | None) -> None:
    """The dialer's check.

    Raises:
        ProtocolMismatch: another major version.
        ActorDied: another incarnation than expected answers.
    """
    check_protocol(welcome.protocol)
    if expects is not None and welcome.incarnation != expects:
        raise _gone(expects, welcome.incarnation)


def check_refuse(refuse: Refuse, expects: str | None, error: FrayError) -> FrayError:
    """The one reason to end for: ``error`` is what the refusal says."""
    if refuse.protocol[0] != PROTOCOL[0]:
        return _mismatch(refuse.protocol)
    if expects is not None and refuse.incarnation != expects and not isinstance(error, ActorDied):
        return _gone(expects, refuse.incarnation)
    return error


def check_protocol(protocol: tuple[int, int]) -> None:
    """Raises:
    ProtocolMismatch: the majors differ.
    """
    if protocol[0] != PROTOCOL[0]:
        raise _mismatch(protocol)


def _gone(expects: str, found: str) -> ActorDied:
    return ActorDied(f"{expects} is gone: {found} listens at its address now", expects=expects, found=found)


def _mismatch(protocol: tuple[int, int]) -> ProtocolMismatch:
    return ProtocolMismatch(
        f"the peer speaks version {protocol[0]}.{protocol[1]} of the protocol and this process "
        f"{PROTOCOL[0]}.{PROTOCOL[1]}: install the same major version of fray on both sides",
        theirs=list(protocol),
        ours=list(PROTOCOL),
    )


# Heartbeat -----------------------------------------------------------------------------------------------------------


class HeartbeatAction(Enum):
    WAIT = "nothing is due"
    PING = "idle: ask whether it is there"
    DROP = "silent for too long"


@define
class Heartbeat:
    """Who was heard when, in seconds of the caller's clock."""

    received_at: float
    pinged_at: float
    period_s: float = HEARTBEAT_S
    stale_s: float = float("inf")

    def beat(self, now: float, late_s: float) -> HeartbeatAction:
        """What is due. ``late_s`` is how much later than asked for this was called.

        If that is long, *we* were stopped, and the peer's words may lie unread: its silence counts from now. If it is
        very long, they may be out of date (`is_stale`).
        """
        if late_s > self.period_s / 2:
            if self.is_stale(now):
                return HeartbeatAction.DROP
            self.received_at = self.pinged_at = now
            return HeartbeatAction.PING
        # The very sums of `next_at`: differences would round otherwise.
        if now >= self.received_at + self.period_s * SILENT_PERIODS:
            return HeartbeatAction.DROP
        if now >= max(self.received_at, self.pinged_at) + self.period_s:
            self.pinged_at = now
            return HeartbeatAction.PING
        return HeartbeatAction.WAIT

    def is_stale(self, now: float) -> bool:
        """Whether what can be read now was written too long ago: then we were stopped, since nobody is heard of for so
        long and not dropped."""
        return now - self.received_at >= self.stale_s

    def next_at(self) -> float:
        """When to call `beat` again if nothing is heard before."""
        return min(
            max(self.received_at, self.pinged_at) + self.period_s, self.received_at + self.period_s * SILENT_PERIODS
        )
