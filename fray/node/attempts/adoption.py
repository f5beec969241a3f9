"""One running attempt as it is passed on to the next program in this process, and as that takes it over."""

from __future__ import annotations

from pathlib import Path

from fray.node.attempts.runner import RunningAttempt
from fray.node.handover.state import AttemptHandover
from fray.node.prepare import PreparedEnvironment
from fray.node.resources.allocator import ResourceAllocator


def pass_on(attempt: RunningAttempt, allocator: ResourceAllocator) -> AttemptHandover | None:
    """Return what is passed on of an attempt that has a shim; None if that is not possible now."""
    control = attempt.control.hand_over() if attempt.control is not None else None
    zygote = attempt.zygotes.pid if attempt.zygotes is not None else None
    if control is None or zygote is None or attempt.shim is None or attempt.prepared is None:
        return None
    allocation, holders_before = allocator.allocated(attempt.attempt_id)
    return AttemptHandover(
        attempt_spec=attempt.attempt_spec,
        directory=str(attempt.directory),
        phase=attempt.phase,
        pid=attempt.pid,
        shim=attempt.shim,
        shim_pidfd=attempt.shim_pidfd,
        control=control[0],
        unread=control[1],
        pipes=attempt.pipes,
        zygote=zygote,
        allocation=allocation,
        holders_before=holders_before,
        image=attempt.prepared.image,
        engine=attempt.prepared.engine,
        log=attempt.log.place if attempt.log is not None else None,
        stop_requested=attempt.stop_requested,
        kill_requested=attempt.kill_requested,
        overdue_at=attempt.overdue_at,
    )


def take_over(one: AttemptHandover) -> RunningAttempt:
    """Return the state of an attempt that was passed on, without its log."""
    return RunningAttempt(
        attempt_spec=one.attempt_spec,
        directory=Path(one.directory),
        phase=one.phase,
        pid=one.pid,
        shim=one.shim,
        shim_pidfd=one.shim_pidfd,
        pipes=dict(one.pipes),
        prepared=PreparedEnvironment(image=one.image, engine=one.engine),
        stop_requested=one.stop_requested,
        kill_requested=one.kill_requested,
        overdue_at=one.overdue_at,
    )
