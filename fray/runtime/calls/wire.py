"""The bookkeeping of calls, on both ends, and how a call looks on the wire. Pure: bytes and numbers in, decisions out.

The law: a call's name is (conversation of a caller, number). A caller gives out numbers in the order in which it
sends, so what arrives at one host from one caller only grows, except when the conversation was forgotten and unanswered
calls come again. A host therefore keeps one number, the highest it has seen (the watermark), and the calls that are
still open below it: running, or answered and not yet settled by the caller. A number at or below the watermark that is
not open is forgotten: its outcome is unknown, and it is never run again.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from attrs import define, field, frozen

from fray.errors import ActorDied, FrayError, MachineLost, OutcomeUnknown
from fray.model.messages.calls import CallMeta

Bytes: TypeAlias = bytes | bytearray | memoryview

# Flags of frames (bits above those of `fray.net.codec`) ---------------------------------------------------------------

AGAIN = 4
"""CALL: it was sent before and may have arrived."""
KEYWORDS = 8
"""CALL: the pickle holds (args, kwargs), not args alone."""
STREAM = 16
"""CALL: answer with items, then a result. In front of the pickle stands the credit for them."""
TWO_WAY = 32
"""CALL, with STREAM: items come from the caller, too."""
END = 4
"""INPUT without a body: the caller is done sending."""
BUFFERS = 64
"""CALL, RESULT, ITEM: the body starts with a table of buffers (`fray.runtime.serialization.buffer_transfer`)."""
NOT_RUN = 4
"""FAULT: the host says that the call has not been run and will not be."""
CANCELLED = 8
"""FAULT without a body: the call has been cancelled (or, running in a thread, been told so)."""
ONLY = 4
"""SETTLED: the body lists the calls that are *not* settled, among all below the watermark."""

FAULT = 34
"""Kind of frame, host to caller: the error that answers a call."""
ITEM = 37
"""Kind of frame, host to caller: one item of a stream."""
CREDIT = 38
"""Kind of frame, both ways: so many more items may be sent (u32)."""
INPUT = 39
"""Kind of frame, caller to host: one item for a method that takes a stream."""
CALLER_KEY_ID = "caller"
"""Key id under which a caller proves that it knows the key of an endpoint."""
HOST_LEFT = "the host has shut down"
"""Reason of the goodbye of a host whose process ends in order."""

# Bounds --------------------------------------------------------------------------------------------------------------

OPEN_CALLS_LIMIT = 16_384
"""Calls one caller has unanswered at one host; a host refuses more from one caller."""
OPEN_BYTES_LIMIT = 256 * 1024 * 1024
"""Bytes of arguments one caller holds for one host."""
KEPT_BYTES_LIMIT = 64 * 1024 * 1024
"""Bytes of unsettled answers a host keeps for one caller before it stops starting that caller's calls."""
KEPT_BULK_LIMIT_BYTES = 1024 * 1024 * 1024
"""The same for the large buffers of answers."""
SETTLE_EVERY_CALLS = 64
SETTLE_EVERY_BYTES = 64 * 1024

# A call on the wire --------------------------------------------------------------------------------------------------

_META = struct.Struct("<dH")
_CHAIN_LIMIT = 256
_CHAIN_LIMIT_BYTES = 65_000


def call_head(method: str) -> bytes:
    """What stands in front of the pickled arguments: the length of the name, and the name."""
    name = method.encode()
    return bytes((len(name),)) + name


def split_call(body: Bytes) -> tuple[str, memoryview]:
    """The name of the method and the pickle behind it; inverse of ``call_head(method) + pickle``."""
    view = memoryview(body)
    end = 1 + view[0]
    return str(view[1:end], "utf-8"), view[end:]


def pack_meta(meta: CallMeta) -> bytes:
    """Options of one call, to stand in front of its `call_head` in a frame flagged META."""
    chain = "\0".join(meta.chain[-_CHAIN_LIMIT:]).encode()[-_CHAIN_LIMIT_BYTES:]
    return _META.pack(math.nan if meta.deadline_s is None else meta.deadline_s, len(chain)) + chain


def split_meta(body: Bytes) -> tuple[CallMeta, memoryview]:
    """Inverse of `pack_meta`: the options and the rest of the body."""
    view = memoryview(body)
    deadline_s, length = _META.unpack_from(view)
    end = _META.size + length
    chain = tuple(str(view[_META.size : end], "utf-8", "replace").split("\0")) if length else ()
    return CallMeta(deadline_s=None if math.isnan(deadline_s) else deadline_s, chain=chain), view[end:]


