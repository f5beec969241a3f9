"""Pure state of one session: numbering and acknowledgement of frames, retransmission, and rules of resumption.

Invariants: both ends count the sequenced frames they have *dispatched* (`ReceiveState.received`) and keep those they
sent until the other's count covers them (`SendQueue`). When a connection is lost, both counts survive; the next hello
and welcome exchange them, and each side sends again exactly the frames that the other has not counted. So every frame
is dispatched once and in order as long as both ends remember the session.

An end that has lost the session (it restarted, or the session expired) creates a new *instance* of it. An instance has
a random name, sent in the welcome; a hello that names another instance than the listener's gets a new one, and both
counts start from zero. An instance whose welcome was perhaps never read is offered again until the dialer confirms it
by sending a frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any, TypeAlias

from attrs import Factory, define, field

from fray.errors import ActorDied, ChannelFull, FrayError, MessageTooLarge, ProtocolMismatch, Unauthorized
from fray.model.messages.session import Hello, Refuse, Welcome
from fray.net.channel.versions import common_version, own_release, release_of

PROTOCOL = (2, 0)
"""Version of the handshake and of the frames: the first number must match, and does not change any more. Versions of
the messages are those of `fray.net.channel.versions`."""

BATCH_BYTES = 32 * 1024
"""Target size of one transport message (a fragment may be larger): some 600 calls or 5 ms of work, so that both ends
work in parallel."""
BUFFER_LIMIT_BYTES = 128 * 1024 * 1024
"""Limit of unsent and unacknowledged frames of one session; beyond it `ChannelFull` is raised."""
BUFFER_LIMIT_FRAMES = 1_000_000
"""The same in frames; for small frames only unsent ones count."""
FRAGMENTS_LIMIT_BYTES = 512 * 1024 * 1024
"""Limit of incomplete bodies of all sessions of a process."""
KEY_FRAGMENTS_LIMIT_BYTES = 256 * 1024 * 1024
"""The same of all sessions of one key."""
TRANSFERS_LEAST_BYTES = 8 * 1024 * 1024 * 1024
"""Limit of incomplete transfers of all sessions of a process, on a machine with little memory: two of the largest."""
HIGH_WATER_BYTES = 16 * 1024 * 1024
"""Amount above which `Channel.wait_room` waits."""
# Acknowledgements usually travel in front of frames. For traffic in one direction these limits are far below every
# window of a sender (at least 2 MiB), so no sender ever stops for want of an acknowledgement.
ACK_AFTER_BYTES = 256 * 1024
ACK_AFTER_FRAMES = 128
ACK_AFTER_S = 1.0
"""An acknowledgement without frames is sent after any of these."""
HEARTBEAT_S = 20.0
"""Seconds of silence before a ping. 5,000 idle connections cost 18 % of a core at a ping per 10 s each."""
SILENT_PERIODS = 3
"""Heartbeat periods without a message after which a peer counts as lost."""
UNANSWERED_PING_S = 0.5
"""Seconds after which a peer that owes an acknowledgement is pinged."""
UNANSWERED_S = 2.0
"""Seconds after which a peer that answers nothing counts as silent: its dialer dials again beside the connection."""
WAITING_HEARTBEAT_S = 5.0
"""Seconds of silence before a dialer that waits for something pings: a NAT that has forgotten its connection tells
neither side."""
WAITING_PINGS_PER_S = 200.0
"""Pings that one listener asks its dialers for, at most: some 7 % of a core."""
STALE_S = 120.0
"""Age from which unread orders may be obsolete: `Channel.stale_s` of ends that execute orders. Only a process that was
suspended itself (SIGSTOP, a sleeping laptop, code that blocked its loop) finds such messages."""

Bytes: TypeAlias = bytes | bytearray | memoryview
Parts: TypeAlias = bytes | tuple[bytes, Bytes]
"""One frame ready to send: whole, or header and body where joining them would copy a lot."""


# Sending -------------------------------------------------------------------------------------------------------------


@define
class SendQueue:
    """Frames to deliver, in order: ``sent`` batches (removed when acknowledged), then ``unsent`` frames."""

    unsent: deque[Parts] = Factory(deque)
    unsent_bytes: int = 0
    large: int = 0
    """Number of ``unsent`` frames that are stored in two parts."""
    sent: deque[tuple[int, int, Sequence[Parts]]] = Factory(deque)
    """(number after the last frame, bytes, frames) of each batch not fully acknowledged; chunks count as 0 bytes."""
    bulk_sent: deque[tuple[int, int]] = Factory(deque)
    """(number, bytes) of each chunk that is not acknowledged."""
    bulk_bytes: int = 0
    """Sum of bytes in ``bulk_sent``."""
    resend_until: int = 0
    """Number up to which frames were sent before a rewind; they are sent again before any new chunk."""
    numbered: int = 0
    """Number of frames and chunks passed to a connection so far."""
    taken: int = 0
    """Number of frames that have left ``unsent`` and not come back: chunks do not count, unlike in ``numbered``."""
    acked: int = 0
    size_bytes: int = 0
    """Bytes of all stored frames."""
    deferred: int = 0
    """Number of ``unsent`` frames that are not urgent: they are sent with the next, or within `ACK_AFTER_S`."""

    def push(self, frame: Parts, size_bytes: int) -> None:
        """Append one frame."""
        self.unsent.append(frame)
        self.unsent_bytes += size_bytes
        self.size_bytes += size_bytes
        if type(frame) is tuple:
            self.large += 1

    def check_room(self, more_bytes: int) -> None:
        """Raise ChannelFull if ``more_bytes`` would exceed a limit."""
        # Sent frames count until they are acknowledged: they are kept for a resume.
        stored = self.numbered - self.acked + len(self.unsent)
        if self.size_bytes + more_bytes > BUFFER_LIMIT_BYTES or stored >= BUFFER_LIMIT_FRAMES:
            raise ChannelFull(
                f"the peer does not keep up: {self.size_bytes} bytes in {stored} frames are not acknowledged "
                f"(limits {BUFFER_LIMIT_BYTES} bytes, {BUFFER_LIMIT_FRAMES} frames); wait for room before sending more",
                held_bytes=self.size_bytes,
                held_frames=stored,
                limit_bytes=BUFFER_LIMIT_BYTES,
                limit_frames=BUFFER_LIMIT_FRAMES,
            )

    def take(self, limit_bytes: int = BATCH_BYTES) -> list[Bytes]:
        """Number the next frames, up to ``limit_bytes`` (at least one), and return their parts; empty if none."""
        unsent = self.unsent
        # Also if not all frames fit: deferred ones that stay are then sent earlier than they have to be.
        self.deferred = 0
        # The usual case, without a loop over the frames: whole frames are the parts, and all of them fit.
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
            self.taken += len(frames)
            self.sent.append((self.numbered, size, frames))
        return parts

    def number_chunk(self, frame: tuple[bytes, Bytes]) -> list[Bytes]:
        """Number one chunk, which is sent now between the frames (`fray.net.buffers.chunks`), and return its parts."""
        self.numbered += 1
        size = len(frame[1])
        # A chunk counts as 0 bytes: it has a window of its own (`bulk_bytes`), so that a large buffer in flight neither
        # raises ChannelFull nor makes `wait_room` wait.
        self.sent.append((self.numbered, 0, (frame,)))
        self.bulk_sent.append((self.numbered, size))
        self.bulk_bytes += size
        return list(frame)

    def _gather(self, limit_bytes: int) -> tuple[list[Parts], int]:
        frames: list[Parts] = []
        total = 0
        while self.unsent:
            size = frame_bytes(self.unsent[0])
            # At least one frame: a fragment of 256 KiB alone exceeds the limit.
            if frames and total + size > limit_bytes:
                break
            frame = self.unsent.popleft()
            self.large -= type(frame) is tuple
            frames.append(frame)
            total += size
        self.unsent_bytes -= total
        return frames, total

    def ack(self, count: int) -> None:
        """Drop the frames that the peer has dispatched: ``count`` in all. Repeated or older counts change nothing.

        Raises:
            ProtocolMismatch: more frames than were ever sent.
        """
        # Such a count belongs to another instance; to believe it would drop frames that the peer does not have.
        if count > self.numbered:
            raise ProtocolMismatch(f"the peer acknowledges {count} frames and {self.numbered} were sent")
        if count > self.acked:
            self.acked = count
            sent = self.sent
            # Whole batches only: at most one batch is kept longer than necessary.
            while sent and sent[0][0] <= count:
                self.size_bytes -= sent.popleft()[1]
            bulk = self.bulk_sent
            while bulk and bulk[0][0] <= count:
                self.bulk_bytes -= bulk.popleft()[1]

    def rewind(self, count: int) -> None:
        """Prepare a new connection to a peer that has ``count`` frames: later frames are unsent again.

        Raises:
            ProtocolMismatch: ``count`` is not between the numbers of acknowledged and of sent frames.
        """
        # The peer has forgotten frames that it acknowledged, and they are not stored here any more.
        if count < self.acked:
            raise ProtocolMismatch(f"the peer has {count} frames and acknowledged {self.acked} before")
        self.ack(count)
        # The maximum, since a connection may be lost again before everything was sent again. Chunks among these frames
        # are resent as ordinary frames, and new chunks wait for them: chunks have no offset, their order is their
        # place.
        self.resend_until = max(self.resend_until, self.numbered)
        again = [frame for _, _, frames in self.sent for frame in frames]
        # The oldest batch may be acknowledged in part.
        again = again[len(again) - (self.numbered - count) :]
        self.sent.clear()
        self.unsent.extendleft(reversed(again))
        # Each frame behind these keeps its place, `taken + len(unsent)` when it was queued.
        self.taken -= len(again)
        self.numbered = count
        self._recount()

    def clear(self) -> None:
        """Drop everything: a new instance starts at zero."""
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
    """Return the size of one frame with its header."""
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
    """Count of dispatched frames, and the fragments of an incomplete one (they survive a resume)."""

    received: int = 0
    acked: int = 0
    """Count acknowledged by the last sent message."""
    unacked_bytes: int = 0
    fragments: list[Bytes] = Factory(list)
    fragments_bytes: int = 0
    on_fragments: Callable[[int], None] = field(default=lambda size_bytes: None, repr=False, eq=False)
    """Called with the size of the incomplete frame when it has changed."""

    def is_ack_due(self) -> bool:
        """Return whether enough was received to acknowledge it without waiting for a frame to send."""
        return self.received - self.acked >= ACK_AFTER_FRAMES or self.unacked_bytes >= ACK_AFTER_BYTES

    def take_ack(self) -> int:
        """Return the acknowledgement for a message that is about to be sent."""
        # Recorded although the message may be lost: hello and welcome carry the count again.
        self.acked = self.received
        self.unacked_bytes = 0
        return self.received

    def add_fragment(self, body: Bytes, limit_bytes: int) -> None:
        """Store one fragment.

        Raises:
            MessageTooLarge: all fragments exceed ``limit_bytes``.
        """
        self.fragments_bytes += len(body)
        if self.fragments_bytes > limit_bytes:
            raise MessageTooLarge(
                f"the peer sent a body of more than {limit_bytes} bytes",
                size_bytes=self.fragments_bytes,
                limit_bytes=limit_bytes,
            )
        self.fragments.append(body)
        self.on_fragments(self.fragments_bytes)

    def take_fragments(self) -> bytes:
        """Return all fragments as one body, and drop them."""
        body = b"".join(self.fragments)
        self._drop_fragments()
        return body

    def clear(self) -> None:
        """Drop everything: a new instance starts at zero."""
        self.received = self.acked = self.unacked_bytes = 0
        self._drop_fragments()

    def _drop_fragments(self) -> None:
        dropped, self.fragments, self.fragments_bytes = self.fragments, [], 0
        if dropped:
            self.on_fragments(0)


@define(eq=False)
class FragmentBudget:
    """Sizes of what is incomplete in all sessions of a process, with a limit for all and one for each key.

    It counts incomplete bodies, or in another instance incomplete transfers of large buffers. Over a limit the session
    with the largest amount has to end: among those of the key, or of the key with the most. So one that never completes
    anything does not affect the small ones of others.
    """

    limit_bytes: int = FRAGMENTS_LIMIT_BYTES
    key_limit_bytes: int = KEY_FRAGMENTS_LIMIT_BYTES
    _held: dict[str, dict[Hashable, int]] = Factory(dict)
    """Bytes by key and session."""

    def note(self, key_id: str, session: Hashable, size_bytes: int) -> Hashable | None:
        """Record what is incomplete in a session; return the session that has to end, if any."""
        sessions = self._held.setdefault(key_id, {})
        sessions[session] = size_bytes
        if not size_bytes:
            del sessions[session]
            if not sessions:
                del self._held[key_id]
            return None
        if sum(sessions.values()) <= self.key_limit_bytes:
            sums = {each: sum(held.values()) for each, held in self._held.items()}
            if sum(sums.values()) <= self.limit_bytes:
                return None
            sessions = self._held[max(sums, key=lambda each: sums[each])]
        return max(sessions, key=lambda each: sessions[each])

    @property
    def size_bytes(self) -> int:
        return sum(sum(held.values()) for held in self._held.values())


def make_transfer_budget(memory_bytes: int) -> FragmentBudget:
    """Return the budget of the transfers of a process on a machine with so much memory.

    All together may take three quarters of it, those of one session half, and each the largest transfer that there is.
    """
    # By session: all callers of a host have the same key. In proportion to the memory, since many honest ones may
    # arrive at the same time, and would fill it anyway.
    most = max(TRANSFERS_LEAST_BYTES, memory_bytes // 4 * 3)
    return FragmentBudget(limit_bytes=most, key_limit_bytes=max(TRANSFERS_LEAST_BYTES // 4 * 3, memory_bytes // 2))


# Hello and welcome ---------------------------------------------------------------------------------------------------


class HelloDecision(Enum):
    """Decision of a listener about a hello."""

    FRESH = "create a new instance of the session; an old one has ended"
    OFFER = "offer the current instance again: its welcome was never confirmed"
    RESUME = "resume after the exchanged counts"
    STALE = "drop the connection: a newer one of this session arrived before it"


@define
class SessionRecord:
    """State of one session at its listener."""

    key_id: str
    incarnation: str
    """Incarnation of the dialer's process."""
    instance: str
    dial: int
    outbox: SendQueue = field(repr=False)
    confirmed: bool = False
    """Set once the dialer has sent a frame in this instance, so it has read the welcome."""


