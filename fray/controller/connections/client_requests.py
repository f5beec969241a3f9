"""What a client may ask, and who answers: a function a request.

Law: what changes the cluster goes into the inbox and is answered when it is saved; what only looks is answered at once
from the state, which is always the saved one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from fray.controller.connections.validation import (
    check_bundles,
    check_checkpoint,
    check_id,
    check_launch,
    check_marked,
    check_reserved,
)
from fray.controller.secret_store import check_secrets
from fray.errors import FrayError, InvalidRequest, StoreError, Unauthorized
from fray.model.ids import Namespace, check_name
from fray.model.job_groups import JobGroupInfo
from fray.model.messages import client as words
from fray.model.messages import machine_groups, maintenance, usage
from fray.model.messages.bundles import OfferBundle, PutPiece
from fray.model.messages.node import ReadLog
from fray.model.specs import JobInfo
from fray.net.channel.public import MESSAGE_LIMIT_BYTES
from fray.net.transport import Bytes
from fray.scheduler.autoscaler import view
from fray.scheduler.effects import (
    CheckpointTaken,
    CordonRequested,
    GroupScaled,
    LaunchRequested,
    NameRegistered,
    NameUnregistered,
    ReservationReleased,
    ReservationRenewed,
    ReservationRequested,
    SessionClosed,
    TerminateRequested,
    UncordonRequested,
)
from fray.scheduler.explain import group_text
from fray.scheduler.explain.explain import explain
from fray.scheduler.explain.queue_view import queue_info, usage_info
from fray.scheduler.explain.what_if import what_if as forecast
from fray.scheduler.jobs import actor_queries, checkpoints, queries
from fray.scheduler.reservations.view import explain_reservation, list_reservations

if TYPE_CHECKING:
    from fray.controller.connections.client import ClientConnection

LIST_LIMIT_BYTES = MESSAGE_LIMIT_BYTES * 3 // 4
"""Of the records in a list of jobs, about."""
RECORD_BYTES = 500
"""Of an attempt in it, about, beside its message."""
REPLY_LIMIT_BYTES = MESSAGE_LIMIT_BYTES // 2
"""Attachments of one reply; the rest of a message is for the words around them."""

Answer = tuple[object, Sequence[Bytes]] | None
"""A reply with attachments; None: the law answers, or a task."""


# Jobs


def launch(link: ClientConnection, ref: int, message: words.Launch, blobs: Sequence[Bytes]) -> Answer:
    with link.house.holding(blobs) as attached:
        needed = check_launch(message, attached, link.house.store.has_blob)
        check_bundles(message, link.house.state.jobs, link.house.bundles.has)
        declared = link.front.declared_secrets()
        if declared is not None:
            check_secrets(message.jobs, message.secrets, declared)
        event = LaunchRequested(session=link.session, ref=ref, launch=evolve(message, secrets={}))
        link.house.secrets.bring([spec.job_id for spec in message.jobs if spec.secrets], message.secrets)
        link.house.ask_with(event, needed)
    return None


def bring_secrets(link: ClientConnection, ref: int, message: words.ProvideSecrets, blobs: Sequence[Bytes]) -> Answer:
    jobs = link.house.state.jobs
    for job_id, values in message.secrets.items():
        if job_id in jobs and not jobs[job_id].ended and jobs[job_id].launched_by == link.session:
            link.house.secrets.bring([job_id], values)
    link.front.secrets_moved()
    return words.Done(), ()


def terminate(link: ClientConnection, ref: int, message: words.Terminate, blobs: Sequence[Bytes]) -> Answer:
    what = {field: getattr(message, field) for field in ("jobs", "reason", "name", "prefix", "tree", "own", "group")}
    link.house.inbox.ask(TerminateRequested(session=link.session, ref=ref, namespace=message.namespace, **what))
    return None


def find_job(link: ClientConnection, ref: int, message: words.FindJob, blobs: Sequence[Bytes]) -> Answer:
    state = link.house.state
    found = queries.find_job(state, link.namespace, message.name, message.namespace)
    return follow_jobs(link, [state.job_info(found)] if found is not None else [])


def watch_jobs(link: ClientConnection, ref: int, message: words.WatchJobs, blobs: Sequence[Bytes]) -> Answer:
    return follow_jobs(link, [link.house.state.job_info(job) for job in message.jobs])


def follow_jobs(link: ClientConnection, infos: Sequence[JobInfo]) -> tuple[words.Jobs, list[Bytes]]:
    """The infos with their values, each attached for itself; those that live are followed from now on."""
    told: list[JobInfo] = []
    values: list[Bytes] = []
    for info in infos:
        told_info, value = link.house.with_value(link.house.vitals.complete(info))
        told.append(told_info)
        values += value
        if not info.state.finished:
            link.audience.of_job.add(info.job_id, link)
    size_bytes = sum(map(len, values))
    if size_bytes > REPLY_LIMIT_BYTES:
        raise InvalidRequest(
            f"the results of these {len(infos)} jobs have {size_bytes} bytes together, "
            f"more than one reply carries ({REPLY_LIMIT_BYTES}): ask for fewer jobs at a time",
            size_bytes=size_bytes,
            limit_bytes=REPLY_LIMIT_BYTES,
        )
    return words.Jobs(jobs=tuple(told)), values


def list_jobs(link: ClientConnection, ref: int, message: words.ListJobs, blobs: Sequence[Bytes]) -> Answer:
    found = link.house.state.list_jobs(
        _namespace(link, message.namespace),
        name=message.name,
        prefix=message.prefix,
        states=message.states,
        limit=max(0, message.limit),
    )
    return words.Jobs(jobs=bounded_list(tuple(map(link.house.vitals.listed, found)))), ()


def list_groups(link: ClientConnection, ref: int, message: words.ListGroups, blobs: Sequence[Bytes]) -> Answer:
    found = group_text.list_groups(link.house.state, link.namespace, message.namespace, message.name)
    return words.JobGroups(groups=bounded_groups(found)), ()


def bounded_groups(infos: tuple[JobGroupInfo, ...]) -> tuple[JobGroupInfo, ...]:
    """The newest that one reply carries."""
    room = LIST_LIMIT_BYTES // RECORD_BYTES
    for index in range(len(infos) - 1, -1, -1):
        room -= 1 + len(infos[index].members)
        if room < 0:
            return infos[index + 1 :]
    return infos


def bounded_list(infos: tuple[JobInfo, ...]) -> tuple[JobInfo, ...]:
    """A list that one reply carries: to find out by writing it would hold up everybody.

    Raises:
        InvalidRequest: it is too long.
    """
    size_bytes = sum(len(each.message) + RECORD_BYTES for info in infos for each in info.attempts)
    if size_bytes > LIST_LIMIT_BYTES:
        raise InvalidRequest(
            f"the records of these {len(infos):,} jobs have about {size_bytes / 1e6:,.0f} MB, more than one reply "
            f"carries ({LIST_LIMIT_BYTES / 1e6:,.0f} MB): ask for fewer, with limit=, prefix= or states="
        )
    return infos


def ask_stacks(link: ClientConnection, ref: int, message: words.GetStacks, blobs: Sequence[Bytes]) -> Answer:
    link.front.ask_stacks(link, ref, message.job)
    return None


def _namespace(link: ClientConnection, asked: Namespace | None) -> Namespace | None:
    """None for all."""
    return link.namespace if asked is None else None if asked == "*" else asked


def fetch_blob(link: ClientConnection, ref: int, message: words.FetchBlob, blobs: Sequence[Bytes]) -> Answer:
    data = link.house.store.blob(message.blob)
    if data is None:
        raise InvalidRequest(f"the controller keeps no blob {message.blob!r} (any more)")
    return words.Done(), [data]


def explain_job(link: ClientConnection, ref: int, message: words.Explain, blobs: Sequence[Bytes]) -> Answer:
    state = link.house.state
    if message.job in state.reservations:
        return words.Text(text=explain_reservation(state, message.job)), ()
    state.job_info(message.job)
    return words.Text(text=explain(state, message.job, link.house.inbox.now)), ()


def story(link: ClientConnection, ref: int, message: words.GetEvents, blobs: Sequence[Bytes]) -> Answer:
    events = link.house.store.story(message.job)
    if not events and message.job not in link.house.state.reservations:
        link.house.state.job_info(message.job)
    return words.Events(events=events), ()


# Reservations


def create_reservation(
    link: ClientConnection, ref: int, message: words.CreateReservation, blobs: Sequence[Bytes]
) -> Answer:
    check_reserved(message.spec)
    link.house.inbox.ask(ReservationRequested(session=link.session, ref=ref, spec=message.spec))
    link.audience.of_reservation.add(message.spec.reservation_id, link)
    return None


def renew_reservation(
    link: ClientConnection, ref: int, message: words.RenewReservation, blobs: Sequence[Bytes]
) -> Answer:
    name, ttl_s = message.reservation_id, message.ttl_s
    link.house.inbox.ask(ReservationRenewed(session=link.session, ref=ref, reservation_id=name, ttl_s=ttl_s))
    return None


def release_reserved(
    link: ClientConnection, ref: int, message: words.ReleaseReservation, blobs: Sequence[Bytes]
) -> Answer:
    name, reason = message.reservation_id, message.reason
    link.house.inbox.ask(ReservationReleased(session=link.session, ref=ref, reservation_id=name, reason=reason))
    return None


def watch_reservation(
    link: ClientConnection, ref: int, message: words.WatchReservation, blobs: Sequence[Bytes]
) -> Answer:
    info = link.house.state.reservation_info(message.reservation_id)
    if message.follow:
        link.audience.of_reservation.add(message.reservation_id, link)
    return words.Reservations(reservations=(info,)), ()


def list_reserved(link: ClientConnection, ref: int, message: words.ListReservations, blobs: Sequence[Bytes]) -> Answer:
    found = list_reservations(link.house.state, _namespace(link, message.namespace), message.ended)
    return words.Reservations(reservations=found), ()


# Names


def register(link: ClientConnection, ref: int, message: words.Register, blobs: Sequence[Bytes]) -> Answer:
    check_name(message.endpoint.name, "an actor")
    check_id(message.endpoint.actor_id, "an actor")
    link.house.inbox.ask(NameRegistered(session=link.session, ref=ref, register=message))
    return None


def unregister(link: ClientConnection, ref: int, message: words.Unregister, blobs: Sequence[Bytes]) -> Answer:
    link.house.inbox.ask(NameUnregistered(session=link.session, ref=ref, actor_id=message.actor_id))
    return None


def watch(link: ClientConnection, ref: int, message: words.Watch, blobs: Sequence[Bytes]) -> Answer:
    if message.key.partition(":")[0] not in ("name", "actor"):
        raise InvalidRequest(f"{message.key!r} is no key: write name:NAMESPACE/NAME or actor:ID")
    link.audience.of_name.add(message.key, link)
    link.news.names_told(message.key)
    return link.house.names_now(message.key)


def unwatch(link: ClientConnection, ref: int, message: words.Unwatch, blobs: Sequence[Bytes]) -> Answer:
    link.audience.of_name.drop(message.key, link)
    return words.Done(), ()


def list_actors(link: ClientConnection, ref: int, message: words.ListActors, blobs: Sequence[Bytes]) -> Answer:
    found = actor_queries.list_actors(link.house.state, _namespace(link, message.namespace), message.prefix)
    return words.Actors(actors=found), ()


def find_actor(link: ClientConnection, ref: int, message: words.FindActor, blobs: Sequence[Bytes]) -> Answer:
    state = link.house.state
    if message.actor_id:
        return words.Actors(actors=actor_queries.find_by_id(state, message.actor_id)), ()
    namespace = link.namespace if message.namespace is None else message.namespace
    return words.Actors(actors=actor_queries.find_by_name(state, namespace, message.name)), ()


# Checkpoints


def save_checkpoint(link: ClientConnection, ref: int, message: words.SaveCheckpoint, blobs: Sequence[Bytes]) -> Answer:
    with link.house.holding(blobs) as attached:
        check_checkpoint(message, attached, link.house.store.has_blob)
        event = CheckpointTaken(
            session=link.session, ref=ref, number=message.number, blob=message.blob, location=message.location
        )
        link.house.ask_with(event, [message.blob] if message.blob is not None else [])
    return None


def fetch_checkpoint(
    link: ClientConnection, ref: int, message: words.FetchCheckpoint, blobs: Sequence[Bytes]
) -> Answer:
    state = link.house.state
    kept = state.jobs[checkpoints.calling_attempt(state, link.session).job_id].checkpoint
    if kept is None:
        return words.Checkpoint(), ()
    data = link.house.store.blob(kept.blob) if kept.blob is not None else None
    if kept.blob is not None and data is None:
        raise StoreError(f"the checkpoint of {kept.attempt_id} is damaged in the controller's store")
    return words.Checkpoint(blob=kept.blob, location=kept.location), [data] if data is not None else ()


# Workspaces


def about_bundle(link: ClientConnection, ref: int, message: object, blobs: Sequence[Bytes]) -> Answer:
    link.house.bundles.admit(message, blobs)
    link.front.start_soon(link.house.bundles.serve, link, ref, message, blobs)
    return None


# Logs


def follow_logs(link: ClientConnection, ref: int, message: words.FollowLogs, blobs: Sequence[Bytes]) -> Answer:
    if message.job is not None:
        link.house.state.job_info(message.job)
    key = link.session if message.job is None else message.job
    if message.on:
        link.audience.of_log.add(key, link)
    else:
        link.audience.of_log.drop(key, link)
    link.logs.follow(message)
    link.news.wake()
    return words.Done(), ()


def watch_logs(link: ClientConnection, ref: int, message: words.WatchLogs, blobs: Sequence[Bytes]) -> Answer:
    sources = link.logs.watch(message)
    who = link.audience.of_tree if message.tree else link.audience.of_news
    (who.add if message.follow else who.drop)(message.job, link)
    return sources, ()


def read_log(link: ClientConnection, ref: int, message: ReadLog, blobs: Sequence[Bytes]) -> Answer:
    found = link.logs.read_here(message)
    if found is not None:
        return found[0], [found[1]]
    link.logs.reading += 1
    link.front.start_soon(_read_there, link, ref, message)
    return None


async def _read_there(link: ClientConnection, ref: int, message: ReadLog) -> None:
    try:
        page, data = await link.logs.read_there(message)
        link.reply(ref, page, [data])
    except FrayError as error:
        link.refuse(ref, error)
    finally:
        link.logs.reading -= 1


# The cluster


def list_nodes(link: ClientConnection, ref: int, message: words.ListNodes, blobs: Sequence[Bytes]) -> Answer:
    return words.Nodes(nodes=link.house.vitals.nodes(link.house.state.nodes_info())), ()


def mint_join(link: ClientConnection, ref: int, message: words.MintJoin, blobs: Sequence[Bytes]) -> Answer:
    if link.hello.role is words.Role.JOB:
        raise Unauthorized("a job lets no machine in: who has the cluster's token may ask for a join token")
    house = link.house
    token = house.joins.mint(message.machine, message.hosts, house.inbox.time(), message.life_s)
    return words.JoinMinted(token=token), ()


def cordon(link: ClientConnection, ref: int, message: maintenance.CordonNodes, blobs: Sequence[Bytes]) -> Answer:
    check_marked(message.nodes, message.reason, message.finish_s)
    event = CordonRequested(
        session=link.session,
        ref=ref,
        nodes=message.nodes,
        reason=message.reason,
        drain=message.drain,
        finish_s=message.finish_s,
    )
    link.house.inbox.ask(event)
    return None


def uncordon(link: ClientConnection, ref: int, message: maintenance.UncordonNodes, blobs: Sequence[Bytes]) -> Answer:
    check_marked(message.nodes)
    link.house.inbox.ask(UncordonRequested(session=link.session, ref=ref, nodes=message.nodes))
    return None


def what_if(link: ClientConnection, ref: int, message: maintenance.WhatIf, blobs: Sequence[Bytes]) -> Answer:
    spec = evolve(message.job, payload=None)
    check_launch(words.Launch(jobs=(spec,)), (), lambda blob: False)
    return forecast(link.house.state, spec), ()


def ask_queue(link: ClientConnection, ref: int, message: usage.GetQueue, blobs: Sequence[Bytes]) -> Answer:
    return queue_info(link.house.state, message.limit, message.user, link.house.inbox.time()), ()


def ask_usage(link: ClientConnection, ref: int, message: usage.GetUsage, blobs: Sequence[Bytes]) -> Answer:
    state, now = link.house.state, link.house.inbox.time()
    samples = link.house.samples.all(state, now) if message.samples else ()
    return evolve(usage_info(state, now), samples=samples), ()


def list_machines(
    link: ClientConnection, ref: int, message: machine_groups.ListMachines, blobs: Sequence[Bytes]
) -> Answer:
    return view.list_fleet(link.house.state, message.group), ()


def scale_group(link: ClientConnection, ref: int, message: machine_groups.ScaleGroup, blobs: Sequence[Bytes]) -> Answer:
    if link.hello.role is words.Role.JOB:
        raise Unauthorized("a job does not say how many machines there are: who has the cluster's token may")
    event = GroupScaled(session=link.session, ref=ref, group=message.group, min=message.min, max=message.max)
    link.house.inbox.ask(event)
    return None


def end_session(link: ClientConnection, ref: int, message: words.EndSession, blobs: Sequence[Bytes]) -> Answer:
    link.house.inbox.ask(SessionClosed(session=link.session, reason=message.reason, ref=ref))
    link.has_left = True
    return None


HANDLERS: dict[type, Callable[[ClientConnection, int, Any, Sequence[Bytes]], Answer]] = {
    words.Launch: launch,
    words.ProvideSecrets: bring_secrets,
    words.Terminate: terminate,
    words.WatchJobs: watch_jobs,
    words.FindJob: find_job,
    words.ListJobs: list_jobs,
    words.ListGroups: list_groups,
    words.FetchBlob: fetch_blob,
    words.GetStacks: ask_stacks,
    words.Explain: explain_job,
    words.GetEvents: story,
    words.FollowLogs: follow_logs,
    words.WatchLogs: watch_logs,
    ReadLog: read_log,
    words.CreateReservation: create_reservation,
    words.RenewReservation: renew_reservation,
    words.ReleaseReservation: release_reserved,
    words.WatchReservation: watch_reservation,
    words.ListReservations: list_reserved,
    words.Register: register,
    words.Unregister: unregister,
    words.Watch: watch,
    words.Unwatch: unwatch,
    words.ListActors: list_actors,
    words.FindActor: find_actor,
    words.SaveCheckpoint: save_checkpoint,
    words.FetchCheckpoint: fetch_checkpoint,
    words.ListNodes: list_nodes,
    words.MintJoin: mint_join,
    machine_groups.ListMachines: list_machines,
    machine_groups.ScaleGroup: scale_group,
    maintenance.CordonNodes: cordon,
    maintenance.UncordonNodes: uncordon,
    maintenance.WhatIf: what_if,
    usage.GetQueue: ask_queue,
    usage.GetUsage: ask_usage,
    OfferBundle: about_bundle,
    PutPiece: about_bundle,
    words.EndSession: end_session,
}
