"""The door of the controller: which requests of a client are handled, and what of the cluster is a client's own.

`admit` is called before every request of a client, with the role of its key (`fray.model.access.roles`). Where a role
has access to its own alone, the request is checked against the state, or narrowed; queries and notices are filtered by
`AccessScope`. Own is:

- for a user: its jobs, namespaces that it was first to use, and those that are shared with it;
- for a job: the jobs of its namespace and of the namespaces it was launched from, all jobs that it has launched at any
  depth, its user's detached jobs that have a namespace of their own name, and namespaces that are shared with its user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from attrs import evolve

from fray.errors import NoSuchJob, ProtocolMismatch, Unauthorized
from fray.model.access.roles import ACCESS, Access, Identity, access_of
from fray.model.ids import ANONYMOUS_PREFIX, ActorId, BlobId, JobId, Namespace, split_actor_id, split_attempt
from fray.model.job_groups import JobGroupInfo
from fray.model.messages import bundles, client, history, people, usage
from fray.model.messages.history import RecordedReservation
from fray.model.messages.maintenance import WhatIf
from fray.model.messages.node import ReadLog
from fray.model.messages.tunnels import OpenTunnel, RunCommand
from fray.model.policy.policy import DEFAULT_TENANT, EVERYONE
from fray.model.reservations import ReservationId
from fray.model.specs import JobSpec
from fray.scheduler.jobs.queries import is_root, living_jobs
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State

if TYPE_CHECKING:
    from fray.controller.people import People

VALUES_LIMIT = 10_000
"""Values that are remembered as a client's own, so that not every part of one is looked up in all jobs."""


