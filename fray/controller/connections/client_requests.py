"""Requests of clients: one function for each kind.

Invariants: a request that changes the cluster goes into the inbox and is answered when the change is saved; a request
that only reads is answered at once from the state, which is always the saved one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import trio
from attrs import evolve

from fray.controller.connections import history_requests, people_requests
from fray.controller.connections.access import AccessScope, job_of, scope_for
from fray.controller.connections.client import Answer, ClientConnection
from fray.controller.connections.validation import (
    check_bundles,
    check_checkpoint,
    check_id,
    check_launch,
    check_node_selection,
    check_requeue,
    check_reservation_request,
)
from fray.controller.secret_store import check_limits, check_secrets
from fray.errors import FrayError, InvalidRequest, ProtocolMismatch, StoreError
from fray.model.actors import ActorInfo
from fray.model.ids import BlobId, Namespace, check_name
from fray.model.job_groups import JobGroupInfo
from fray.model.messages import client as messages
from fray.model.messages import history, machine_groups, maintenance, people, usage
from fray.model.messages.bundles import FetchChunk, FetchValue, OfferBundle, OfferValue, PutChunk
from fray.model.messages.node import ReadLog
from fray.model.specs import JobInfo
from fray.model.text import byte_size_text
from fray.net.channel.public import MESSAGE_LIMIT_BYTES
from fray.net.transport import Bytes
from fray.scheduler import views
from fray.scheduler.autoscaler import view as autoscaler_view
from fray.scheduler.effects import (
    CheckpointTaken,
    CordonRequested,
    GroupScaled,
    LaunchRequested,
    NameRegistered,
    NameUnregistered,
    RequeueRequested,
    ReservationReleased,
    ReservationRenewed,
    ReservationRequested,
    SessionClosed,
    TerminateRequested,
    UncordonRequested,
    WaitReported,
)
from fray.scheduler.explain.explain import explain
from fray.scheduler.explain.forecast import what_if as make_forecast
from fray.scheduler.explain.queue_view import queue_info, usage_info
from fray.scheduler.jobs import checkpoints, queries
from fray.scheduler.nodes.view import node_info, node_marks, nodes_info
from fray.scheduler.queue.applicant import Applicant
from fray.scheduler.reservations import view as reservation_view
from fray.scheduler.reservations.view import reservation_info
from fray.scheduler.state.rows import JobRow

LIST_LIMIT_BYTES = MESSAGE_LIMIT_BYTES * 3 // 4
"""Approximate limit of the records in a list of jobs."""
RECORD_BYTES = 500
"""Approximate size of an attempt in it, without its message."""
HELD_BACK_LIMIT = 16
"""Requests of one client that wait for a change; further ones are answered at once."""
HELD_BACK_S = 10.0
"""Longest such wait, in seconds."""
LOOK_EVERY_S = 0.05
"""Least pause between two looks for a change, in seconds."""


# Jobs


def launch(client: ClientConnection, ref: int, message: messages.Launch, blobs: Sequence[Bytes]) -> Answer:
    context, scope = client.context, scope_for(client, messages.Launch)

    # To know the hash of content of others opens nothing: it is not there for who has neither sent it nor a job with
    # it. Both errors are those for missing content, so that they do not say whether it is stored.
    def has_blob(blob: BlobId) -> bool:
        return context.has_blob(blob) and (scope is None or _has_sent(client, scope, blob) or scope.has_value(blob))

    def has_bundle(bundle: BlobId) -> bool:
        is_there = context.bundles.has(bundle)
        return is_there and (scope is None or _has_sent(client, scope, bundle) or scope.has_bundle(bundle))

    with client.context.hold_blobs(blobs) as attached:
        # All checks that need no scheduler come before the event: an invalid launch never enters the inbox.
        needed = check_launch(message, attached, has_blob)
        # A missing workspace is refused here; on a node it would be an attempt that fails after it was placed.
        check_bundles(message, client.context.state.jobs, has_bundle)
        if message.secrets or any(spec.secrets for spec in message.jobs):
            check_limits(message.secrets)
            declared = client.hub.declared_secrets()
            # With no node connected, what nodes declare is unknown: the job waits for one anyway, and is judged then.
            if declared is not None:
                check_secrets(message.jobs, message.secrets, declared)
        # Without the values: what an event contains may reach rows and log lines.
        event = LaunchRequested(session=client.session, ref=ref, launch=evolve(message, secrets={}))
        # Answered by the scheduler after the save; None means that here.
        client.context.submit_with_blobs(event, needed)
        # Before the loop steps the event: the node is sent them with the desired attempt. Not before the submit: those
        # of a launch that a full inbox refuses would never be removed.
        if message.secrets:
            client.context.secrets.add([spec.job_id for spec in message.jobs if spec.secrets], message.secrets)
    return None


def _has_sent(client: ClientConnection, scope: AccessScope, content: BlobId) -> bool:
    return client.context.bundles.possession.has(scope.owner, content)


def provide_secrets(
    client: ClientConnection, ref: int, message: messages.ProvideSecrets, blobs: Sequence[Bytes]
) -> Answer:
    jobs = client.context.state.jobs
    for job_id, values in message.secrets.items():
        if job_id in jobs and not jobs[job_id].ended and _may_replace_secrets(client, jobs[job_id]):
            client.context.secrets.add([job_id], values)
    # Attempts of the previous controller's jobs may have waited for just these.
    client.hub.secrets_changed()
    return messages.Done(), ()


def _may_replace_secrets(client: ClientConnection, job: JobRow) -> bool:
    """Return whether the client has launched the job, or is an attempt of the job that owns it as a whole."""
    # The attempt that launched such an actor may have ended; the next one has adopted it.
    is_owner = job.spec.owned_by_job and job_of(client.hello.attempt_id) == job.owner
    return is_owner or job.launched_by == client.session


def terminate(client: ClientConnection, ref: int, message: messages.Terminate, blobs: Sequence[Bytes]) -> Answer:
    what = {field: getattr(message, field) for field in ("jobs", "reason", "name", "prefix", "tree", "own", "group")}
    client.context.inbox.submit(
        TerminateRequested(session=client.session, ref=ref, namespace=message.namespace, **what)
    )
    return None


def requeue(client: ClientConnection, ref: int, message: messages.Requeue, blobs: Sequence[Bytes]) -> Answer:
    check_requeue(message)
    generations, reason = dict(message.generations), message.reason
    client.context.inbox.submit(
        RequeueRequested(session=client.session, ref=ref, generations=generations, reason=reason)
    )
    return None


def find_job(client: ClientConnection, ref: int, message: messages.FindJob, blobs: Sequence[Bytes]) -> Answer:
    state = client.context.state
    found = queries.find_job(state, client.namespace, message.name, message.namespace, _visible(client, message))
    return client.follow_jobs([views.job_info(state, found)] if found is not None else [])


def watch_jobs(client: ClientConnection, ref: int, message: messages.WatchJobs, blobs: Sequence[Bytes]) -> Answer:
    return client.follow_jobs([views.job_info(client.context.state, job) for job in message.jobs])


def list_jobs(client: ClientConnection, ref: int, message: messages.ListJobs, blobs: Sequence[Bytes]) -> Answer:
    if message.changed_since is not None:
        since, state, changes = message.changed_since, client.context.state, client.subscriptions.changes
        return _once_changed(
            *(client, ref, message.wait_s),
            lambda: changes.has_since(since, state.jobs.keys()),
            lambda: _changed_jobs(client, message, since),
        )
    found = views.list_jobs(
        client.context.state,
        _namespace(client, message.namespace),
        only=message.jobs,
        name=message.name,
        prefix=message.prefix,
        states=message.states,
        # 0 means all of them; a negative number would give another part of the list.
        limit=max(0, message.limit),
        is_visible=_visible(client, message),
    )
    return messages.Jobs(jobs=bounded_list(tuple(map(client.context.attempt_metrics.listed, found)))), ()


def _once_changed(
    client: ClientConnection, ref: int, wait_s: float, has_changed: Callable[[], bool], make: Callable[[], object]
) -> Answer:
    """Answer with what ``make`` returns, once something has changed, or after ``wait_s`` seconds."""
    # So NaN counts as 0, too.
    if not wait_s > 0 or has_changed() or client.held_back >= HELD_BACK_LIMIT:
        return make(), ()
    client.held_back += 1
    client.hub.start_soon(_answer_once_changed, client, ref, wait_s, has_changed, make)
    return None


async def _answer_once_changed(
    client: ClientConnection, ref: int, wait_s: float, has_changed: Callable[[], bool], make: Callable[[], object]
) -> None:
    try:
        with trio.move_on_after(min(wait_s, HELD_BACK_S)):
            while client.channel.error is None and not has_changed():
                count = client.subscriptions.saved.count
                # After looking, so that the first change is seen at once, and those of a busy cluster together.
                await trio.sleep(LOOK_EVERY_S)
                await client.subscriptions.saved.wait_beyond(count)
        client.reply(ref, make())
    finally:
        client.held_back -= 1


def _changed_jobs(client: ClientConnection, message: messages.ListJobs, since: int) -> messages.Jobs:
    """Return the jobs that have changed since then; of the conditions of a list only the namespace and the limit
    count."""
    state, changes = client.context.state, client.subscriptions.changes
    is_visible, namespace = _visible(client, message), _namespace(client, message.namespace)
    is_reset, changed, forgotten = changes.since(since, state.jobs.keys())
    limit = message.limit if message.limit > 0 else len(changed)
    visible = (
        (job_id, number)
        for job_id, number in changed
        if namespace in (None, state.jobs[job_id].spec.namespace) and is_visible(state.jobs[job_id])
    )
    page = list(islice(visible, limit + 1))
    has_more = len(page) > limit
    found = [views.job_info(state, job_id) for job_id, _ in page[:limit]]
    return messages.Jobs(
        jobs=bounded_list(tuple(map(client.context.attempt_metrics.listed, found))),
        change=page[limit - 1][1] if has_more else changes.last,
        has_more=has_more,
        is_reset=is_reset,
        forgotten=tuple(forgotten),
    )


def _visible(client: ClientConnection, message: object) -> Callable[[JobRow], bool]:
    """Return the test of the jobs that the answer to a client's request may contain."""
    scope = scope_for(client, type(message))
    return scope.has_job if scope is not None else lambda job: True


