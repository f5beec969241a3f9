"""Start of the processes of a run: what they load stays, so Python's garbage collector need not look at it again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from fray.gc_tuning import THRESHOLDS, gc_frozen
from fray.runtime.actors.lifecycle import has_own_process


def loading(thresholds: tuple[int, int, int] | None = THRESHOLDS) -> AbstractContextManager[None]:
    """Return a block in which a part of a run loads what stays, with the collector as `gc_frozen` leaves it.

    Where the part shares its process with the user's program, nothing is changed.
    """
    return gc_frozen(thresholds) if has_own_process() else nullcontext()
