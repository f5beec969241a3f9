"""Looking for garbage, seldom: what the law remembers is many small things that live long and make no cycles.

Python's collector walks over all of them again and again: a tenth of a burst of launches, a fifth of a start on a large
store, and some ten milliseconds in the middle of a step. What is loaded at the start is left out for good, and what
comes later is looked at in larger heaps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 5, 100)
"""New objects before the youngest are looked at, and so many of these looks before older ones are."""


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What is made in this block, and before, stays. For a process that is the controller and nothing else."""
    gc.disable()
    try:
        yield
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
    finally:
        gc.enable()