def list_groups(client: ClientConnection, ref: int, message: messages.ListGroups, blobs: Sequence[Bytes]) -> Answer:
    found = views.list_groups(client.context.state, client.namespace, message.namespace, message.name)
    scope = scope_for(client, messages.ListGroups)
    own = found if scope is None else tuple(filter(scope.has_group, found))
    return messages.JobGroups(groups=bounded_groups(own)), ()


def bounded_groups(infos: tuple[JobGroupInfo, ...]) -> tuple[JobGroupInfo, ...]:
    """Return the newest groups that fit into one reply."""
    room = LIST_LIMIT_BYTES // RECORD_BYTES
    # The list is in order of acceptance, so the newest are its end.
    for index in range(len(infos) - 1, -1, -1):
        room -= 1 + len(infos[index].members)
        if room < 0:
            return infos[index + 1 :]
    return infos


def bounded_list(infos: tuple[JobInfo, ...]) -> tuple[JobInfo, ...]:
    """Return the list unchanged if it fits into one reply; to find out by encoding it would block the loop.

    Raises:
        InvalidRequest: it is too long.
    """
    size_bytes = sum(len(each.message) + RECORD_BYTES for info in infos for each in info.attempts)
    if size_bytes > LIST_LIMIT_BYTES:
        raise InvalidRequest(
            f"the records of these {len(infos):,} jobs have about {byte_size_text(size_bytes)}, more than one reply "
            f"carries ({byte_size_text(LIST_LIMIT_BYTES)}): ask for fewer, with limit=, prefix= or states="
        )
    return infos