def decide_hello(hello: Hello, key_id: str, record: SessionRecord | None, incarnation: str) -> HelloDecision:
    """Decide about a hello from a dialer that has proven ``key_id``.

    Raises:
        ProtocolMismatch: other frames, or no common version of the wire format.
        ActorDied: it expects another incarnation than this process.
        Unauthorized: the session belongs to another key.
    """
    # First, since the other fields may mean something else in another major version.
    check_protocol(hello.protocol)
    common_version(release_of(hello), own_release())
    if hello.expects is not None and hello.expects != incarnation:
        raise _incarnation_ended(hello.expects, incarnation)
    if record is None:
        return HelloDecision.FRESH
    # Before the decisions below: FRESH ends the old session, and another key must not be able to do that to it.
    if record.key_id != key_id:
        raise Unauthorized("the session belongs to another key")
    # Only the same two process incarnations resume. A restarted process has lost its frames, so both sides then send
    # unanswered requests and whole subscriptions again, under the same ids.
    if record.incarnation != hello.incarnation:
        return HelloDecision.FRESH
    # Trio runs the tasks of two connections in any order, so a hello may be read after that of a later dial. Accepting
    # it would cut the connection that the dialer uses.
    if hello.dial < record.dial:
        return HelloDecision.STALE
    # Counts outside of what is stored cannot be continued, so the session is reset instead of losing frames silently.
    if hello.resume and hello.instance == record.instance:
        known = record.outbox.acked <= hello.received <= record.outbox.numbered
        return HelloDecision.RESUME if known else HelloDecision.FRESH
    # This dialer does not have the instance. If it never read the welcome, it has dispatched nothing either, so the
    # instance with all frames that were queued meanwhile is still valid; else it has lost it.
    return HelloDecision.FRESH if record.confirmed else HelloDecision.OFFER