class AccessScope:
    """Part of the cluster that is one client's own.

    Args:
        own_namespace: of the client's session.
        job_id: the job that the client is; None: a person.
        past_reservation: finds reservations that have ended, also those that the state has forgotten.
    """

    def __init__(
        self,
        state: State,
        people: People,
        identity: Identity,
        own_namespace: Namespace,
        job_id: JobId | None,
        past_reservation: Callable[[ReservationId], RecordedReservation | None] = lambda reservation_id: None,
    ) -> None:
        self._state, self._people, self._past_reservation = state, people, past_reservation
        self._identity, self._own, self._job_id = identity, own_namespace, job_id
        self._values: dict[BlobId, None] = {}

    @property
    def user(self) -> str:
        return self._identity.user

    @property
    def is_person(self) -> bool:
        """Return whether the client is a person, and not a job."""
        return self._job_id is None

    @property
    def owner(self) -> str:
        """Name of this client for what it has uploaded (`Possession`): the person on all machines, or the job."""
        return f"user {self.user}" if self._job_id is None else f"job {self._job_id}"

    @cached_property
    def _inherited(self) -> frozenset[Namespace]:
        """The namespaces from which this job was launched, through all jobs above it."""
        found: set[Namespace] = set()
        for row in self._with_parents(self._state.jobs.get(self._job_id) if self._job_id is not None else None):
            launcher = self._state.sessions.get(row.launched_by)
            found |= {row.spec.namespace} | ({launcher.namespace} if launcher is not None else set())
        return frozenset(found)

    def _with_parents(self, row: JobRow | None) -> Iterator[JobRow]:
        """Yield a job and all jobs through which it was launched; detached ones, too, unlike those that own it."""
        while row is not None:
            yield row
            row = self._state.jobs.get(row.parent)

    def has_namespace(self, namespace: Namespace) -> bool:
        # Tools of all users have the empty namespace.
        if not namespace:
            return False
        return namespace == self._own or namespace in self._inherited or self._people.may_use(self.user, namespace)

    def has_job(self, job: JobRow) -> bool:
        if self.has_namespace(job.spec.namespace):
            return True
        if self._job_id is None:
            return job.spec.user == self.user
        is_own_detached = job.spec.user == self.user and is_root(job.spec)
        return is_own_detached or any(row.parent == self._job_id for row in self._with_parents(job))

    def has_job_id(self, job_id: JobId) -> bool:
        """Return whether a job on record is own; an unknown one is not."""
        job, past = self._state.jobs.get(job_id), self._state.job_tombstones.get(job_id)
        return self.has_job(job) if job is not None else past is not None and self.has_namespace(past.namespace)

    def has_attempt(self, job_id: JobId, user: str, namespace: Namespace) -> bool:
        """Return whether a recorded attempt is own; its job may have been forgotten."""
        is_same_person = self._job_id is None and user == self.user
        return is_same_person or self.has_namespace(namespace) or self.has_job_id(job_id)

    def has_session(self, name: str) -> bool:
        """Return whether a driver's or job's session is own."""
        attempt, session = self._state.attempts.get(name), self._state.sessions.get(name)
        if attempt is not None:
            return self.has_job_id(attempt.job_id)
        if session is None:
            return False
        is_same_person = self._job_id is None and session.user == self.user
        return is_same_person or self.has_namespace(session.namespace)

    def has_actor(self, actor_id: ActorId, namespace: Namespace = "") -> bool:
        """Return whether an actor is own; an unknown one is judged by the namespace."""
        host, _ = split_actor_id(actor_id)
        if host in self._state.jobs or host in self._state.job_tombstones:
            return self.has_job_id(host)
        registration, past = self._state.registrations.get(host), self._state.actor_tombstones.get(host)
        if registration is not None:
            return self.has_namespace(registration.endpoint.namespace) or self.has_session(registration.session)
        return self.has_namespace(past.namespace if past is not None else namespace)

    def has_group(self, group: JobGroupInfo) -> bool:
        members = [self._state.jobs.get(member.job_id) for member in group.members]
        own = bool(members) and all(job is not None and self.has_job(job) for job in members)
        return own or self.has_namespace(group.namespace)

    def has_reservation(self, reservation_id: ReservationId) -> bool:
        row = self._state.reservations.get(reservation_id)
        one = row.spec if row is not None else self._past_reservation(reservation_id)
        return one is not None and self.has_recorded(one.user, one.namespace)

    def has_recorded(self, user: str, namespace: Namespace) -> bool:
        """Return whether what was requested by this user in this namespace is own."""
        return self.has_namespace(namespace) or (self._job_id is None and user == self.user)

    def has_value(self, value: BlobId) -> bool:
        """Return whether a value is the result or payload of an own job."""
        if value in self._values:
            return True
        for job in self._state.jobs.values():
            outcome = job.outcome.value if job.outcome is not None else None
            if value in (outcome, job.spec.payload) and self.has_job(job):
                self._remember(value)
                return True
        return False

    def has_bundle(self, bundle: BlobId) -> bool:
        """Return whether a workspace is that of an own job."""
        own = self._state.jobs.get(self._job_id) if self._job_id is not None else None
        if bundle in self._values or (own is not None and own.spec.environment.bundle == bundle):
            return True
        if any(job.spec.environment.bundle == bundle and self.has_job(job) for job in self._state.jobs.values()):
            self._remember(bundle)
            return True
        return False

    def _remember(self, content: BlobId) -> None:
        if len(self._values) >= VALUES_LIMIT:
            self._values.clear()
        self._values[content] = None

    def filter_names(self, names: client.Names) -> client.Names:
        """Return the endpoints without those of others."""
        own = tuple(one for one in names.endpoints if self.has_actor(one.actor_id, one.namespace))
        return names if len(own) == len(names.endpoints) else evolve(names, endpoints=own)

    def launch_users(self) -> dict[str, float] | None:
        """Return the users for whom the client may launch jobs, with the weights of their shares.

        Users of the cluster are those with keys; where no one has a key, those with a table in the policy. None: there
        are none of either kind.
        """
        policy, identity = self._state.policy, self._identity
        known = self._people.names or policy.users.keys() - {DEFAULT_TENANT}
        if not known:
            return None
        # The holder of the cluster's token may say that it is any user.
        granted = policy.user(identity.user).launches_for
        has_all = identity.is_stated or EVERYONE in granted
        return {
            name: policy.user(name).weight
            for name in sorted(known)
            if has_all or name == identity.user or name in granted
        }

    # Checks

    def check_launches_for(self, user: str) -> None:
        """Check that the client may launch jobs of another user. Raises Unauthorized."""
        if user not in (self.launch_users() or ()):
            raise Unauthorized(
                f"user {self.user!r} may not launch jobs for {user!r}: an operator grants that, for its users, "
                f"by launches_for = [{user!r}] below [users.{self.user}] in the policy, see docs/policy.md"
            )

    def check_job(self, job_id: JobId) -> None:
        """Raise Unauthorized for a job of others, NoSuchJob for an unknown one."""
        if self.has_job_id(job_id):
            return
        if job_id in self._state.jobs or job_id in self._state.job_tombstones:
            raise self._refusal(f"job {job_id!r}")
        raise NoSuchJob(f"no job {job_id!r} on record (it may have ended long ago)", job_id=job_id)

    def knows_reservation(self, reservation_id: ReservationId) -> bool:
        """Return whether a reservation is on record, also one that is not own."""
        return reservation_id in self._state.reservations or self._past_reservation(reservation_id) is not None

    def check_reservation(self, reservation_id: ReservationId) -> None:
        # For an unknown one the handler raises its own error.
        if self.knows_reservation(reservation_id) and not self.has_reservation(reservation_id):
            raise self._refusal(f"reservation {reservation_id!r}")

    def check_namespace(self, namespace: Namespace, *, claims: bool = True) -> None:
        """Check that the client may put jobs into a namespace; one that is free becomes its user's.

        Raises:
            Unauthorized: it is another user's.
        """
        if not namespace or self.has_namespace(namespace):
            return
        is_free = self._people.owner(namespace) is None and not self._is_used_by_others(namespace)
        # A job takes no namespace for its user.
        if not is_free or namespace.startswith(ANONYMOUS_PREFIX) or (claims and self._job_id is not None):
            raise self._refusal(f"namespace {namespace!r}")
        if claims:
            self._people.claim(self.user, namespace)

    def _is_used_by_others(self, namespace: Namespace) -> bool:
        """Return whether anything that lives in a namespace is another user's."""
        state, user = self._state, self.user
        return (
            any(one.namespace == namespace and one.user != user for one in state.sessions.values() if not one.is_ending)
            or any(job.spec.user != user for job in living_jobs(state, namespace, namespace, ""))
            or any(
                one.spec.namespace == namespace and one.spec.user != user
                for one in state.reservations.values()
                if not one.is_closed
            )
        )

    def _refusal(self, what: str) -> Unauthorized:
        who = f"job {self._job_id!r}" if self._job_id is not None else f"user {self.user!r}"
        return Unauthorized(
            f"{what} is not of {who}: it belongs to another user or namespace; its owner can share a namespace with "
            f"`fray namespace share NAMESPACE --with {self.user or 'USER'}`"
        )


