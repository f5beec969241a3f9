"""Reference counts of the objects in one store: holders, references in transit, and which object to spill. Pure.

Invariants: an object lives as long as it has a holder. A holder is a process (counted once, however many references
it has) or a reference in transit. Each reference in transit has a token, which counts from the sender's report until
the receiver's, but no longer than `TRANSIT_S`. Sender and receiver report to the owner independently, so the arrival
of a token may be reported before its sending: such a token never counts. Above the memory limit, the least recently
used objects are spilled to storage.

`tests/runtime/test_objects.py` compares this module with a simple model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attrs import define, field

# A pickled reference may be written to disk and never read. An hour covers queues and restarts of jobs.
TRANSIT_S = 3600.0
"""Seconds for which a pickled reference that no process unpickles retains its object."""
EARLY_LIMIT = 10_000
"""Maximum number of remembered tokens whose arrival was reported before their sending."""


@define(eq=False)
class ObjectEntry:
    """Holders of one object; ``size`` in bytes."""

    size: int
    holders: set[str] = field(factory=set)
    tokens: dict[str, float] = field(factory=dict)
    """Token of each reference in transit: the time at which it expires."""
    in_memory: bool = True
    copies: dict[str, tuple[str, tuple[str, int]]] = field(factory=dict)
    """Copies on other hosts: the process that has it, and where it is found there, by host."""
    transfers: int = 0
    """Number of times that it was sent to another host."""

    @property
    def is_held(self) -> bool:
        return bool(self.holders or self.tokens)


@define(eq=False)
class ReferenceCounts:
    """Reference counts of all objects of one owner. Methods that may free objects return the numbers they removed."""

    limit_bytes: int
    memory_bytes: int = 0
    """Total size of the objects in memory."""
    entries: OrderedDict[int, ObjectEntry] = field(factory=OrderedDict)
    """Objects by number, least recently used first."""
    # The reverse index: the end of a process must not look at every object.
    _held: dict[str, set[int]] = field(factory=dict)
    _copied: dict[str, set[int]] = field(factory=dict)
    """Objects of which a process of another host has a copy."""
    ended_copies: list[tuple[tuple[str, int], int]] = field(factory=list)
    """Copies whose objects were removed: where they are found, and the number of the object."""
    _early_tokens: OrderedDict[str, None] = field(factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.entries)

    # Holders ---------------------------------------------------------------------------------------------------------

    def add(self, number: int, size: int) -> None:
        """Add a new object, in memory and without holders."""
        self.entries[number] = ObjectEntry(size)
        self.memory_bytes += size

    def hold(self, number: int, holder: str) -> bool:
        """Add a holder; return False if there is no such object (any more)."""
        entry = self.entries.get(number)
        # Released before the report arrived; the holder's fetch will raise ObjectLost.
        if entry is None:
            return False
        entry.holders.add(holder)
        self._held.setdefault(holder, set()).add(number)
        return True

    def release(self, number: int, holder: str) -> list[int]:
        """Remove one object from ``holder``."""
        numbers = self._held.get(holder)
        if numbers is not None:
            numbers.discard(number)
            if not numbers:
                del self._held[holder]
        entry = self.entries.get(number)
        if entry is not None:
            entry.holders.discard(holder)
        return self._remove_unheld([number])

    def remove_holder(self, holder: str) -> list[int]:
        """Remove ``holder``, which has ended, from all its objects, and the copies that it had for its host."""
        for number in self._copied.pop(holder, set()):
            if (entry := self.entries.get(number)) is not None:
                entry.copies = {host: copy for host, copy in entry.copies.items() if copy[0] != holder}
        numbers = self._held.pop(holder, set())
        for number in numbers:
            self.entries[number].holders.discard(holder)
        return self._remove_unheld(sorted(numbers))

    def end(self, number: int) -> list[int]:
        """Remove one object, although references remain."""
        entry = self.entries.get(number)
        if entry is None:
            return []
        for holder in entry.holders:
            held = self._held[holder]
            held.discard(number)
            if not held:
                del self._held[holder]
        entry.holders.clear()
        entry.tokens.clear()
        return self._remove_unheld([number])

    # Copies on other hosts -------------------------------------------------------------------------------------------

    def copy_on(self, number: int, host: str) -> tuple[str, int] | None:
        """Return where a host has a copy; None if it has none."""
        entry = self.entries.get(number)
        return entry.copies[host][1] if entry is not None and host in entry.copies else None

    def add_copy(self, number: int, host: str, process: str, home: tuple[str, int]) -> None:
        """Note that an object is sent to a process of another host, which keeps it for the readers there."""
        entry = self.entries.get(number)
        if entry is not None:
            entry.copies[host] = process, home
            entry.transfers += 1
            self._copied.setdefault(process, set()).add(number)

    # References in transit -------------------------------------------------------------------------------------------

    def add_token(self, number: int, token: str, now: float) -> None:
        """Count a reference in transit."""
        entry = self.entries.get(number)
        # Its receiver was faster with its report: the transit has ended, so the token must not begin to count.
        if token in self._early_tokens:
            del self._early_tokens[token]
        elif entry is not None:
            entry.tokens[token] = now + TRANSIT_S

    def remove_token(self, number: int, token: str) -> list[int]:
        """End the transit of a reference: its receiver has it, and is a holder by itself if it retains the object."""
        entry = self.entries.get(number)
        if entry is None:
            return []
        if entry.tokens.pop(token, None) is None:
            # Limited, since a sender may have died before its report and then nothing would remove the token.
            self._early_tokens[token] = None
            if len(self._early_tokens) > EARLY_LIMIT:
                self._early_tokens.popitem(last=False)
        return self._remove_unheld([number])

    def expire(self, now: float) -> list[int]:
        """Remove the tokens that have been in transit for `TRANSIT_S`."""
        changed = []
        for number, entry in self.entries.items():
            late = [token for token, until in entry.tokens.items() if until <= now]
            for token in late:
                del entry.tokens[token]
            if late:
                changed.append(number)
        return self._remove_unheld(changed)

    def _remove_unheld(self, numbers: Iterable[int]) -> list[int]:
        gone = [number for number in numbers if number in self.entries and not self.entries[number].is_held]
        for number in gone:
            entry = self.entries.pop(number)
            for process, home in entry.copies.values():
                self.ended_copies.append((home, number))
                self._copied.get(process, set()).discard(number)
            if entry.in_memory:
                self.memory_bytes -= entry.size
        return gone

    # Memory ----------------------------------------------------------------------------------------------------------

    def touch(self, number: int) -> None:
        """Mark the object as just used."""
        if number in self.entries:
            self.entries.move_to_end(number)

    def next_to_spill(self, more_bytes: int = 0) -> int | None:
        """Return the object to spill next to make room for ``more_bytes``; None: they fit, or nothing is in memory."""
        if self.memory_bytes + more_bytes <= self.limit_bytes:
            return None
        # Least recently used first, as `touch` moves entries to the end.
        return next((number for number, entry in self.entries.items() if entry.in_memory), None)

    def mark_spilled(self, number: int) -> None:
        """Mark the object as written to storage, if it still exists."""
        entry = self.entries.get(number)
        # It may have been released while it was written.
        if entry is not None and entry.in_memory:
            entry.in_memory = False
            self.memory_bytes -= entry.size
