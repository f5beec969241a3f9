"""Background tasks for a body: a nursery that does not show in the body's errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_background_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery whose tasks serve the body and end with it.

    A Trio nursery wraps every error in an ExceptionGroup. Here the tasks are internal to Fray, so a single error, of
    the body or of one service, is raised as it is.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
            # Only when the body has ended well: an error cancels the nursery by itself.
            nursery.cancel_scope.cancel()
        return
    except BaseExceptionGroup as group:
        # Several errors at once cannot be reduced to one without losing the others.
        if len(group.exceptions) != 1:
            raise
        error = group.exceptions[0]
    raise error  # outside the handler, so that its own __context__ stays