class Requester(Protocol):
    """Connection of a client, with its identity."""

    scope: AccessScope

    def identify(self) -> Identity:
        """Return the identity as it is now. Raises Unauthorized: its key has expired or was revoked."""


# Requests ------------------------------------------------------------------------------------------------------------


def admit(peer: Requester, message: Any) -> Any:
    """Return a request as it may be handled: unchanged, or narrowed to what is the client's own.

    Raises:
        Unauthorized: the role of the client's key may not send it, or it is about something of others.
        NoSuchJob: it is about an unknown job.
        ProtocolMismatch: it is of a class without a row in the table.
    """
    if type(message) not in ACCESS:
        raise ProtocolMismatch(f"unsupported request: {type(message).__name__}")
    identity = peer.identify()
    access = access_of(identity.role, type(message))
    if access is Access.NO:
        raise Unauthorized(
            f"{identity} may not send {type(message).__name__}: see the table of roles in docs/security.md"
        )
    message = _with_user(peer, identity, message)
    narrow = NARROWED.get(type(message)) if access is Access.OWN else None
    return message if narrow is None else narrow(peer.scope, message)


def scope_for(peer: Requester, request: type) -> AccessScope | None:
    """Return the scope by which an answer is filtered; None: the client may see all."""
    return peer.scope if access_of(peer.identify().role, request) is not Access.ALL else None