def get_stacks(client: ClientConnection, ref: int, message: messages.GetStacks, blobs: Sequence[Bytes]) -> Answer:
    client.hub.request_stacks(client, ref, message.job)
    return None


def _namespace(client: ClientConnection, requested: Namespace | None) -> Namespace | None:
    """Return the namespace to search; None for all of them."""
    return client.namespace if requested is None else None if requested == "*" else requested


def fetch_blob(client: ClientConnection, ref: int, message: messages.FetchBlob, blobs: Sequence[Bytes]) -> Answer:
    data = client.context.store.blob(message.blob)
    if data is None:
        raise InvalidRequest(f"no such blob: {message.blob!r} (or no longer stored)")
    return messages.Done(), [data]


def explain_job(client: ClientConnection, ref: int, message: messages.Explain, blobs: Sequence[Bytes]) -> Answer:
    state = client.context.state
    if message.job in state.reservations:
        return messages.Text(text=reservation_view.explain_reservation(state, message.job)), ()
    # For its error: NoSuchJob, if there is none of this id.
    views.job_info(state, message.job)
    return messages.Text(text=explain(state, message.job, client.context.inbox.current_time())), ()


def get_events(client: ClientConnection, ref: int, message: messages.GetEvents, blobs: Sequence[Bytes]) -> Answer:
    events = client.context.store.events(message.job)
    # The events of a job may have been trimmed, but of an unknown id there never were any.
    state, past = client.context.state, client.context.store.history.reservation
    if not events and message.job not in state.reservations and past(message.job) is None:
        views.job_info(state, message.job)
    return messages.Events(events=events), ()


