"""Versions of the weights: their names, their age, and which of them samples may be made by and trained with.

Version v is the number of updates done. Its name carries the incarnation of the trainer that made it: a trainer that
resumed from a checkpoint makes other weights of the same number, and what was made with those of the lost line is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeAlias

from attrs import define, field, frozen


class SyncMode(Enum):
    """Order of rollouts and training."""

    SYNC = "sync"
    """Every batch is made by the current version; rollouts wait while the trainer trains."""
    BATCH_ASYNC = "batch-async"
    """The weights are synced, and rollouts wait for it, only when the next batch would be older than the threshold."""
    FULLY_ASYNC = "fully-async"
    """Every version is sent at once; nothing waits. What is too old is refused."""


@frozen(order=True)
class VersionName:
    """Name of a version: the trainer's incarnation, and the number of updates."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"


Segment: TypeAlias = tuple[VersionName, int]
"""A version, and how many successive tokens it made."""


@define
class VersionLine:
    """The versions that led to the current one.

    Args:
        forks: for each incarnation of the trainer, from 0, the number of the version from which it began.
        number: of the current version.
    """

    forks: list[int] = field(factory=lambda: [0])
    number: int = 0

    @property
    def current(self) -> VersionName:
        return VersionName(len(self.forks) - 1, self.number)

    def advance(self) -> VersionName:
        """Count an update and return the name of the version that it made."""
        self.number += 1
        return self.current

    def fork(self, number: int) -> VersionName:
        """Continue from an earlier version with a new incarnation; return its name.

        Raises:
            ValueError: the line has no version of this number.
        """
        if not 0 <= number <= self.number:
            raise ValueError(f"no version {number}: the line ends at {self.current}")
        self.forks.append(number)
        self.number = number
        return self.current

    def has(self, name: VersionName) -> bool:
        """Return whether the version led to the current one, or is it."""
        if name.incarnation >= len(self.forks) or name.number > self.number:
            return False
        # An incarnation's own versions are those after the one from which it began; each later one cut the line.
        began = self.forks[name.incarnation]
        return began <= name.number <= min(self.forks[name.incarnation + 1 :], default=self.number)

    def age(self, segments: Iterable[Segment]) -> int | None:
        """Return by how many updates the oldest token is behind; 0 without tokens, None if it is of no such version."""
        ages = [0]
        for name, _ in segments:
            if not self.has(name):
                return None
            ages.append(self.number - name.number)
        return max(ages)


class Gate(Enum):
    """Permission to begin rollouts."""

    OPEN = "open"
    TRAINING = "training"
    """A batch is trained after which the weights must be synced; nothing is rolled out that would be too old then."""
    SYNCING = "syncing"
    """The servers receive the new weights."""


@define
class WeightSchedule:
    """The version that is trained, the one that the servers have, and what may be done with them.

    Args:
        mode: how rollouts and training follow one another.
        threshold: updates by which a token may be behind when it is trained; 0 in the mode ``sync``.
        validate_every: updates between two versions that are validated; None: none is.
        pinned: the version that is validated, or will be when the servers have it; they take no newer one until that
            ends.
    """

    mode: SyncMode
    threshold: int = 1
    validate_every: int | None = None
    pinned: VersionName | None = None
    line: VersionLine = field(factory=VersionLine)
    rollout: VersionName = VersionName(0, 0)
    """The version that servers have, or receive in mode ``fully-async``."""
    gate: Gate = Gate.OPEN
    last_validated: int = 0
    """Number of the version that was pinned last."""

    @property
    def max_age(self) -> int:
        return 0 if self.mode is SyncMode.SYNC else self.threshold

    @property
    def needs_sync(self) -> bool:
        """True if the weights must be synced after the next update, before rollouts continue."""
        if self.mode is SyncMode.FULLY_ASYNC:
            return False
        return self.line.number + 1 - self.rollout.number > self.max_age

    def begin_update(self) -> None:
        """Note that a batch was taken."""
        if self.needs_sync:
            self.gate = Gate.TRAINING

    def skip_update(self) -> None:
        """Note that the batch was not trained: the weights are as before."""
        self.gate = Gate.OPEN

    def finish_update(self) -> VersionName:
        """Count the update; return the version that it made."""
        name = self.line.advance()
        if self.gate is Gate.TRAINING:
            self.gate = Gate.SYNCING
        self._pin_if_due()
        return name

    @property
    def is_due(self) -> bool:
        """True if servers shall receive the current version, now or when a validation ends."""
        return (
            self.mode is SyncMode.FULLY_ASYNC
            or self.gate is Gate.SYNCING
            or self.pinned == self.line.current
            or self._wants_validation
        ) and self.rollout != self.line.current

    @property
    def to_send(self) -> VersionName | None:
        """The version that servers shall receive now; None if they have it, or have to wait for a validation."""
        if self.pinned is not None:
            return self.pinned if self.pinned != self.rollout else None
        return self.line.current if self.is_due else None

    @property
    def target(self) -> VersionName:
        """The version that servers shall have now."""
        return self.to_send or self.rollout

    def synced(self, name: VersionName) -> bool:
        """Note that servers have a version. Return False, and change nothing, if it is not the one to be sent."""
        if name != self.to_send:
            return False
        self.rollout = name
        # A version that was sent for its validation may be behind the current one.
        if self.gate is Gate.SYNCING:
            is_too_old = self.line.number - name.number > self.max_age
        else:
            is_too_old = self.gate is Gate.TRAINING and self.needs_sync
        self.gate = self.gate if is_too_old else Gate.OPEN
        return True

    def end_validation(self) -> None:
        """Let servers take newer versions; a version that is to be validated meanwhile is the next one they keep."""
        self.pinned = None
        self._pin_if_due()

    @property
    def _wants_validation(self) -> bool:
        every = self.validate_every
        return every is not None and self.line.number // every > self.last_validated // every

    def _pin_if_due(self) -> None:
        if self.pinned is None and self._wants_validation:
            self.pinned, self.last_validated = self.line.current, self.line.number

    def fork(self, number: int) -> VersionName:
        """Go back to a version, whose weights are sent again; return its name. Raises as `VersionLine.fork`.

        A validation that has not ended begins again, with that version.
        """
        name = self.line.fork(number)
        # The servers may have weights of the lost line, even of the same number.
        self.gate = Gate.SYNCING
        if self.pinned is not None:
            self.pinned, self.last_validated = name, number
        return name

    def is_usable(self, segments: Iterable[Segment]) -> bool:
        """Return whether tokens of these versions may be trained now."""
        age = self.line.age(segments)
        return age is not None and age <= self.max_age