def check_welcome(welcome: Welcome, expects: str | None) -> None:
    """Check the welcome of a listener.

    Raises:
        ProtocolMismatch: other frames, or no common version of the wire format.
        ActorDied: another incarnation than expected has answered.
    """
    check_protocol(welcome.protocol)
    common_version(own_release(), release_of(welcome))
    if expects is not None and welcome.incarnation != expects:
        raise _incarnation_ended(expects, welcome.incarnation)


def check_refuse(refuse: Refuse, expects: str | None, error: FrayError) -> FrayError:
    """Return the reason for the channel's end; ``error`` is the error in the refusal."""
    if refuse.protocol[0] != PROTOCOL[0]:
        return _mismatch(refuse.protocol)
    # Whatever another process refuses for, its presence at the address proves that the expected one has ended.
    if expects is not None and refuse.incarnation != expects and not isinstance(error, ActorDied):
        return _incarnation_ended(expects, refuse.incarnation)
    return error


def check_protocol(protocol: tuple[int, int]) -> None:
    """Raise ProtocolMismatch if the major versions differ."""
    if protocol[0] != PROTOCOL[0]:
        raise _mismatch(protocol)


def _incarnation_ended(expects: str, found: str) -> ActorDied:
    return ActorDied(f"{expects} has ended: {found} is listening on its address now", expects=expects, found=found)


