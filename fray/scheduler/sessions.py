"""Sessions of drivers, jobs' processes and tools, and the end of everything they own.

A driver's jobs are owned by its session. Jobs launched by a job's process are owned by its attempt, or by its job as a
whole (``spec.owned_by_job``), whatever happens to the connection. A tool owns nothing.
"""

from __future__ import annotations

from fray.model.messages.client import Done, Role
from fray.model.specs import EndReason
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import SessionClosed, SessionLost, SessionOpened
from fray.scheduler.jobs.registry import drop_session_names
from fray.scheduler.jobs.transitions import stop_job
from fray.scheduler.lifecycle import SessionPhase
from fray.scheduler.reservations.reservations import close_owned_reservations
from fray.scheduler.state.rows import Session
from fray.scheduler.state.state import State


def on_session_opened(state: State, event: SessionOpened, out: EffectBuffer) -> None:
    """Open or resume a session; a session that has ended stays ended."""
    session = state.sessions.get(event.session)
    if session is None:
        session = _new_session(state, event)
    elif session.phase is SessionPhase.LOST:
        session.phase = SessionPhase.OPEN
    elif session.phase is SessionPhase.ENDED:
        out.close_session(session.session, session.reason)
        return
    state.put_session(session)
    # The attempt ended between the greeting and this step.
    if session.attempt_id is not None and not state.is_attempt_living(session.attempt_id):
        _end_session(state, out, session, f"attempt {session.attempt_id} has ended")


def _new_session(state: State, event: SessionOpened) -> Session:
    return Session(
        session=event.session,
        role=event.role,
        namespace=event.namespace,
        grace_s=event.grace_s,
        attempt_id=event.attempt_id,
        user=event.user,
        process=event.process,
    )


def on_session_lost(state: State, event: SessionLost, out: EffectBuffer) -> None:
    """Start a driver's grace period, or drop a tool; for a job its attempt decides."""
    session = state.sessions.get(event.session)
    if session is not None and session.phase is SessionPhase.OPEN:
        _mark_lost(state, session)
        if session.role is Role.DRIVER:
            out.log_event("", "driver silent", f"{session.session} has {session.grace_s:g} s to come back")


def _mark_lost(state: State, session: Session) -> None:
    # A tool owns nothing, so there is nothing to end with it, or to remember.
    if session.role is Role.TOOL:
        state.drop_session(session)
        return
    session.phase, session.lost_at = SessionPhase.LOST, state.now
    state.session_changed(session)


def on_session_closed(state: State, event: SessionClosed, out: EffectBuffer) -> None:
    """End everything the session owns, on goodbye or proof of death. A repeated request waits for the same end."""
    session = state.sessions.get(event.session)
    if session is None or session.phase is SessionPhase.ENDED:
        if event.ref is not None:
            out.reply(event.session, event.ref, Done(), late=True)
        return
    if event.ref is not None:
        # Answered when everything it owned has ended, so that a driver that leaves in order knows that nothing runs any
        # more.
        session.refs = (*session.refs, event.ref)
    close_session(state, out, session, event.reason)


def close_session(state: State, out: EffectBuffer, session: Session, reason: str) -> None:
    """End everything the session owns; `end_finished_sessions` ends the session once nothing of that lives."""
    if session.phase is not SessionPhase.CLOSING:
        session.phase, session.reason, session.ended_at = SessionPhase.CLOSING, reason, state.now
        # Names first: no new caller finds an actor of a driver that is gone.
        drop_session_names(state, out, session, reason)
        _stop_everything_owned(state, out, session, f"its owner {session.session} ended: {reason}")
    state.session_changed(session)


def _stop_everything_owned(state: State, out: EffectBuffer, session: Session, reason: str) -> None:
    close_owned_reservations(state, out, session.owner, reason, None if session.attempt_id is None else session.session)
    for job_id in list(state.children.get(session.owner, ())):
        job = state.jobs[job_id]
        # An attempt may have several processes with sessions; only what this one launched ends with it. And a client
        # chooses the id of its session: what belongs to a job or attempt of the same id is not the driver's.
        is_own = job.root == session.session if session.attempt_id is None else job.launched_by == session.session
        if is_own:
            stop_job(state, out, job, EndReason.OWNER_ENDED, reason)


def on_tick(state: State, out: EffectBuffer) -> None:
    """Close the sessions of drivers whose grace period has expired.

    A driver that reconnects now gets `SessionEnded`, and not the ends of its jobs.
    """
    for name in list(state.lost_drivers):
        session = state.sessions[name]
        # Its conversation ends in this step, although its jobs take longer to end.
        if session.lost_at + session.grace_s <= state.now:
            reason = f"the driver was gone for {session.grace_s:g} s"
            close_session(state, out, session, reason)
            if _owns_anything(state, session):
                out.close_session(name, reason)  # else `end_finished_sessions` does


def on_controller_start(state: State) -> None:
    """Count grace periods from now: every connection was lost with the old controller."""
    for session in list(state.sessions.values()):
        if session.refs:
            session.refs = ()  # of the old controller; a client that still waits repeats its request
            state.session_changed(session)
        # In full and not what was left: how long the controller was away says nothing about drivers.
        if session.phase in (SessionPhase.OPEN, SessionPhase.LOST):
            _mark_lost(state, session)


def end_finished_sessions(state: State, out: EffectBuffer) -> None:
    """End, after every step, the sessions of ended attempts and those that own nothing any more."""
    for attempt_id in out.ended_attempts:
        for name in list(state.sessions_of.get(attempt_id, ())):
            session = state.sessions[name]
            if session.phase is not SessionPhase.ENDED:
                _end_session(state, out, session, f"attempt {attempt_id} has ended")
            state.drop_session(session)  # the end of its attempt is all that needs to be remembered
    for name in list(state.closing_sessions):
        session = state.sessions[name]
        if not _owns_anything(state, session):
            _end_session(state, out, session, session.reason)
    _forget_oldest(state)


def _owns_anything(state: State, session: Session) -> bool:
    if session.attempt_id is None:
        # By the root: jobs of its jobs are its own too, and end before it does.
        return session.session in state.jobs_by_root or session.session in state.reservations_by_owner
    mine = state.reservations_by_owner.get(session.attempt_id, ())
    if any(state.reservations[one].created_by == session.session for one in mine):
        return True
    below = state.jobs_below(session.attempt_id)
    return any(state.jobs[job_id].launched_by == session.session for job_id in below)


def _end_session(state: State, out: EffectBuffer, session: Session, reason: str) -> None:
    for ref in session.refs:
        out.reply(session.session, ref, Done(), late=True)
    out.close_session(session.session, reason)
    if session.phase is not SessionPhase.CLOSING:
        session.ended_at = state.now
    session.phase, session.reason, session.refs = SessionPhase.ENDED, reason, ()
    state.session_changed(session)


def _forget_oldest(state: State) -> None:
    while len(state.ended_sessions) > state.config.finished_limit:
        state.drop_session(state.sessions[next(iter(state.ended_sessions))])