def _with_user(peer: Requester, identity: Identity, message: Any) -> Any:
    """Return a request with the identity's user in its specs, whatever they say; with another one where it is granted.

    Raises:
        Unauthorized: it is not granted.
    """
    # The holder of the cluster's token says for whom it acts, as there is nothing else that would.
    if identity.is_stated:
        return message
    match message:
        case client.Launch():
            user = message.on_behalf_of or identity.user
            if user != identity.user:
                peer.scope.check_launches_for(user)
            if all(spec.user == user for spec in message.jobs):
                return message
            return evolve(message, jobs=tuple(evolve(spec, user=user) for spec in message.jobs))
        case client.CreateReservation():
            return evolve(message, spec=evolve(message.spec, user=identity.user))
        case WhatIf():
            return evolve(message, job=evolve(message.job, user=identity.user))
    return message


def _launch(scope: AccessScope, message: client.Launch) -> client.Launch:
    for spec in message.jobs:
        _check_spec(scope, spec)
    return message


def _check_spec(scope: AccessScope, spec: JobSpec) -> None:
    # A detached job in a namespace of its own name takes that name, and not a namespace for good.
    scope.check_namespace(spec.namespace, claims=not is_root(spec))
    if spec.reservation_id:
        scope.check_reservation(spec.reservation_id)


def _terminate(scope: AccessScope, message: client.Terminate) -> client.Terminate:
    """Return the request with ids of own jobs in place of names."""
    state, own = scope._state, scope._own
    for job_id in message.jobs:
        if (job_id in state.jobs or job_id in state.job_tombstones) and not scope.has_job_id(job_id):
            raise scope._refusal(f"job {job_id!r}")
    found = dict.fromkeys(message.jobs)
    for text, is_whole in ((message.name, True), (message.prefix, False)):
        for job in living_jobs(state, own, message.namespace, text) if text else ():
            if (job.spec.name == text or not is_whole) and scope.has_job(job):
                found[job.job_id] = None
    if message.group:
        for group in state.job_groups.values():
            jobs = [state.jobs[job_id] for job_id in state.group_members[group.group_id].jobs]
            is_meant = message.group in (group.config.name, group.group_id) and group.ended_at is None
            if is_meant and message.namespace in (None, "*", group.namespace) and all(map(scope.has_job, jobs)):
                found |= dict.fromkeys(job.job_id for job in jobs)
    return evolve(message, jobs=tuple(found), name="", prefix="", group="")


def _requeue(scope: AccessScope, message: client.Requeue) -> client.Requeue:
    for job_id in message.generations:
        scope.check_job(job_id)
    return message


def _jobs(scope: AccessScope, message: client.WatchJobs) -> client.WatchJobs:
    for job_id in message.jobs:
        scope.check_job(job_id)
    return message


def _job(scope: AccessScope, message: Any) -> Any:
    if message.job is not None:
        scope.check_job(message.job)
    return message


def _job_or_reservation(scope: AccessScope, message: client.Explain | client.GetEvents) -> Any:
    if scope.knows_reservation(message.job):
        scope.check_reservation(message.job)
        return message
    return _job(scope, message)


def _read_log(scope: AccessScope, message: ReadLog) -> ReadLog:
    attempt = scope._state.attempts.get(message.attempt_id)
    if attempt is not None:
        scope.check_job(attempt.job_id)
    return message


def _create_reservation(scope: AccessScope, message: client.CreateReservation) -> client.CreateReservation:
    scope.check_namespace(message.spec.namespace)
    return message


def _reservation(scope: AccessScope, message: Any) -> Any:
    scope.check_reservation(message.reservation_id)
    return message


def _watch(scope: AccessScope, message: client.Watch) -> client.Watch:
    kind, _, rest = message.key.partition(":")
    host = split_actor_id(rest)[0] if kind == "actor" else ""
    is_known = host in scope._state.jobs or host in scope._state.registrations
    # A name whose namespace is not own may still be an own actor's: its endpoints are filtered.
    if is_known and not scope.has_actor(rest):
        raise scope._refusal(f"actor {rest!r}")
    return message


