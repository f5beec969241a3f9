"""The books of objects that were put: who holds each, which must leave memory, which are gone. Pure.

The law. An object lives as long as somebody holds it: a process (however many references it has), or a reference that
travels and has not arrived. What travels has a token: it counts from when the sender says so until somebody says that
it has arrived, or for `TRANSIT_S`. Sender and receiver speak to the owner each in their own order, so a token may have
arrived before it is heard of: then it never counts. Beyond the limit of memory, those unused for longest are written
to storage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attrs import define, field

TRANSIT_S = 3600.0
"""How long a pickled reference that nobody opens keeps its object."""
EARLY_LIMIT = 10_000
"""Tokens that have arrived before they were heard of."""


@define(eq=False)
class ObjectEntry:
    """One object."""

    size: int
    holders: set[str] = field(factory=set)
    tokens: dict[str, float] = field(factory=dict)
    """Of references on their way: until when each counts."""
    in_memory: bool = True

    @property
    def is_held(self) -> bool:
        return bool(self.holders or self.tokens)


@define(eq=False)
class ReferenceCounts:
    """All objects of one owner. Methods that may end some return their numbers: they are off the books then."""

    limit_bytes: int
    memory_bytes: int = 0
    """Of the objects in memory."""
    entries: OrderedDict[int, ObjectEntry] = field(factory=OrderedDict)
    """Those unused for longest come first."""
    _held: dict[str, set[int]] = field(factory=dict)
    _early_tokens: OrderedDict[str, None] = field(factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.entries)

    # Holders ---------------------------------------------------------------------------------------------------------

    def add(self, number: int, size: int) -> None:
        """A new object, in memory; nobody holds it yet."""
        self.entries[number] = ObjectEntry(size)
        self.memory_bytes += size

    def hold(self, number: int, holder: str) -> bool:
        """From now on ``holder`` has it. False: there is no such object (any more)."""
        entry = self.entries.get(number)
        if entry is None:
            return False
        entry.holders.add(holder)
        self._held.setdefault(holder, set()).add(number)
        return True

    def release(self, number: int, holder: str) -> list[int]:
        """``holder`` has it no more."""
        held = self._held.get(holder)
        if held is not None:
            held.discard(number)
            if not held:
                del self._held[holder]
        entry = self.entries.get(number)
        if entry is not None:
            entry.holders.discard(holder)
        return self._remove_unheld([number])

    def remove_holder(self, holder: str) -> list[int]:
        """``holder`` is gone, with all it had."""
        numbers = self._held.pop(holder, set())
        for number in numbers:
            self.entries[number].holders.discard(holder)
        return self._remove_unheld(sorted(numbers))

    def add_token(self, number: int, token: str, now: float) -> None:
        """A reference to it is on its way."""
        entry = self.entries.get(number)
        if token in self._early_tokens:
            del self._early_tokens[token]
        elif entry is not None:
            entry.tokens[token] = now + TRANSIT_S

    def remove_token(self, number: int, token: str) -> list[int]:
        """Somebody has received that reference (and holds the object, if it wants to)."""
        entry = self.entries.get(number)
        if entry is None:
            return []
        if entry.tokens.pop(token, None) is None:
            self._early_tokens[token] = None
            if len(self._early_tokens) > EARLY_LIMIT:
                self._early_tokens.popitem(last=False)
        return self._remove_unheld([number])

    def expire(self, now: float) -> list[int]:
        """References that have been on their way for too long do not count any more."""
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
            if entry.in_memory:
                self.memory_bytes -= entry.size
        return gone

    # Memory ----------------------------------------------------------------------------------------------------------

    def touch(self, number: int) -> None:
        """Somebody has asked for it."""
        if number in self.entries:
            self.entries.move_to_end(number)

    def next_to_spill(self, more_bytes: int = 0) -> int | None:
        """Which object must leave memory so that ``more_bytes`` have room; None: there is room, or nothing to leave."""
        if self.memory_bytes + more_bytes <= self.limit_bytes:
            return None
        return next((number for number, entry in self.entries.items() if entry.in_memory), None)

    def mark_spilled(self, number: int) -> None:
        """It is in storage now, if it still is."""
        entry = self.entries.get(number)
        if entry is not None and entry.in_memory:
            entry.in_memory = False
            self.memory_bytes -= entry.size
