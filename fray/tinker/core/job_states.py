"""States of a job of the service, as OpenTinker's clients see them, and the ways between them."""

from __future__ import annotations

from enum import StrEnum


class ServiceJobState(StrEnum):
    """State of a job."""

    QUEUED = "QUEUED"
    """Waits for accelerators."""
    STARTING = "STARTING"
    """An engine is being started for it."""
    RUNNING = "RUNNING"
    """Takes requests; also while a lost engine is replaced."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """True if the job has ended: then its state does not change any more."""
        return not _NEXT[self]


_S = ServiceJobState
_NEXT: dict[ServiceJobState, frozenset[ServiceJobState]] = {
    _S.QUEUED: frozenset((_S.STARTING, _S.COMPLETED, _S.FAILED, _S.CANCELLED)),
    _S.STARTING: frozenset((_S.RUNNING, _S.COMPLETED, _S.FAILED, _S.CANCELLED)),
    _S.RUNNING: frozenset((_S.COMPLETED, _S.FAILED, _S.CANCELLED)),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


def may_become(state: ServiceJobState, wanted: ServiceJobState) -> bool:
    """Return whether a job in ``state`` can be in ``wanted`` next."""
    return wanted in _NEXT[state]