def get_job_spec(client: ClientConnection, ref: int, message: messages.GetJobSpec, blobs: Sequence[Bytes]) -> Answer:
    return messages.RequestedJob(spec=views.requested_spec(client.context.state, message.job)), ()


# Reservations


def create_reservation(
    client: ClientConnection, ref: int, message: messages.CreateReservation, blobs: Sequence[Bytes]
) -> Answer:
    check_reservation_request(message.spec)
    # The subscription follows at once: the first change cannot come before the loop's next turn.
    client.context.inbox.submit(ReservationRequested(session=client.session, ref=ref, spec=message.spec))
    client.subscriptions.reservations.add(message.spec.reservation_id, client)
    return None


def renew_reservation(
    client: ClientConnection, ref: int, message: messages.RenewReservation, blobs: Sequence[Bytes]
) -> Answer:
    name, ttl_s = message.reservation_id, message.ttl_s
    client.context.inbox.submit(ReservationRenewed(session=client.session, ref=ref, reservation_id=name, ttl_s=ttl_s))
    return None


def release_reservation(
    client: ClientConnection, ref: int, message: messages.ReleaseReservation, blobs: Sequence[Bytes]
) -> Answer:
    name, reason = message.reservation_id, message.reason
    client.context.inbox.submit(
        ReservationReleased(session=client.session, ref=ref, reservation_id=name, reason=reason)
    )
    return None


def watch_reservation(
    client: ClientConnection, ref: int, message: messages.WatchReservation, blobs: Sequence[Bytes]
) -> Answer:
    info = reservation_info(client.context.state, message.reservation_id)
    if message.follow:
        client.subscriptions.reservations.add(message.reservation_id, client)
    return messages.Reservations(reservations=(info,)), ()


def list_reservations(
    client: ClientConnection, ref: int, message: messages.ListReservations, blobs: Sequence[Bytes]
) -> Answer:
    found = reservation_view.list_reservations(
        client.context.state, _namespace(client, message.namespace), message.ended
    )
    scope = scope_for(client, messages.ListReservations)
    own = found if scope is None else tuple(one for one in found if scope.has_reservation(one.reservation_id))
    return messages.Reservations(reservations=own), ()


# Names


def register(client: ClientConnection, ref: int, message: messages.Register, blobs: Sequence[Bytes]) -> Answer:
    check_name(message.endpoint.name, "an actor")
    check_id(message.endpoint.actor_id, "an actor")
    client.context.inbox.submit(NameRegistered(session=client.session, ref=ref, register=message))
    return None


def unregister(client: ClientConnection, ref: int, message: messages.Unregister, blobs: Sequence[Bytes]) -> Answer:
    client.context.inbox.submit(NameUnregistered(session=client.session, ref=ref, actor_id=message.actor_id))
    return None


def watch(client: ClientConnection, ref: int, message: messages.Watch, blobs: Sequence[Bytes]) -> Answer:
    if message.key.partition(":")[0] not in ("name", "actor"):
        raise InvalidRequest(f"invalid key {message.key!r}; expected name:NAMESPACE/NAME or actor:ID")
    client.subscriptions.names.add(message.key, client)
    # This reply is newer than any update that still waits for the channel.
    client.updates.names_sent(message.key)
    return client.context.current_names(message.key, scope_for(client, messages.Watch))


def unwatch(client: ClientConnection, ref: int, message: messages.Unwatch, blobs: Sequence[Bytes]) -> Answer:
    client.subscriptions.names.drop(message.key, client)
    return messages.Done(), ()


def list_actors(client: ClientConnection, ref: int, message: messages.ListActors, blobs: Sequence[Bytes]) -> Answer:
    namespace = _namespace(client, message.namespace)
    found = views.list_actors(client.context.state, namespace, message.prefix, ended=message.ended)
    return messages.Actors(actors=_own_actors(client, messages.ListActors, found)), ()


