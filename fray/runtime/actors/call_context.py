"""Context variables of calls: each call sees a copy of its actor's, and what it sets is seen by no other call.

The copies are of what the actor's constructor left. A worker task runs several calls without a checkpoint between
them, so Trio cannot give each its context. Instead, the first step of a call is run in its context explicitly; from
then on its task is in that context, until another call has its first step there.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any

from trio.lowlevel import current_task


@coroutine
def in_context(work: Coroutine[Any, Any, Any], context: Context) -> Generator[Any, Any, Any]:
    """Await ``work`` in ``context``, in this task; return and raise what it does.

    A coroutine that ends at once costs no more than one `Context.run`. The task's own context is not restored: workers
    have no use for it.
    """
    try:
        message = context.run(work.send, None)
        current_task().context = context
        while True:
            try:
                got = yield message
            except BaseException as error:  # noqa: BLE001 - what is thrown in here is passed to where the work waits
                message = work.throw(error)
            else:
                message = work.send(got)
    except StopIteration as end:
        return end.value
