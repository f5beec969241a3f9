"""Registry of the names of living actors, each bound to one incarnation of one process.

A name may be shared (any number of actors) or exclusive. A registration ends with its incarnation, or when its process
unregisters it; only a living process can add, change or remove one.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from fray.errors import ActorDied, FrayError, InvalidRequest, NameInUse
from fray.model.ids import Namespace
from fray.model.messages.client import ActorEndpoint, Done
from fray.model.specs import EndReason, EntryKind, Outcome
from fray.scheduler.effect_buffer import EffectBuffer
from fray.scheduler.effects import NameRegistered, NameUnregistered
from fray.scheduler.jobs.queries import living_actor
from fray.scheduler.state.rows import ActorRegistration, ActorTombstone, Session
from fray.scheduler.state.state import State
from fray.scheduler.state.tables import name_key


def on_name_registered(state: State, event: NameRegistered, out: EffectBuffer) -> None:
    """Register a name, or replace the registration of the same actor and incarnation."""
    try:
        session = _calling_session(state, event)
        endpoint = _own_endpoint(state, session, event.register.endpoint)
        _check_id(state, endpoint)
        _check_name(state, endpoint, event.register.exclusive)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    known = state.registrations.get(endpoint.actor_id)
    if known is not None:
        out.registration_changed(known)
        state.drop_registration(known)
    # An actor of this id lives again; its last end is not an answer any more.
    state.drop_actor_tombstone(endpoint.actor_id)
    registration = ActorRegistration(
        endpoint=endpoint,
        session=event.session,
        exclusive=event.register.exclusive,
        # An actor that registers again keeps its place in listings.
        order=known.order if known else state.next_order(),
    )
    state.put_registration(registration)
    _mark_ready(state, endpoint)
    out.registration_changed(registration)
    out.reply(event.session, event.ref, Done())
    if known is None:
        out.log_event(endpoint.job_id, "name registered", f"{endpoint.name} by {endpoint.incarnation}")


def _mark_ready(state: State, endpoint: ActorEndpoint) -> None:
    attempt = state.attempts.get(endpoint.incarnation)
    if attempt is not None and attempt.job_id == endpoint.actor_id and not attempt.ready:
        attempt.ready = True
        state.touch("attempt", attempt.attempt_id)


def _calling_session(state: State, event: NameRegistered) -> Session:
    session = state.sessions.get(event.session)
    dead = session is None or session.is_ending
    if session is not None and session.attempt_id is not None:
        # A process that is cut off may still have an open session: its names would lead to an actor whose successor
        # runs.
        dead = dead or not state.is_attempt_living(session.attempt_id)
    if session is None or dead:
        name = event.register.endpoint.name
        raise ActorDied(f"name {name!r} was not registered: the requesting process has ended for this cluster")
    return session


def _own_endpoint(state: State, session: Session, endpoint: ActorEndpoint) -> ActorEndpoint:
    """Return the endpoint with incarnation, job and namespace of the session: no process can register for another."""
    if endpoint.namespace not in ("", session.namespace):
        raise InvalidRequest(f"actor {endpoint.name!r}: namespace {endpoint.namespace!r} is not {session.namespace!r}")
    attempt = state.attempts[session.attempt_id] if session.attempt_id else None
    return evolve(
        endpoint,
        # Taken from the session and never from the message.
        incarnation=session.owner,
        job_id=attempt.job_id if attempt else endpoint.job_id,
        namespace=session.namespace,
    )


def _check_id(state: State, endpoint: ActorEndpoint) -> None:
    known = state.registrations.get(endpoint.actor_id)
    if known is not None and known.endpoint.incarnation != endpoint.incarnation:
        raise InvalidRequest(f"actor id {endpoint.actor_id!r} belongs to {known.endpoint.incarnation}, which lives")
    job = state.jobs.get(endpoint.actor_id)
    if job is not None and job.job_id != endpoint.job_id:
        raise InvalidRequest(f"actor id {endpoint.actor_id!r} belongs to the job of that id")


def _check_name(state: State, endpoint: ActorEndpoint, exclusive: bool) -> None:
    for holder in registrations_of(state, endpoint.namespace, endpoint.name):
        # Exclusive on either side: an exclusive actor does not join shared ones, nor they it.
        if holder.endpoint.actor_id != endpoint.actor_id and (exclusive or holder.exclusive):
            raise name_in_use(state, holder)
    # A name is taken from the acceptance of an actor's job on, long before its process registers.
    starting = living_actor(state, endpoint.namespace, endpoint.name) if exclusive else None
    if starting not in (None, endpoint.actor_id):
        raise NameInUse(
            f"actor name {endpoint.name!r} is taken in namespace {endpoint.namespace!r}: actor {starting} has it, and "
            "is starting; wait for its end or choose another name",
            name=endpoint.name,
            namespace=endpoint.namespace,
            holder=starting,
        )


def registrations_of(state: State, namespace: Namespace, name: str) -> Iterator[ActorRegistration]:
    """Yield all registrations of a name, oldest first."""
    return (state.registrations[actor_id] for actor_id in state.registrations_by_key.get(name_key(namespace, name), ()))


def name_in_use(state: State, holder: ActorRegistration) -> NameInUse:
    """Return the error for a process that wants the name that ``holder`` does not share."""
    by = holder.endpoint
    silent = " on a machine that is silent now" if state.is_hidden(holder) else ""
    return NameInUse(
        f"actor name {by.name!r} is taken in namespace {by.namespace!r}: "
        f"actor {by.actor_id} of {by.incarnation} has it{silent}; wait for its end or choose another name",
        name=by.name,
        namespace=by.namespace,
        holder=by.actor_id,
        incarnation=by.incarnation,
    )


def on_name_unregistered(state: State, event: NameUnregistered, out: EffectBuffer) -> None:
    """Remove a registration at the request of the incarnation that made it; repeating it is harmless."""
    session = state.sessions.get(event.session)
    registration = state.registrations.get(event.actor_id)
    # Unregistering twice, or after a successor has registered, must not remove the successor's name.
    if session is not None and registration is not None and registration.endpoint.incarnation == session.owner:
        drop_registration(state, out, registration, "its process unregistered it")
    out.reply(event.session, event.ref, Done(), late=True)


def drop_incarnation(state: State, out: EffectBuffer, incarnation: str, reason: str) -> None:
    """Remove the actors of a process that has ended."""
    for actor_id in list(state.registrations_by_incarnation.get(incarnation, ())):
        drop_registration(state, out, state.registrations[actor_id], reason)


def drop_session_names(state: State, out: EffectBuffer, session: Session, reason: str) -> None:
    """Remove the actors that a session registered, when it is closed for good."""
    for actor_id in list(state.registrations_by_incarnation.get(session.owner, ())):
        registration = state.registrations[actor_id]
        if registration.session == session.session:
            drop_registration(state, out, registration, reason)


def drop_registration(state: State, out: EffectBuffer, registration: ActorRegistration, reason: str) -> None:
    endpoint = registration.endpoint
    out.registration_changed(registration)
    state.drop_registration(registration)
    out.log_event(endpoint.job_id, "name removed", f"{endpoint.name}: {reason}")
    # The end of an actor with a job of its own is in the job's row.
    if endpoint.actor_id not in state.jobs:
        outcome = Outcome(cause=EndReason.FAILURE, message=f"actor {endpoint.name!r} is gone: {reason}")
        tombstone = ActorTombstone(
            actor_id=endpoint.actor_id,
            outcome=outcome,
            order=state.next_order(),
            name=endpoint.name,
            namespace=endpoint.namespace,
            ended_at=state.now,
        )
        state.put_actor_tombstone(tombstone)


def refresh_actors_on_node(state: State, out: EffectBuffer, node: str) -> None:
    """Notify watchers of the actors of a machine, which have become hidden or visible."""
    for attempt_id in state.on_node.get(node, ()):
        job = state.jobs[state.attempts[attempt_id].job_id]
        if job.spec.entry is EntryKind.ACTOR and not job.ended:
            out.actor_changed(job.job_id)
        for actor_id in state.registrations_by_incarnation.get(attempt_id, ()):
            out.registration_changed(state.registrations[actor_id])


def forget_tombstones(state: State) -> None:
    while len(state.actor_tombstones) > state.config.finished_limit:
        state.drop_actor_tombstone(next(iter(state.actor_tombstones)))