def _own_actors(client: ClientConnection, request: type, found: tuple[ActorInfo, ...]) -> tuple[ActorInfo, ...]:
    scope = scope_for(client, request)
    own = found if scope is None else tuple(one for one in found if scope.has_actor(one.actor_id, one.namespace))
    return client.context.attempt_metrics.with_calls(own)


def find_actor(client: ClientConnection, ref: int, message: messages.FindActor, blobs: Sequence[Bytes]) -> Answer:
    state = client.context.state
    if message.actor_id:
        found = views.find_by_id(state, message.actor_id)
    else:
        namespace = client.namespace if message.namespace is None else message.namespace
        found = views.find_by_name(state, namespace, message.name)
    return messages.Actors(actors=_own_actors(client, messages.FindActor, found)), ()


# Checkpoints


def save_checkpoint(
    client: ClientConnection, ref: int, message: messages.SaveCheckpoint, blobs: Sequence[Bytes]
) -> Answer:
    # As for a launch: a refused checkpoint leaves no blob.
    context, scope = client.context, scope_for(client, messages.SaveCheckpoint)

    def has_blob(blob: BlobId) -> bool:
        # As in `launch`: otherwise a job would read any content of which it knows the hash, as its own checkpoint.
        return context.store.has_blob(blob) and (scope is None or _is_checkpoint(client, blob) or scope.has_value(blob))

    with client.context.hold_blobs(blobs) as attached:
        check_checkpoint(message, attached, has_blob)
        event = CheckpointTaken(
            session=client.session, ref=ref, number=message.number, blob=message.blob, location=message.location
        )
        client.context.submit_with_blobs(event, [message.blob] if message.blob is not None else [])
    return None


def _is_checkpoint(client: ClientConnection, blob: BlobId) -> bool:
    """Return whether this is the content of the checkpoint that the client's job has."""
    job = client.context.state.jobs.get(job_of(client.hello.attempt_id) or "")
    return job is not None and job.checkpoint is not None and job.checkpoint.blob == blob


def fetch_checkpoint(
    client: ClientConnection, ref: int, message: messages.FetchCheckpoint, blobs: Sequence[Bytes]
) -> Answer:
    state = client.context.state
    # By the attempt that this connection has proven to be, not by its session: this may be the first request of a new
    # connection, which the scheduler does not know before its next step.
    checkpoint = state.jobs[checkpoints.actor_attempt(state, client.hello.attempt_id).job_id].checkpoint
    if checkpoint is None:
        return messages.Checkpoint(), ()
    data = client.context.store.blob(checkpoint.blob) if checkpoint.blob is not None else None
    # An error and not "no checkpoint": the actor would start from nothing and save that over its state.
    if checkpoint.blob is not None and data is None:
        raise StoreError(f"the checkpoint of {checkpoint.attempt_id} is damaged in the controller's store")
    return messages.Checkpoint(blob=checkpoint.blob, location=checkpoint.location), [data] if data is not None else ()


# Workspaces


def handle_bundle(client: ClientConnection, ref: int, message: object, blobs: Sequence[Bytes]) -> Answer:
    # Counted here and served in a task: reading and hashing chunks must not hold up the loop.
    client.context.bundles.admit(message, blobs)
    scope = scope_for(client, messages.Launch)
    is_own = isinstance(message, OfferBundle) and scope is not None and scope.has_bundle(message.bundle)
    owner = None if scope is None or is_own else scope.owner
    client.hub.start_soon(client.context.bundles.serve, client, ref, message, blobs, owner)
    return None


# Logs


def follow_logs(client: ClientConnection, ref: int, message: messages.FollowLogs, blobs: Sequence[Bytes]) -> Answer:
    if message.job is not None:
        views.job_info(client.context.state, message.job)
    client.logs.follow(message)
    return messages.Done(), ()


def watch_logs(client: ClientConnection, ref: int, message: messages.WatchLogs, blobs: Sequence[Bytes]) -> Answer:
    return client.logs.watch(message), ()


def read_log(client: ClientConnection, ref: int, message: ReadLog, blobs: Sequence[Bytes]) -> Answer:
    found = client.logs.read_cached(message)
    if found is not None:
        return found[0], [found[1]]
    # Counted before the task starts: a burst of requests is decoded before any of their tasks runs.
    client.logs.reads_in_progress += 1
    client.hub.start_soon(_read_from_node, client, ref, message)
    return None


