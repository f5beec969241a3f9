"""Tuning of Python's garbage collector for processes in which many objects stay, or thousands live for moments.

By default the collector walks over them again and again. In the controller that was a tenth of a burst of launches, a
fifth of a start on a large store, and some ten milliseconds in the middle of a step; in a run of `fray.rl` a quarter of
the rollout processes' CPU time and a fifth of a server's, which has loaded torch. So what is loaded at the start is
frozen, and the thresholds for later objects are raised.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (10_000, 5, 100)
"""New objects before a collection of the youngest generation, and collections of each generation before one of the
next."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Let no collection begin in this block; one that is due begins after it.

    For a calculation that makes thousands of objects and drops nearly all of them at its end: a collection in the
    middle would walk over them, and keep them for a second one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def gc_frozen(thresholds: tuple[int, int, int] | None = THRESHOLDS) -> Iterator[None]:
    """Freeze all objects that exist at the end of this block. For a process whose main work is begun in it.

    Args:
        thresholds: of the collector from then on; None leaves them as they are.
    """
    # While a large store or a library is loaded, collections find no garbage and cost a fifth of the start.
    gc.disable()
    try:
        yield
        # Moves all objects to a generation that is never collected; what becomes garbage is freed by its reference
        # count.
        gc.freeze()
        if thresholds is not None:
            gc.set_threshold(*thresholds)
    finally:
        gc.enable()