def _mismatch(protocol: tuple[int, int]) -> ProtocolMismatch:
    return ProtocolMismatch(
        f"the peer uses protocol version {protocol[0]}.{protocol[1]} and this process {PROTOCOL[0]}.{PROTOCOL[1]}: "
        "install the same version of fray on both sides",
        theirs=list(protocol),
        ours=list(PROTOCOL),
    )


# Heartbeat -----------------------------------------------------------------------------------------------------------


class HeartbeatAction(Enum):
    WAIT = "nothing is due"
    PING = "idle, or an answer is overdue: send a ping"
    SILENT = "what was sent is not answered: dial again, but keep this connection, which may still answer"
    DROP = "silent for too long"


@define
class Heartbeat:
    """Time of the last received message, and the resulting actions, in seconds of the caller's clock."""

    received_at: float
    pinged_at: float
    period_s: float = HEARTBEAT_S
    """Seconds of silence before a ping."""
    stale_s: float = float("inf")
    drop_s: float = HEARTBEAT_S * SILENT_PERIODS
    """Seconds of silence after which the peer counts as lost."""
    owed_since: float | None = None
    """Time when it was noticed that the peer owes an answer; None if it owes none, or has sent something since."""
    is_silent: bool = False
    """Set by `SILENT`, cleared by the next message."""

    def beat(self, now: float, late_s: float, owes: bool = False) -> HeartbeatAction:
        """Return the due action.

        Args:
            late_s: delay of this call after the requested time. If it is long, *this* process was suspended.
            owes: frames are not acknowledged, which every living peer does within `ACK_AFTER_S`.
        """
        if late_s > self.period_s / 2:
            # Messages of the peer may be unread, so its silence counts from now. If they are very old they may be
            # obsolete, and a new connection brings the current ones.
            if self.is_stale(now):
                return HeartbeatAction.DROP
            self.received_at = self.pinged_at = self.owed_since = now
            return HeartbeatAction.PING
        # The same sums as in `next_at`: differences would be rounded in another way.
        # The first ping is sent after one period, so its answer has two more: one call of an extension that keeps the
        # interpreter may silence a living peer for long.
        if now >= self.received_at + self.drop_s:
            return HeartbeatAction.DROP
        if now >= max(self.received_at, self.pinged_at) + self.period_s:
            self.pinged_at = now
            if self.owed_since is None or self.owed_since < self.received_at:
                self.owed_since = now
            return HeartbeatAction.PING
        return self._beat_unanswered(now, late_s, owes)

    def _beat_unanswered(self, now: float, late_s: float, owes: bool) -> HeartbeatAction:
        """Return the due action for a peer that may owe an answer."""
        if not owes and self.pinged_at <= self.received_at:
            self.owed_since = None
        # Also if this process was late itself: the answer may lie unread in the socket.
        elif self.owed_since is None or self.owed_since < self.received_at or late_s > UNANSWERED_PING_S:
            self.owed_since = now
        elif now >= self.owed_since + UNANSWERED_S and not self.is_silent:
            self.is_silent = True
            return HeartbeatAction.SILENT
        elif now >= self.owed_since + UNANSWERED_PING_S and self.pinged_at < self.owed_since:
            self.pinged_at = now
            return HeartbeatAction.PING
        return HeartbeatAction.WAIT

    def is_stale(self, now: float) -> bool:
        """Return whether unread messages are too old to act on: this process was suspended, since a peer that is silent
        for so long would have been dropped."""
        return now - self.received_at >= self.stale_s

    def next_at(self) -> float:
        """Return when to call `beat` again if no message arrives before."""
        due = min(max(self.received_at, self.pinged_at) + self.period_s, self.received_at + self.drop_s)
        if self.owed_since is None or self.owed_since < self.received_at or self.is_silent:
            return due
        wait_s = UNANSWERED_PING_S if self.pinged_at < self.owed_since else UNANSWERED_S
        return min(due, self.owed_since + wait_s)