async def _read_from_node(client: ClientConnection, ref: int, message: ReadLog) -> None:
    try:
        page, data = await client.logs.read_from_node(message)
        client.reply(ref, page, [data])
    except FrayError as error:
        client.refuse(ref, error)
    finally:
        client.logs.reads_in_progress -= 1


# The cluster


def list_nodes(client: ClientConnection, ref: int, message: messages.ListNodes, blobs: Sequence[Bytes]) -> Answer:
    state, changes, since = client.context.state, client.subscriptions.node_changes, message.changed_since
    if since is None:
        return messages.Nodes(nodes=client.context.attempt_metrics.with_details(nodes_info(state))), ()

    def has_changed() -> bool:
        return changes.look(partial(node_marks, state), client.context.inbox.current_time()) != since

    return _once_changed(client, ref, message.wait_s, has_changed, lambda: _changed_nodes(client, since))


def _changed_nodes(client: ClientConnection, since: int) -> messages.Nodes:
    state, changes = client.context.state, client.subscriptions.node_changes
    last = changes.look(partial(node_marks, state), client.context.inbox.current_time())
    is_reset, changed, gone = changes.since(since)
    found = (node_info(state, state.nodes[name]) for name in changed)
    details = client.context.attempt_metrics.with_details(found)
    return messages.Nodes(nodes=details, change=last, is_reset=is_reset, gone=tuple(gone))


def mint_join(client: ClientConnection, ref: int, message: messages.CreateJoinToken, blobs: Sequence[Bytes]) -> Answer:
    context = client.context
    token = context.join_tokens.mint(message.machine, message.hosts, context.inbox.current_time(), message.life_s)
    return messages.JoinTokenCreated(token=token), ()


def cordon(client: ClientConnection, ref: int, message: maintenance.CordonNodes, blobs: Sequence[Bytes]) -> Answer:
    check_node_selection(message.nodes, message.reason, message.finish_s)
    event = CordonRequested(
        session=client.session,
        ref=ref,
        nodes=message.nodes,
        reason=message.reason,
        drain=message.drain,
        finish_s=message.finish_s,
    )
    client.context.inbox.submit(event)
    return None


def uncordon(client: ClientConnection, ref: int, message: maintenance.UncordonNodes, blobs: Sequence[Bytes]) -> Answer:
    check_node_selection(message.nodes)
    client.context.inbox.submit(UncordonRequested(session=client.session, ref=ref, nodes=message.nodes))
    return None


def what_if(client: ClientConnection, ref: int, message: maintenance.WhatIf, blobs: Sequence[Bytes]) -> Answer:
    # Asked without code: only sizes and places decide.
    spec = evolve(message.job, payload=None)
    check_launch(messages.Launch(jobs=(spec,)), (), lambda blob: False)
    return make_forecast(client.context.state, spec), ()


def get_queue(client: ClientConnection, ref: int, message: usage.GetQueue, blobs: Sequence[Bytes]) -> Answer:
    scope, now = scope_for(client, usage.GetQueue), client.context.inbox.current_time()

    def is_visible(applicant: Applicant) -> bool:
        tenant = applicant.tenant
        return scope is None or tenant.user == scope.user or scope.has_namespace(tenant.namespace)

    found = queue_info(client.context.state, message.limit, message.user, now, is_visible)
    if scope is not None:
        found = evolve(found, by_user={user: count for user, count in found.by_user.items() if user == scope.user})
    return found, ()


def get_usage(client: ClientConnection, ref: int, message: usage.GetUsage, blobs: Sequence[Bytes]) -> Answer:
    state, now = client.context.state, client.context.inbox.current_time()
    samples = client.context.usage_history.all(state, now) if message.samples else ()
    found = usage_info(state, now)
    delay, prices = client.context.loop_delay.histogram(), dict(state.policy.prices)
    return evolve(found, samples=samples, loop_delay=delay, prices=prices), ()


def get_counts(client: ClientConnection, ref: int, message: usage.GetCounts, blobs: Sequence[Bytes]) -> Answer:
    return client.context.job_counts.counts(client.context.inbox.current_time()), ()


