"""Ledger of the requests for samples of one sampler: they have no effect, so an old answer need not be kept.

A request that comes again by its number, after its answer was forgotten, is computed again, with the same seed. The
SDK sends it by another number: only one that has a ``seed`` gets the same samples then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fray.tinker.core.ledger import LedgerConflict, LedgerEntry

ANSWER_S = 3_600.0
"""Seconds for which an answer is kept."""
ANSWERS_LIMIT = 4_096
"""Answers of one sampler that are kept: the newest."""


class SampleLedger:
    """Requests of one sampler, in no order: numbers of copies of a sampler begin at multiples of 10⁹.

    Args:
        entries: those received before, after a restart.
        now: seconds of a clock; answers of before a restart are kept from then on.
    """

    def __init__(self, entries: Iterable[LedgerEntry] = (), now: float = 0.0) -> None:
        self.entries = {entry.seq: entry for entry in entries}
        self.next_seq = max(self.entries, default=-1) + 1
        """A number that was not used."""
        self._answered = {seq: now for seq, entry in sorted(self.entries.items()) if entry.answer is not None}
        """Time of each answer, the oldest in front."""

    def receive(self, seq: int, kind: str, digest: str) -> bool:
        """Take a request; return False if it was received before.

        Raises:
            LedgerConflict: its number was used with another body.
        """
        known = self.entries.get(seq)
        if known is None:
            self.entries[seq] = LedgerEntry(seq, kind, digest, has_effect=False)
            self.next_seq = max(self.next_seq, seq + 1)
            return True
        if known.digest != digest:
            raise LedgerConflict(f"number {seq} was sent before with another body: a number stands for one request")
        return False

    def withdraw(self, seq: int) -> None:
        """Forget a request that was received and could not be kept, so that a repetition is received again."""
        del self.entries[seq]

    def finish(self, seq: int, now: float) -> None:
        """Note that a request has its answer."""
        self.entries[seq].answer = True
        self._answered[seq] = now

    def has_old(self, now: float) -> bool:
        """Return whether `forget` would forget any."""
        over = len(self._answered) > ANSWERS_LIMIT
        return over or any(since <= now - ANSWER_S for since in itertools.islice(self._answered.values(), 1))

    def forget(self, now: float) -> list[int]:
        """Forget answers beyond `ANSWER_S` and `ANSWERS_LIMIT`; return their numbers."""
        over = len(self._answered) - ANSWERS_LIMIT
        old = [seq for at, (seq, since) in enumerate(self._answered.items()) if at < over or since <= now - ANSWER_S]
        for seq in old:
            del self._answered[seq], self.entries[seq]
        return old
