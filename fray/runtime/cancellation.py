"""Errors of user code that is being cancelled, which may be groups of Trio's Cancelled and of other errors."""

from __future__ import annotations

import trio


def split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of ``error`` that is Trio's Cancelled, and the rest; None for a part that is empty.

    Code that catches errors of user code passes on the first part alone: the rest of a group would leave the cancelled
    scope as an error of Fray's own task, and end the process with it.
    """
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)
    return (error, None) if isinstance(error, trio.Cancelled) else (None, error)