def pack_numbers(numbers: Iterable[int]) -> bytes:
    listed = list(numbers)
    return struct.pack(f"<{len(listed)}Q", *listed)


def unpack_numbers(body: Bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(body) // 8}Q", body)


# The host's side -----------------------------------------------------------------------------------------------------


class Admission(Enum):
    """What to do with a call that has arrived."""

    RUN = "run it"
    ATTACH = "it runs; its answer will go to whoever listens then"
    REPEAT = "it has been answered: send the stored answer again"
    FORGOTTEN = "its outcome is unknown; never run it"
    FULL = "refuse it: the caller has too many open calls"


Answer: TypeAlias = tuple[int, int, Any]
"""Kind, flags and body of the frame that answers a call; where flagged BUFFERS the body is a parcel."""
CANCELLED_ANSWER: Answer = (FAULT, CANCELLED, b"")


@define(eq=False)
class CallDeduplicator:
    """All that one host knows of the calls of one caller.

    ``unbroken``: this ledger has been kept since the caller's first call here. Otherwise an earlier one was thrown
    away, and calls that come again may have been run under it.
    """

    unbroken: bool = True
    open_limit: int = OPEN_CALLS_LIMIT
    kept_limit_bytes: int = KEPT_BYTES_LIMIT
    highest: int = 0
    kept_bytes: int = 0
    kept_bulk_bytes: int = 0
    _open: dict[int, Answer | None] = field(factory=dict, init=False)

    def admit(self, number: int, again: bool = False) -> Admission:
        if number > self.highest:
            if len(self._open) >= self.open_limit:
                return Admission.FULL
            self.highest = number
            if again and not self.unbroken:
                return Admission.FORGOTTEN
            self._open[number] = None
            return Admission.RUN
        if number not in self._open:
            return Admission.FORGOTTEN
        return Admission.ATTACH if self._open[number] is None else Admission.REPEAT

    def answered(self, number: int, answer: Answer) -> bool:
        """Keep the answer until it is settled. False: the call is not open or has been answered before."""
        if self._open.get(number, answer) is not None:
            return False
        self._open[number] = answer
        self._weigh(answer, 1)
        return True

    def answer(self, number: int) -> Answer | None:
        return self._open.get(number)

    def is_running(self, number: int) -> bool:
        return number in self._open and self._open[number] is None

    def settle(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            kept = self._open.get(number)
            if kept is not None:
                del self._open[number]
                self._weigh(kept, -1)

    def settle_all_but(self, unsettled: Iterable[int]) -> None:
        """After a reset: the caller names what it still waits for."""
        keep = set(unsettled)
        self.settle([number for number, kept in self._open.items() if kept is not None and number not in keep])

    @property
    def has_room(self) -> bool:
        """Whether more calls may be started; when not, they wait until the caller has settled some answers."""
        return self.kept_bytes < self.kept_limit_bytes and self.kept_bulk_bytes < KEPT_BULK_LIMIT_BYTES

    def _weigh(self, answer: Answer, sign: int) -> None:
        if answer[1] & BUFFERS:
            self.kept_bulk_bytes += sign * len(answer[2])
        else:
            self.kept_bytes += sign * len(answer[2])

    def running(self) -> list[int]:
        return [number for number, kept in self._open.items() if kept is None]

    def __len__(self) -> int:
        return len(self._open)


# The caller's side ---------------------------------------------------------------------------------------------------


class PendingCall(Protocol):
    """What the caller's table must know of a call."""

    number: int
    """0 until it is sent."""
    size: int
    """Bytes it holds."""


T = TypeVar("T", bound=PendingCall)


@define(eq=False)
class PendingCalls(Generic[T]):
    """All calls of one caller to one host incarnation: queued (surely not delivered), or open (maybe delivered)."""

    numbers: Callable[[], int] = field(factory=lambda: count(1).__next__)
    open: dict[int, T] = field(factory=dict, init=False)
    queued: deque[T] = field(factory=deque, init=False)
    held_bytes: int = 0
    _settled: list[int] = field(factory=list, init=False)
    _settled_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.open) + len(self.queued) >= OPEN_CALLS_LIMIT or self.held_bytes >= OPEN_BYTES_LIMIT

    def queue(self, call: T) -> None:
        self.queued.append(call)
        self.held_bytes += call.size

    def sent(self, call: T) -> int:
        """Give ``call`` its number; it goes out now, without having been queued."""
        call.number = number = self.numbers()
        self.open[number] = call
        self.held_bytes += call.size
        return number

    def sent_queued(self) -> T:
        """Give the first queued call its number; it goes out now."""
        call = self.queued.popleft()
        self.held_bytes -= call.size
        self.sent(call)
        return call

    def unsend(self, call: T) -> None:
        """The frame could not be handed over after all: back to the front of the queue."""
        del self.open[call.number]
        call.number = 0
        self.queued.appendleft(call)

    def withdraw(self, call: T) -> bool:
        """Forget a call that is still queued; False if it has been sent."""
        try:
            self.queued.remove(call)
        except ValueError:
            return False
        self.held_bytes -= call.size
        return True

    def answered(self, number: int, size: int) -> T | None:
        """The call that this answer (of ``size`` bytes) ends; None if it is known already."""
        call = self.open.pop(number, None)
        self._settled.append(number)
        self._settled_bytes += size
        if call is not None:
            self.held_bytes -= call.size
        return call

    def settlement(self, force: bool = False) -> bytes | None:
        """The body of a SETTLED frame, when enough answers have come to be worth one."""
        due = len(self._settled) >= SETTLE_EVERY_CALLS or self._settled_bytes >= SETTLE_EVERY_BYTES
        if not due and not (force and self._settled):
            return None
        body = pack_numbers(self._settled)
        self._settled, self._settled_bytes = [], 0
        return body

    def reset(self) -> tuple[bytes, list[T]]:
        """The host has forgotten the conversation: what to tell it first (a SETTLED frame flagged ONLY), and the
        calls to send again, in order, flagged AGAIN."""
        self._settled, self._settled_bytes = [], 0
        return pack_numbers(self.open), list(self.open.values())

    def take(self, mine: Callable[[T], bool] = lambda call: True) -> tuple[list[T], list[T]]:
        """Take out the calls of which ``mine`` is true: (queued ones, open ones), each in order."""
        queued = [call for call in self.queued if mine(call)]
        opened = [call for call in self.open.values() if mine(call)]
        self.queued = deque(call for call in self.queued if not mine(call))
        for call in opened:
            del self.open[call.number]
        self.held_bytes -= sum(call.size for call in queued) + sum(call.size for call in opened)
        return queued, opened


class LossAction(Enum):
    """What becomes of a call when the incarnation it was made for is gone."""

    REPEAT = "goes to the next incarnation"
    DIED = "ends as ActorDied: it was surely not delivered"
    UNKNOWN = "ends as OutcomeUnknown: it may have taken effect"


def on_host_lost(*, delivered: bool, may_come_back: bool, repeats: int) -> LossAction:
    """``delivered``: it may have arrived. ``may_come_back``: there may be a next incarnation.
    ``repeats``: how often the author allows it to be delivered again."""
    if not delivered:
        return LossAction.REPEAT if may_come_back else LossAction.DIED
    return LossAction.REPEAT if may_come_back and repeats > 0 else LossAction.UNKNOWN


@frozen
class HostLoss:
    """Why an incarnation is gone, ready to become the error of each of its calls."""

    text: str
    """A sentence without its full stop, such as ``its process was killed by signal 9``."""
    lost: bool = False
    """The machine is silent: nobody knows whether the process lives."""
    cause: BaseException | None = None
    trouble: FrayError | None = None
    """Set when nobody died: the two sides cannot talk for this reason."""
    raised: Callable[[], BaseException] | None = None
    """Set when the constructor raised: makes its error, one for each call, so that their tracebacks stay apart."""

    def undelivered(self, label: str) -> BaseException:
        """The error of a call that surely had no effect."""
        if self.raised is not None:
            error = self.raised()
            error.add_note(f"raised by the constructor of actor {label}, which will never answer")
            return error
        return self.trouble or self.died(label)

    def died(self, label: str) -> ActorDied:
        """The end itself as an error."""
        error = (MachineLost if self.lost else ActorDied)(f"actor {label} is gone: {self.text}", actor=label)
        error.__cause__ = self.cause
        return error

    def delivered(self, label: str, method: str) -> ActorDied:
        """The error of a call that may have taken effect."""
        text = (
            f"actor {label} was lost while {method}() was under way: {self.text}. "
            f"The call may or may not have taken effect; say idempotent=True if it may be repeated"
        )
        error = (MachineLost if self.lost else OutcomeUnknown)(text, actor=label, method=method)
        error.__cause__ = self.cause or self.trouble or self.died(label)
        return error