def list_machines(
    client: ClientConnection, ref: int, message: machine_groups.ListMachines, blobs: Sequence[Bytes]
) -> Answer:
    return autoscaler_view.list_fleet(client.context.state, message.group), ()


def report_wait(client: ClientConnection, ref: int, message: messages.ReportWait, blobs: Sequence[Bytes]) -> Answer:
    client.context.inbox.submit(WaitReported(session=client.session, ref=ref, waiting=message.waiting))
    return None


def scale_group(
    client: ClientConnection, ref: int, message: machine_groups.ScaleGroup, blobs: Sequence[Bytes]
) -> Answer:
    event = GroupScaled(session=client.session, ref=ref, group=message.group, min=message.min, max=message.max)
    client.context.inbox.submit(event)
    return None


def end_session(client: ClientConnection, ref: int, message: messages.EndSession, blobs: Sequence[Bytes]) -> Answer:
    client.context.inbox.submit(SessionClosed(session=client.session, reason=message.reason, ref=ref))
    # The end was asked for, so it is answered and not reported as an error. Set after the submit, which may refuse.
    client.has_left = True
    return None


HANDLERS: dict[type, Callable[[ClientConnection, int, Any, Sequence[Bytes]], Answer]] = {
    messages.Launch: launch,
    messages.ProvideSecrets: provide_secrets,
    messages.Terminate: terminate,
    messages.Requeue: requeue,
    messages.WatchJobs: watch_jobs,
    messages.FindJob: find_job,
    messages.ListJobs: list_jobs,
    messages.ListGroups: list_groups,
    messages.FetchBlob: fetch_blob,
    messages.GetStacks: get_stacks,
    messages.Explain: explain_job,
    messages.GetEvents: get_events,
    messages.GetJobSpec: get_job_spec,
    messages.FollowLogs: follow_logs,
    messages.WatchLogs: watch_logs,
    ReadLog: read_log,
    messages.CreateReservation: create_reservation,
    messages.RenewReservation: renew_reservation,
    messages.ReleaseReservation: release_reservation,
    messages.WatchReservation: watch_reservation,
    messages.ListReservations: list_reservations,
    messages.Register: register,
    messages.Unregister: unregister,
    messages.Watch: watch,
    messages.Unwatch: unwatch,
    messages.ListActors: list_actors,
    messages.FindActor: find_actor,
    messages.SaveCheckpoint: save_checkpoint,
    messages.FetchCheckpoint: fetch_checkpoint,
    messages.ReportWait: report_wait,
    messages.ListNodes: list_nodes,
    messages.CreateJoinToken: mint_join,
    machine_groups.ListMachines: list_machines,
    machine_groups.ScaleGroup: scale_group,
    maintenance.CordonNodes: cordon,
    maintenance.UncordonNodes: uncordon,
    maintenance.WhatIf: what_if,
    usage.GetQueue: get_queue,
    usage.GetUsage: get_usage,
    usage.GetCounts: get_counts,
    history.GetAttempts: history_requests.get_attempts,
    history.SumAttempts: history_requests.sum_attempts,
    history.GetNodeHistory: history_requests.get_node_history,
    history.FindEvents: history_requests.find_events,
    history.GetReservationHistory: history_requests.get_reservation_history,
    history.GetCapacity: history_requests.get_capacity,
    OfferBundle: handle_bundle,
    PutChunk: handle_bundle,
    OfferValue: handle_bundle,
    FetchValue: handle_bundle,
    FetchChunk: handle_bundle,
    messages.EndSession: end_session,
    people.AddUser: people_requests.add_user,
    people.RemoveUser: people_requests.remove_user,
    people.ListUsers: people_requests.list_users,
    people.GetLaunchUsers: people_requests.launch_users,
    people.ListKeys: people_requests.list_keys,
    people.RevokeKeys: people_requests.revoke_keys,
    people.ShareNamespace: people_requests.share_namespace,
    people.ListNamespaces: people_requests.list_namespaces,
    people.ReadAudit: people_requests.read_audit,
}


def handle_request(client: ClientConnection, ref: int, message: object, blobs: Sequence[Bytes]) -> Answer:
    """Answer one request of a client.

    Raises:
        FrayError: the request is refused, or of an unknown class.
    """
    handler = HANDLERS.get(type(message))
    if handler is None:
        raise ProtocolMismatch(f"unsupported request: {type(message).__name__}")
    return handler(client, ref, message, blobs)
