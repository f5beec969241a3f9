"""Names of living actors, each bound to one incarnation of one process.

A name may be shared (any number of actors) or exclusive. A binding goes with its incarnation, or when its process
takes it back; nothing that is not living can make, change or remove one.
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
from fray.scheduler.state.names import name_key
from fray.scheduler.state.rows import ActorRegistration, ActorTombstone, Session
from fray.scheduler.state.state import State


def on_name_registered(state: State, event: NameRegistered, out: EffectBuffer) -> None:
    """Bind, or (same actor, same incarnation) replace."""
    try:
        session = _speaker(state, event)
        endpoint = _own(state, session, event.register.endpoint)
        _check_id(state, endpoint)
        _check_name(state, endpoint, event.register.exclusive)
    except FrayError as error:
        out.refuse(event.session, event.ref, error)
        return
    known = state.registrations.get(endpoint.actor_id)
    if known is not None:
        out.registration_changed(known)
        state.drop_registration(known)
    state.drop_actor_tombstone(endpoint.actor_id)
    binding = ActorRegistration(
        endpoint=endpoint,
        session=event.session,
        exclusive=event.register.exclusive,
        order=known.order if known else state.next_order(),
    )
    state.put_registration(binding)
    _ready(state, endpoint)
    out.registration_changed(binding)
    out.reply(event.session, event.ref, Done())
    if known is None:
        out.log_event(endpoint.job_id, "name registered", f"{endpoint.name} by {endpoint.incarnation}")


def _ready(state: State, endpoint: ActorEndpoint) -> None:
    attempt = state.attempts.get(endpoint.incarnation)
    if attempt is not None and attempt.job_id == endpoint.actor_id and not attempt.ready:
        attempt.ready = True
        state.touch("attempt", attempt.attempt_id)


def _speaker(state: State, event: NameRegistered) -> Session:
    session = state.sessions.get(event.session)
    dead = session is None or session.is_ending
    if session is not None and session.attempt_id is not None:
        dead = dead or not state.is_attempt_living(session.attempt_id)
    if session is None or dead:
        name = event.register.endpoint.name
        raise ActorDied(f"name {name!r} was not registered: the process that asks has ended for this cluster")
    return session


def _own(state: State, session: Session, endpoint: ActorEndpoint) -> ActorEndpoint:
    """Nobody registers for another: incarnation, job and namespace are the speaker's."""
    if endpoint.namespace not in ("", session.namespace):
        raise InvalidRequest(f"actor {endpoint.name!r}: namespace {endpoint.namespace!r} is not {session.namespace!r}")
    attempt = state.attempts[session.attempt_id] if session.attempt_id else None
    return evolve(
        endpoint,
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
        if holder.endpoint.actor_id != endpoint.actor_id and (exclusive or holder.exclusive):
            raise name_in_use(state, holder)
    coming = living_actor(state, endpoint.namespace, endpoint.name) if exclusive else None
    if coming not in (None, endpoint.actor_id):
        raise NameInUse(
            f"actor name {endpoint.name!r} is taken in namespace {endpoint.namespace!r}: actor {coming} has it, and is "
            "on its way; wait for its end or choose another name",
            name=endpoint.name,
            namespace=endpoint.namespace,
            holder=coming,
        )


def registrations_of(state: State, namespace: Namespace, name: str) -> Iterator[ActorRegistration]:
    """All that are bound to a name now, oldest first."""
    return (state.registrations[actor_id] for actor_id in state.registrations_by_key.get(name_key(namespace, name), ()))


def name_in_use(state: State, holder: ActorRegistration) -> NameInUse:
    """The refusal of whoever wants the name that ``holder`` does not share."""
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
    """Only the incarnation that made a binding takes it back; repeating it is harmless."""
    session = state.sessions.get(event.session)
    binding = state.registrations.get(event.actor_id)
    if session is not None and binding is not None and binding.endpoint.incarnation == session.owner:
        drop_registration(state, out, binding, "its process took its name back")
    out.reply(event.session, event.ref, Done(), late=True)


def drop_incarnation(state: State, out: EffectBuffer, incarnation: str, reason: str) -> None:
    """The process is gone, and so are its actors."""
    for actor_id in list(state.registrations_by_incarnation.get(incarnation, ())):
        drop_registration(state, out, state.registrations[actor_id], reason)


def drop_session_names(state: State, out: EffectBuffer, session: Session, reason: str) -> None:
    """The conversation that registered them is over for good."""
    for actor_id in list(state.registrations_by_incarnation.get(session.owner, ())):
        binding = state.registrations[actor_id]
        if binding.session == session.session:
            drop_registration(state, out, binding, reason)


def drop_registration(state: State, out: EffectBuffer, binding: ActorRegistration, reason: str) -> None:
    endpoint = binding.endpoint
    out.registration_changed(binding)
    state.drop_registration(binding)
    out.log_event(endpoint.job_id, "name removed", f"{endpoint.name}: {reason}")
    if endpoint.actor_id not in state.jobs:
        outcome = Outcome(cause=EndReason.FAILURE, message=f"actor {endpoint.name!r} is gone: {reason}")
        grave = ActorTombstone(
            actor_id=endpoint.actor_id,
            outcome=outcome,
            order=state.next_order(),
            name=endpoint.name,
            namespace=endpoint.namespace,
            ended_at=state.now,
        )
        state.put_actor_tombstone(grave)


def refresh_actors_on_node(state: State, out: EffectBuffer, node: str) -> None:
    """The actors of a machine have become hidden or visible."""
    for attempt_id in state.on_node.get(node, ()):
        job = state.jobs[state.attempts[attempt_id].job_id]
        if job.spec.entry is EntryKind.ACTOR and not job.ended:
            out.actor_changed(job.job_id)
        for actor_id in state.registrations_by_incarnation.get(attempt_id, ()):
            out.registration_changed(state.registrations[actor_id])


def forget_tombstones(state: State) -> None:
    while len(state.actor_tombstones) > state.config.finished_limit:
        state.drop_actor_tombstone(next(iter(state.actor_tombstones)))