def _value(scope: AccessScope, message: bundles.FetchValue) -> bundles.FetchValue:
    if not scope.has_value(message.value):
        raise scope._refusal(f"value {message.value!r}")
    return message


def _chunk(scope: AccessScope, message: bundles.FetchChunk) -> bundles.FetchChunk:
    # That the chunk is a part of the value is checked where it is read.
    if not message.value or not scope.has_value(message.value):
        raise scope._refusal(f"chunk {message.chunk!r}")
    return message


def _tunnel(scope: AccessScope, message: OpenTunnel) -> OpenTunnel:
    if message.port:
        scope.check_job(message.to)
    elif (message.to in scope._state.attempts or message.to in scope._state.sessions) and not scope.has_session(
        message.to
    ):
        raise scope._refusal(f"process {message.to!r}")
    return message


def _command(scope: AccessScope, message: RunCommand) -> RunCommand:
    scope.check_job(message.job)
    # A person who shares a namespace may see and stop the jobs of others there, but not act as them.
    job = scope._state.jobs.get(message.job)
    if job is None or job.spec.user != scope.user:
        raise scope._refusal(f"job {message.job!r}")
    return message


def _keys(scope: AccessScope, message: people.ListKeys) -> people.ListKeys:
    return evolve(message, user=scope.user)


def _revoke(scope: AccessScope, message: people.RevokeKeys) -> people.RevokeKeys:
    own = {key.key_id for key in scope._people.keys(0.0, scope.user)}
    if message.user not in ("", scope.user) or not own.issuperset(message.keys):
        raise scope._refusal("one of these keys")
    return message


def _share(scope: AccessScope, message: people.ShareNamespace) -> people.ShareNamespace:
    if scope._people.owner(message.namespace) != scope.user:
        scope.check_namespace(message.namespace)
    if scope._people.owner(message.namespace) != scope.user:
        raise scope._refusal(f"namespace {message.namespace!r}")
    return message


NARROWED: dict[type, Callable[[AccessScope, Any], Any]] = {
    client.Launch: _launch,
    client.Terminate: _terminate,
    client.Requeue: _requeue,
    client.WatchJobs: _jobs,
    client.GetStacks: _job,
    client.Explain: _job_or_reservation,
    client.GetEvents: _job_or_reservation,
    client.GetJobSpec: _job,
    client.FollowLogs: _job,
    client.WatchLogs: _job,
    ReadLog: _read_log,
    client.CreateReservation: _create_reservation,
    client.RenewReservation: _reservation,
    client.ReleaseReservation: _reservation,
    client.WatchReservation: _reservation,
    client.Watch: _watch,
    bundles.FetchValue: _value,
    bundles.FetchChunk: _chunk,
    OpenTunnel: _tunnel,
    RunCommand: _command,
    people.ListKeys: _keys,
    people.RevokeKeys: _revoke,
    people.ShareNamespace: _share,
}
"""Checks of requests of which a role may send its own alone. The others are filtered where they are answered (lists,
finds, names), or are about the sender by themselves (its session, its checkpoint, its registrations)."""

FILTERED = (
    *(client.FindJob, client.ListJobs, client.ListGroups, client.ListReservations, client.ListActors),
    *(client.FindActor, people.ListNamespaces, usage.GetQueue, usage.GetUsage, client.ListNodes, WhatIf),
    usage.GetCounts,
    *(history.GetAttempts, history.SumAttempts, history.GetNodeHistory, history.FindEvents),
    history.GetReservationHistory,
)
"""Requests whose answers are filtered, where they are made or by `fray.controller.connections.hide_others`."""
OF_SENDER = (
    *(client.ProvideSecrets, client.Register, client.Unregister, client.Unwatch, client.SaveCheckpoint),
    *(client.FetchCheckpoint, client.ReportWait, client.EndSession),
    people.GetLaunchUsers,
)
"""Requests that are about the sender by themselves."""


def job_of(attempt_id: str | None) -> JobId | None:
    """Return the job of a client that is an attempt."""
    return split_attempt(attempt_id)[0] if attempt_id is not None else None
