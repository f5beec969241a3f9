"""Processes of a run: what they load stays, for Python's garbage collector; and the notice of their end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import trio

from fray.gc_tuning import THRESHOLDS, gc_frozen
from fray.runtime.actors.lifecycle import has_own_process
from fray.runtime.process.current_job import current_job

NOTICE_S = 10.0
"""Seconds between the notice and the end of a process whose machine leaves the cluster, or is given to others.

No longer than a run may take to end: a notice is not shortened when its owner ends meanwhile.
"""
NOTICE_CHECK_S = 0.2


def loading(thresholds: tuple[int, int, int] | None = THRESHOLDS) -> AbstractContextManager[None]:
    """Return a block in which a part of a run loads what stays, with the collector as `gc_frozen` leaves it.

    Where the part shares its process with the user's program, nothing is changed.
    """
    return gc_frozen(thresholds) if has_own_process() else nullcontext()


async def wait_for_preemption() -> None:
    """Return when the cluster has given notice that it ends this process: its machine leaves, or others get it."""
    job = current_job()
    while not job.preempted:  # noqa: ASYNC110 - the notice may come in any thread, and sets a flag
        await trio.sleep(NOTICE_CHECK_S)
