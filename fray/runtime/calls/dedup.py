"""Host side: which calls of one caller have been seen, so that none runs twice. Pure.

Invariants: the id of a call is (conversation of a caller, number). A caller numbers its calls in the order in which it
sends them, so the numbers that arrive at one host only rise, except when the conversation was forgotten and unanswered
calls are sent again. A host therefore keeps one number, the highest it has seen (the watermark), and the calls below it
that are still open: running, or answered and not yet settled by the caller. A call at or below the watermark that is
not open is forgotten: its outcome is unknown, and it never runs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeAlias

from attrs import define, field

from fray.runtime.calls.wire import (
    BUFFERS,
    CANCELLED,
    FAULT,
    KEPT_BULK_LIMIT_BYTES,
    KEPT_BYTES_LIMIT,
    OPEN_CALLS_LIMIT,
)


class Admission(Enum):
    """Decision about a call that has arrived."""

    RUN = "run it"
    ATTACH = "it runs already; its answer goes to the newest connection"
    REPEAT = "it has been answered: send the stored answer again"
    FORGOTTEN = "its outcome is unknown; never run it"
    FULL = "refuse it: the caller has too many open calls"


Answer: TypeAlias = tuple[int, int, Any]
"""Kind, flags and body of the frame that answers a call; with the flag BUFFERS the body is a `PickledObject`."""
CANCELLED_ANSWER: Answer = (FAULT, CANCELLED, b"")


@define(eq=False)
class CallDeduplicator:
    """Record of the calls of one caller at one host.

    ``is_complete``: it has existed since the caller's first call here. Otherwise an earlier one was thrown away, and
    calls that are sent again may have run under that one.
    """

    is_complete: bool = True
    open_limit: int = OPEN_CALLS_LIMIT
    kept_limit_bytes: int = KEPT_BYTES_LIMIT
    # One number stands for all forgotten calls: they arrive in rising order, so what is not above it has been here
    # before.
    highest: int = 0
    kept_bytes: int = 0
    kept_bulk_bytes: int = 0
    _open: dict[int, Answer | None] = field(factory=dict, init=False)

    def admit(self, number: int, again: bool = False) -> Admission:
        """Decide about a call that has arrived; ``again``: it was sent before."""
        if number > self.highest:
            # Refused without raising the watermark: the caller may send the same number again once it has settled
            # others.
            if len(self._open) >= self.open_limit:
                return Admission.FULL
            self.highest = number
            # The record that was thrown away may have admitted this call. To run it now could run it twice.
            if again and not self.is_complete:
                return Admission.FORGOTTEN
            self._open[number] = None
            return Admission.RUN
        # Settled calls end here too: a late duplicate of one is of no interest to its caller, which has the answer.
        if number not in self._open:
            return Admission.FORGOTTEN
        return Admission.ATTACH if self._open[number] is None else Admission.REPEAT

    def answered(self, number: int, answer: Answer) -> bool:
        """Keep the answer until it is settled. Return False if the call is not open or has been answered before."""
        # None means open and unanswered. An unknown number yields the default, an answered one the stored answer.
        if self._open.get(number, answer) is not None:
            return False
        self._open[number] = answer
        self._count(answer, 1)
        return True

    def answer(self, number: int) -> Answer | None:
        """Return the stored answer."""
        return self._open.get(number)

    def is_running(self, number: int) -> bool:
        return number in self._open and self._open[number] is None

    def discard_answers(self, numbers: Iterable[int]) -> None:
        """Forget the answers of these calls: the caller has them."""
        for number in numbers:
            # Only answered calls can be settled; the entry of a running one must stay, as it prevents a second
            # execution.
            answer = self._open.get(number)
            if answer is not None:
                del self._open[number]
                self._count(answer, -1)

    def discard_answers_except(self, unsettled: Iterable[int]) -> None:
        """Forget all answers but those of ``unsettled``, which the caller still waits for after a reset."""
        keep = set(unsettled)
        self.discard_answers(
            [number for number, answer in self._open.items() if answer is not None and number not in keep]
        )

    @property
    def has_room(self) -> bool:
        """Return whether more calls may start; if not, they wait until the caller has settled some answers."""
        # A caller that makes calls and never settles them would otherwise fill the host's memory. Large buffers have a
        # limit of their own, so that one result of 1 GiB does not stop small calls.
        return self.kept_bytes < self.kept_limit_bytes and self.kept_bulk_bytes < KEPT_BULK_LIMIT_BYTES

    def _count(self, answer: Answer, sign: int) -> None:
        if answer[1] & BUFFERS:
            self.kept_bulk_bytes += sign * len(answer[2])
        else:
            self.kept_bytes += sign * len(answer[2])

    def running(self) -> list[int]:
        """Return the numbers of the calls that run."""
        return [number for number, answer in self._open.items() if answer is None]

    def __len__(self) -> int:
        return len(self._open)
