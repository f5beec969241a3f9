"""Errors for drivers whose sessions have ended: when, why, which jobs still run, what to do. Pure."""

from __future__ import annotations

import time

from fray.errors import InternalError, SessionEnded
from fray.model.ids import JobId, SessionId
from fray.model.messages.client import Role
from fray.model.text import duration_text, list_text
from fray.scheduler.state.rows import Session
from fray.scheduler.state.state import State

SURVIVORS_NAMED = 5


def session_ended(state: State, session: Session, now: float) -> SessionEnded:
    """Return the error for a client whose session has ended."""
    # What was detached is not found by its session any more, so the error names it.
    survivors = detached_jobs(state, session.session)
    ago = f"{duration_text(now - session.ended_at)} ago, at {utc_text(session.ended_at)}"
    text = f"session {session.session} ended {ago}: {session.reason}; what it owned has ended with it"
    if survivors:
        text += f". Detached jobs still run: {list_text(survivors, SURVIVORS_NAMED)}"
    # Only where a longer grace would have helped.
    if session.role is Role.DRIVER and "was gone for" in session.reason:
        text += ". Open the cluster again; open_cluster(grace_s=...) allows a driver to stay away for longer"
    else:
        text += ". Open the cluster again"
    return SessionEnded(
        text,
        session=session.session,
        reason=session.reason,
        ended_at=session.ended_at,
        survivors=survivors,
    )


def session_unknown(session: SessionId) -> SessionEnded:
    """Return the error for a session that has launched something, but has no record here.

    Another session is not opened under its name: the driver would believe that its jobs are alive.
    """
    reason = "the controller has no record of it"
    text = (
        f"session {session} has ended: {reason}. It ended long ago, or this controller was started on another store. "
        "Open the cluster again"
    )
    return SessionEnded(text, session=session, reason=reason, ended_at=None, survivors=[])


def detached_jobs(state: State, session: SessionId) -> list[JobId]:
    """Return the living detached jobs that it has launched, oldest first."""
    return [job.job_id for job in state.jobs.values() if job.launched_by == session and not job.owner and not job.ended]


def utc_text(seconds: float) -> str:
    """Format a time of the controller's clock."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def internal_error(what: str, error: Exception) -> InternalError:
    """Return the error that a peer is sent for a defect of the controller."""
    return InternalError(f"{what}: {error!r}. This is a defect of Fray: the controller's log has the traceback")
