"""Ledger of the requests of one job: each takes effect once, in order, whatever is sent twice or lost.

The engine has applied the requests up to a number. One that is lost continues from a snapshot, and the requests after
it are executed again for their effect; the answers stay those that were given first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define, frozen

AHEAD_LIMIT = 1_024
"""Requests that may wait to be executed."""


class LedgerConflict(Exception):
    """Request whose number or id was used before, with another body; or one too many."""


class LedgerFull(LedgerConflict):
    """Request for which there is no room."""


@define
class LedgerEntry:
    """A request.

    Attributes:
        seq: number, by which requests are executed in order.
        kind: operation.
        digest: of the kind and the body.
        request_id: chosen by the client; empty: none.
        has_effect: what follows depends on it, so that it is executed again after a snapshot without it.
        answer: None as long as there is none.
        was_sent: the answer was sent while the connection was open.
        listeners: connections that wait for the answer.
    """

    seq: int
    kind: str
    digest: str
    request_id: str = ""
    has_effect: bool = True
    answer: Any = None
    was_sent: bool = False
    listeners: int = 0


@frozen
class Receipt:
    """Place of a request in the ledger."""

    seq: int
    is_new: bool
    """False: it is one that was received before, and has its answer."""


class Ledger:
    """Requests of one job.

    Args:
        entries: those received before, after a restart.
        first: number of the first request.
    """

    def __init__(self, entries: Iterable[LedgerEntry] = (), *, first: int = 1) -> None:
        self.entries = {entry.seq: entry for entry in entries}
        self._by_id = {entry.request_id: entry for entry in self.entries.values() if entry.request_id}
        self._first = first
        self.applied = first - 1
        """Number up to which the engine has executed all; `rewind` sets it when an engine begins."""

    @property
    def last(self) -> int:
        """Highest number received; one below the first if there is none."""
        return max(self.entries, default=self._first - 1)

    def receive(
        self,
        kind: str,
        digest: str,
        *,
        request_id: str = "",
        seq: int | None = None,
        has_effect: bool = True,
        room: int = AHEAD_LIMIT,
    ) -> Receipt:
        """Take a request, or recognise it.

        It is recognised by its number, by its id, or, with neither, as a repetition of the latest request: an equal
        body, when the answer was not sent and no connection waits for it. An equal body after the answer was sent is
        another request.

        Args:
            kind: operation.
            digest: of the kind and the body.
            request_id: chosen by the client; empty: none.
            seq: number chosen by the client; None: the next one.
            has_effect: as `LedgerEntry.has_effect`.
            room: requests that may be added.

        Raises:
            LedgerFull: it is new, and there is no room.
            LedgerConflict: the number or id was sent before with another body, the number is below the first, or more
                than `AHEAD_LIMIT` requests would wait.
        """
        known = self._known(digest, request_id, seq)
        if known is not None:
            return Receipt(known.seq, is_new=False)
        if room <= 0:
            raise LedgerFull("there is no room for another request")
        number = self.last + 1 if seq is None else seq
        if number < self._first:
            raise LedgerConflict(f"number {number}: the first request of this job has number {self._first}")
        if number > self.applied + AHEAD_LIMIT:
            raise LedgerConflict(
                f"number {number} is more than {AHEAD_LIMIT} after {self.applied}, the last that was executed"
            )
        entry = LedgerEntry(number, kind, digest, request_id, has_effect)
        self.entries[number] = entry
        if request_id:
            self._by_id[request_id] = entry
        return Receipt(number, is_new=True)

    def withdraw(self, seq: int) -> None:
        """Forget a request that was received and could not be kept, so that a repetition is received again."""
        entry = self.entries.pop(seq)
        if entry.request_id:
            del self._by_id[entry.request_id]

    def _known(self, digest: str, request_id: str, seq: int | None) -> LedgerEntry | None:
        if seq is not None and seq in self.entries:
            return _same(self.entries[seq], digest, f"number {seq}")
        if request_id and request_id in self._by_id:
            return _same(self._by_id[request_id], digest, f"request id {request_id!r}")
        if seq is None and not request_id and self.entries:
            latest = self.entries[self.last]
            if latest.digest == digest and not latest.was_sent and not latest.listeners:
                return latest
        return None

    def next_seq(self) -> int | None:
        """Return the number of the request to execute next; None: it has not come yet, or all are executed."""
        while (entry := self.entries.get(self.applied + 1)) is not None:
            if entry.has_effect or entry.answer is None:
                return entry.seq
            # Answered, and nothing that follows depends on it.
            self.applied = entry.seq
        return None

    def finish(self, seq: int, answer: Any) -> bool:
        """Note that the engine has executed a request; return whether the answer is its first, which counts.

        Raises:
            ValueError: another request was to be executed.
        """
        if seq != self.applied + 1:
            raise ValueError(f"request {seq} was executed, but {self.applied + 1} is the next")
        self.applied, entry = seq, self.entries[seq]
        if entry.answer is not None:
            return False
        entry.answer = answer
        return True

    def rewind(self, applied: int) -> None:
        """Continue with an engine that has the requests up to a number: those after it are executed again.

        Raises:
            ValueError: the ledger does not have all these requests, so the engine is not of this job, or not all their
                answers, which would never be given.
        """
        for seq in range(self._first, applied + 1):
            entry = self.entries.get(seq)
            if entry is None or entry.answer is None:
                what = f"{seq} is not in the ledger" if entry is None else f"the answer to {seq} was lost"
                raise ValueError(f"the engine has executed requests up to {applied}, but {what}")
        self.applied = applied

    def waits_for(self, seq: int) -> int | None:
        """Return the lowest number before ``seq`` that has not come, for which it waits; None: none is missing."""
        return next((number for number in range(self.applied + 1, seq) if number not in self.entries), None)


def _same(entry: LedgerEntry, digest: str, name: str) -> LedgerEntry:
    if entry.digest != digest:
        raise LedgerConflict(f"{name} was sent before with another body: a number or id stands for one request")
    return entry
