"""Tuning of Python's garbage collector for a process with many small, long-lived objects without cycles.

By default the collector walks over the scheduler's state again and again: a tenth of a burst of launches, a fifth of a
start on a large store, and some ten milliseconds in the middle of a step. So what is loaded at the start is frozen, and
the thresholds for later objects are raised.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 5, 100)
"""New objects before a collection of the youngest generation, and collections of each generation before one of the
next."""


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze all objects that exist at the end of this block. For a process that is nothing but the controller."""
    # While a large store is loaded, collections find no garbage and cost a fifth of the start.
    gc.disable()
    try:
        yield
        # Moves all objects to a generation that is never collected; what becomes garbage is freed by its reference
        # count.
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
    finally:
        gc.enable()
