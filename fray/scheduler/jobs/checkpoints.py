"""Saved states of actors: the latest of each, for as long as its job lives.

Only the living incarnation may save one: a state from a dead incarnation comes too late, whatever it holds.
"""

from __future__ import annotations

from fray.errors import ActorDied, FrayError, InvalidRequest
from fray.model.ids import AttemptId, SessionId
from fray.model.messages.client import Done
from fray.model.specs import EntryKind
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import CheckpointTaken
from fray.scheduler.state.rows import AttemptRow, StoredCheckpoint
from fray.scheduler.state.state import State


def on_checkpoint_taken(state: State, event: CheckpointTaken, out: EffectBuffer) -> None:
    """Store the state in place of the one before."""
    try:
        attempt = calling_attempt(state, event.session)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
    else:
        _store(state, out, attempt, event)
        out.reply(event.session, event.ref, Done())
    out.delete_if_unused(event.blob)


def _store(state: State, out: EffectBuffer, attempt: AttemptRow, event: CheckpointTaken) -> None:
    job = state.jobs[attempt.job_id]
    old = job.checkpoint
    # Only within one incarnation: a new one counts from the beginning, and what it saves is newer by definition.
    outdated = old is not None and old.attempt_id == attempt.attempt_id and old.number >= event.number
    if outdated or job.stop_cause is not None:
        return
    job.checkpoint = StoredCheckpoint(
        attempt_id=attempt.attempt_id,
        number=event.number,
        blob=event.blob,
        location=event.location,
        saved_at=state.now,
    )
    state.blob_refs.add(event.blob)
    if old is not None:
        out.release_blob(old.blob)
    state.touch("job", job.job_id)


def calling_attempt(state: State, session: SessionId) -> AttemptRow:
    """Return the attempt that the session belongs to.

    Raises:
        InvalidRequest: the session is not that of an actor's process.
        ActorDied: the attempt has ended for this cluster.
    """
    session_row = state.sessions.get(session)
    if session_row is None:  # sessions of attempts are forgotten when they end
        raise ActorDied(f"the checkpoint was not saved: session {session} has ended for this cluster")
    if session_row.is_ending:
        raise ActorDied(f"the checkpoint was not saved: {session_row.attempt_id} has ended for this cluster")
    return actor_attempt(state, session_row.attempt_id)


def actor_attempt(state: State, attempt_id: AttemptId | None) -> AttemptRow:
    """Return a living attempt of an actor.

    Raises:
        InvalidRequest: it is not that of an actor.
        ActorDied: it has ended for this cluster.
    """
    attempt = state.attempts.get(attempt_id or "")
    if attempt is None or state.jobs[attempt.job_id].spec.entry is not EntryKind.ACTOR:
        raise InvalidRequest("only actors with a process of their own can save checkpoints")
    if not state.is_attempt_living(attempt.attempt_id):
        raise ActorDied(f"the checkpoint was not saved: {attempt.attempt_id} has ended for this cluster")
    return attempt
