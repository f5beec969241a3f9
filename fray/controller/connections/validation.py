"""Checks of greetings and requests: who may speak as whom, and which launches are valid. Pure functions.

Numbers are bounded here (2^60 of anything), since Python's are not: what overflows in the scheduler would end the
controller and, because it is stored, the next one, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container, Sequence

from attrs import evolve

from fray.errors import ChannelClosed, FrayError, InvalidRequest, Unauthorized
from fray.model.access.user_keys import USER_KEY
from fray.model.environment import check_spec
from fray.model.gangs import hosts_of, port_names, slice_hosts
from fray.model.ids import ANONYMOUS_PREFIX, NAME_LIMIT, BlobId, JobId, Namespace, NodeName, SessionId, check_name
from fray.model.messages.client import ClientHello, Launch, Requeue, Role, SaveCheckpoint
from fray.model.monitoring.trace_context import check_trace_vars
from fray.model.reservations import ReservationSpec, check_reservation
from fray.model.resources import AMOUNT_LIMIT, Capacity, Demand, short_repr
from fray.model.specs import EntryKind, JobSpec
from fray.net.channel.session import HEARTBEAT_S
from fray.net.cluster_token import CLUSTER_KEY
from fray.scheduler.lifecycle import SessionPhase
from fray.scheduler.state.rows import Session

"""Key id of the cluster's token."""
ATTEMPT_KEY = "attempt:"
"""Prefix of the key ids of attempts; the attempt id follows."""
LAUNCH_LIMIT_JOBS = 10_000
"""Jobs of one `Launch`."""
ID_LIMIT = NAME_LIMIT + 40
USER_LIMIT = 256
"""Characters of the name of a user."""
MACHINE_LIMITS = {"milli-CPUs": 10**8, "bytes of memory": 2**50, "bytes of disk": 2**58, "devices": 10_000}
"""Most that one machine may offer, ten times the largest ones: one that offers more would be given every job."""
HOST_LIMIT = 255
"""Characters of the address of a machine, as in the DNS."""
GRACE_LIMIT_S = 7 * 86_400.0
MEMBERS_LIMIT = 100_000
PORTS_END = 65_536
CHOICES_LIMIT = 16
"""Limit of the any-of devices of one job."""
LOCATION_LIMIT = 2_000
"""Characters of the location of a checkpoint."""
_ID = re.compile(r"[!-~]+\Z")
_OUR_REASONS = ("its peer restarted", "stopped", "superseded", "cancelled")


def is_goodbye(error: FrayError) -> bool:
    """Return whether the channel ended because the peer has said goodbye, and not for a reason on this side."""
    reason = error.details.get("reason", "")
    # Exactly this class, and none of the reasons that this side gives: only the client's own word ends its session
    # without a grace period.
    return type(error) is ChannelClosed and reason not in _OUR_REASONS and not reason.startswith("the code behind")


def check_id(text: str, what: str) -> str:
    """Return an id that a client has made, if it is valid.

    Raises:
        InvalidRequest: it is empty, too long, or has characters other than visible ASCII.
    """
    if not _ID.match(text) or len(text) > ID_LIMIT:
        raise InvalidRequest(f"invalid id of {what}: {text!r}; expected 1 to {ID_LIMIT} visible ASCII characters")
    return text


def check_user(user: str) -> str:
    """Return the name of a user, if it is valid; empty: no user.

    Raises:
        InvalidRequest: it is too long, or has characters that cannot be printed.
    """
    # It is a key of the store, a word in tables, and a line in logs.
    if len(user) > USER_LIMIT or not user.isprintable():
        raise InvalidRequest(
            f"invalid user {short_repr(user)}: expected at most {USER_LIMIT} printable characters; set FRAY_USER"
        )
    return user


# Greetings -----------------------------------------------------------------------------------------------------------


def check_client(hello: ClientHello, key_id: str, known: Session | None) -> None:
    """Check that a peer that has proven ``key_id`` may speak for this session.

    Raises:
        Unauthorized: the key belongs to another client.
        InvalidRequest: the session or the namespace has an invalid name, or the grace is out of range.
    """
    attempt = key_id.removeprefix(ATTEMPT_KEY) if key_id.startswith(ATTEMPT_KEY) else None
    # A job's key speaks for its own attempt only, and the cluster's token for no attempt: otherwise user code could
    # pose as a driver, whose sessions may do more.
    known_key = attempt is not None or key_id == CLUSTER_KEY or key_id.startswith(USER_KEY)
    if not known_key or (hello.role is Role.JOB) != (attempt is not None) or hello.attempt_id != attempt:
        raise Unauthorized(f"key {key_id!r} does not authorize {hello.role.value} {hello.attempt_id or ''}".rstrip())
    # Session ids are not secret: they appear in logs and events.
    if known is not None and (known.role is not hello.role or known.attempt_id != attempt):
        raise Unauthorized(f"session {hello.session!r} belongs to another key")
    check_id(hello.session, "a session")
    check_user(hello.user)
    if hello.grace_s is not None and not 0 <= hello.grace_s <= GRACE_LIMIT_S:
        raise InvalidRequest(f"grace_s={hello.grace_s} must be 0 to {GRACE_LIMIT_S:.0f} seconds")
    if hello.namespace:
        check_name(hello.namespace, "a namespace")


def is_session_ended(hello: ClientHello, known: Session | None) -> bool:
    """Return whether the session has ended, or is ending and the client does not come back to wait for that.

    A driver that reconnects while its jobs are still being ended is sent the end of its session, not that of each job;
    one that has said goodbye may reconnect to learn that it is done.
    """
    if known is None:
        # Something of it was accepted before, but this store does not know it: it ended long ago, or the store is
        # another one.
        return hello.established
    return known.phase is SessionPhase.ENDED or (known.phase is SessionPhase.CLOSING and not hello.leaving)


def heartbeat_s(grace_s: float) -> float:
    """Return how often to ask a driver whether it is there. Three periods without an answer are a loss, so that one is
    noticed within three quarters of the grace (but not in less than 1.5 s)."""
    # The lower limit bounds the cost of drivers with a very short grace period.
    return min(HEARTBEAT_S, max(0.5, grace_s / 4))


def default_namespace(session: SessionId) -> Namespace:
    """Return the namespace of a driver that asks for none: its own, and the same each time it asks."""
    # A hash has a fixed length and only characters that a name may have, whatever the session's id is.
    return f"{ANONYMOUS_PREFIX}{hashlib.sha256(session.encode()).hexdigest()[:12]}"


# Launches ------------------------------------------------------------------------------------------------------------


def check_launch(launch: Launch, attached: Sequence[BlobId], has_blob: Callable[[BlobId], bool]) -> list[BlobId]:
    """Return the payloads these jobs need; each is attached or stored.

    Raises:
        InvalidRequest: too many jobs or none, an invalid name or id, a payload that is missing, or an attachment that
            no job names.
    """
    if not 1 <= len(launch.jobs) <= LAUNCH_LIMIT_JOBS:
        raise InvalidRequest(f"a launch must have 1 to {LAUNCH_LIMIT_JOBS} jobs, not {len(launch.jobs)}")
    for spec in launch.jobs:
        _check_spec(spec)
    if launch.group is not None:
        check_name(launch.group.config.name, "a job group")
        _check_token(launch.group.group_id, launch.group.config.name, "job group")
    needed = [spec.payload for spec in launch.jobs if spec.payload is not None]
    # A repeated launch may leave its payloads out: those it sent first are stored.
    missing = [blob for blob in needed if blob not in attached and not has_blob(blob)]
    if missing:
        raise InvalidRequest(
            f"the payload {missing[0]} is not attached, or was damaged: send the launch again", not_uploaded=missing[0]
        )
    if extra := set(attached) - set(needed):
        raise InvalidRequest(f"no job of this launch names the attachment {min(extra)}")
    return needed


def check_reservation_request(spec: ReservationSpec) -> None:
    """Check a reservation.

    Raises:
        InvalidRequest: it has an invalid name, id or amount.
    """
    check_name(spec.name, "a reservation")
    if spec.namespace:
        check_name(spec.namespace, "a namespace")
    # The id begins with the name, so that people recognize it in logs; the rest makes it unique.
    token = spec.reservation_id.removeprefix(f"{spec.name}-")
    if token == spec.reservation_id or not token.isalnum() or len(spec.reservation_id) > ID_LIMIT:
        raise InvalidRequest(
            f"reservation_id={spec.reservation_id!r} must be the reservation's name, a dash, and letters or digits: "
            f"{spec.name + '-run1'!r}"
        )
    for demand in (spec.demand, *spec.alternatives):
        _check_amounts(f"reservation {spec.name!r}", demand)
    check_reservation(spec)


def check_bundles(launch: Launch, known: Container[JobId], has_bundle: Callable[[BlobId], bool]) -> None:
    """Check that the workspaces of new jobs are complete here.

    Raises:
        InvalidRequest: a workspace is not.
    """
    for spec in launch.jobs:
        bundle = spec.environment.bundle
        # A repeated launch is answered from its first acceptance, although its workspace may have been removed since.
        if bundle is not None and spec.job_id not in known and not has_bundle(bundle):
            raise InvalidRequest(
                f"the workspace of job {spec.name!r} ({bundle}) was not uploaded: upload it, and launch again",
                not_uploaded=bundle,
            )


def check_checkpoint(message: SaveCheckpoint, attached: Sequence[BlobId], has_blob: Callable[[BlobId], bool]) -> None:
    """Check a checkpoint.

    Raises:
        InvalidRequest: it has neither content nor location, or both, or its content is missing.
    """
    if (message.blob is None) is not bool(message.location) or len(message.location) > LOCATION_LIMIT:
        raise InvalidRequest("a checkpoint has either a content or a location of at most 2,000 characters")
    if message.blob is not None and message.blob not in attached and not has_blob(message.blob):
        raise InvalidRequest("the checkpoint is not attached, or was damaged: send it again")
    if extra := set(attached) - {message.blob}:
        raise InvalidRequest(f"the checkpoint does not name the attachment {min(extra)}")


def check_capacity(node: NodeName, capacity: Capacity) -> None:
    """Check what a node offers.

    Raises:
        InvalidRequest: an amount or a port is out of range, or more than a machine can have.
    """
    amounts, ports = (capacity.cpu_milli, capacity.memory_bytes, capacity.disk_bytes), capacity.ports
    if not all(0 <= amount <= AMOUNT_LIMIT for amount in amounts):
        raise InvalidRequest(
            f"node {node!r}: no amount may be negative, or more than {AMOUNT_LIMIT}: {short_repr(amounts)}"
        )
    if ports.first < 0 or not 0 <= ports.count <= PORTS_END - ports.first:
        raise InvalidRequest(f"node {node!r}: {short_repr(ports)} are not valid TCP ports")
    for amount, (what, most) in zip((*amounts, len(capacity.devices)), MACHINE_LIMITS.items(), strict=True):
        if amount > most:
            raise InvalidRequest(
                f"node {node!r} offers {amount:,} {what}, but one machine has at most {most:,}: correct its "
                "fray-node.toml, or the options of fray-node"
            )


def check_host(node: NodeName, host: str) -> str:
    """Return the address at which others reach a machine, if it is valid; empty: none.

    Raises:
        InvalidRequest: it is too long, or has characters that no name or IP address has.
    """
    if host and (len(host) > HOST_LIMIT or not _ID.match(host)):
        raise InvalidRequest(
            f"node {node!r}: {short_repr(host)} is not the address of a machine: expected a name or an IP address of "
            f"at most {HOST_LIMIT} characters, see fray-node --advertise"
        )
    return host


def _check_amounts(subject: str, demand: Demand, *more: int) -> None:
    """Check that the scheduler can calculate with these amounts."""
    amounts = (demand.cpu_milli, demand.memory_bytes, demand.disk_bytes, demand.device_count, demand.ports, *more)
    if not all(0 <= amount <= AMOUNT_LIMIT for amount in amounts):
        raise InvalidRequest(
            f"{subject}: no amount may be negative, or more than {AMOUNT_LIMIT}: {short_repr(demand, 500)}"
        )


def _check_alternatives(spec: JobSpec) -> None:
    """Check that each alternative differs from the demand in the device alone."""
    if len(spec.alternatives) >= CHOICES_LIMIT:
        raise InvalidRequest(f"job {spec.name!r}: {len(spec.alternatives) + 1} any-of devices, at most {CHOICES_LIMIT}")
    for other in spec.alternatives:
        same = evolve(
            other,
            device_kind=spec.demand.device_kind,
            device_variant=spec.demand.device_variant,
            device_count=spec.demand.device_count,
        )
        # Alternatives are tried in one decision for the same members, so they must be of the same number of hosts.
        hosts = max(1, hosts_of(other))
        if same != spec.demand or not 0 <= other.device_count <= AMOUNT_LIMIT or hosts != max(1, slice_hosts(spec)):
            raise InvalidRequest(f"job {spec.name!r}: {other} must differ from {spec.demand} in its device alone")


def _check_token(id_: str, name: str, what: str) -> None:
    token = id_.removeprefix(f"{name}-")
    if token == id_ or not token.isalnum() or len(id_) > ID_LIMIT:
        raise InvalidRequest(f"{what} id {id_!r} must be the {what}'s name, a dash, and letters or digits")


def _check_process(spec: JobSpec) -> None:
    """Check what becomes arguments, variables and paths of a process: the kernel ends each at a NUL."""
    texts = [*spec.argv, *spec.env_vars.values(), *spec.sys_path, spec.cwd or ""]
    if any("\0" in text for text in texts):
        raise InvalidRequest(f"job {spec.name!r}: an argument, a variable or a path has a NUL character")
    for name in (*spec.env_vars, *spec.secrets):
        if not name or "=" in name or "\0" in name:
            raise InvalidRequest(f"job {spec.name!r}: {short_repr(name)} cannot be the name of a variable")
    check_trace_vars(spec.trace_vars, f"job {spec.name!r}")


def _check_spec(spec: JobSpec) -> None:
    check_name(spec.name, "a job")
    check_spec(spec.environment)
    check_user(spec.user)
    _check_process(spec)
    if spec.namespace:
        check_name(spec.namespace, "a namespace")
    _check_token(spec.job_id, spec.name, "job")
    demand = spec.demand
    waits_s = (spec.termination.cancel_s, spec.termination.term_s, spec.backoff_s, spec.backoff_max_s, spec.notice_s)
    _check_amounts(f"job {spec.name!r}", demand, spec.memory_limit_bytes)
    if not all(0 <= wait_s < float("inf") for wait_s in waits_s):
        raise InvalidRequest(
            f"job {spec.name!r}: {spec.termination}, its back-off and its notice may not be negative or endless"
        )
    if spec.stall_s is not None and not 0 < spec.stall_s < float("inf"):
        raise InvalidRequest(f"job {spec.name!r}: stall_s={spec.stall_s} must be more than 0 seconds")
    if spec.time_limit_s is not None and not 0 < spec.time_limit_s < float("inf"):
        raise InvalidRequest(f"job {spec.name!r}: time_limit_s={spec.time_limit_s} must be more than 0 seconds")
    if not 1 <= spec.members <= MEMBERS_LIMIT:
        raise InvalidRequest(f"job {spec.name!r}: members={spec.members} must be 1 to {MEMBERS_LIMIT}")
    # The pool counts, the node names: a difference would give a job ports that it cannot find.
    if demand.ports != len(port_names(spec)):
        raise InvalidRequest(
            f"job {spec.name!r}: its demand has {demand.ports} ports, but they are named {port_names(spec)}"
        )
    if spec.alternatives:
        _check_alternatives(spec)
    # A slice is placed whole; a part of one would leave chips that no other job can use.
    if slice_hosts(spec) and spec.members % slice_hosts(spec):
        raise InvalidRequest(
            f"job {spec.name!r}: members={spec.members} must be whole slices of {demand.device_variant}, "
            f"of {slice_hosts(spec)} hosts each"
        )
    if spec.entry is EntryKind.BINARY:
        if not spec.argv:
            raise InvalidRequest(f"job {spec.name!r} runs a program, but argv is empty")
    elif spec.payload is None:
        raise InvalidRequest(f"job {spec.name!r} runs Python code, but has no payload")


SELECTED_NODES_LIMIT = 10_000
"""Machines in one request."""
REASON_LIMIT_CHARS = 1000


def check_node_selection(nodes: Sequence[NodeName], reason: str = "", finish_s: float = 0.0) -> None:
    """Check a request about machines.

    Raises:
        InvalidRequest: no or too many machines, a reason that is too long, or an invalid deadline.
    """
    if not 0 < len(nodes) <= SELECTED_NODES_LIMIT:
        raise InvalidRequest(f"expected 1 to {SELECTED_NODES_LIMIT:,} names of machines, not {len(nodes):,}")
    if len(reason) > REASON_LIMIT_CHARS:
        raise InvalidRequest(f"a reason may have {REASON_LIMIT_CHARS} characters, not {len(reason)}")
    if not 0 <= finish_s < float("inf"):
        raise InvalidRequest(f"deadline_s={finish_s} must be 0 or more seconds")


REQUEUED_JOBS_LIMIT = 10_000
"""Jobs in one request."""


def check_requeue(message: Requeue) -> None:
    """Check a request to requeue jobs.

    Raises:
        InvalidRequest: no or too many jobs, or a reason that is too long.
    """
    if not 0 < len(message.generations) <= REQUEUED_JOBS_LIMIT:
        raise InvalidRequest(f"expected 1 to {REQUEUED_JOBS_LIMIT:,} jobs, not {len(message.generations):,}")
    if len(message.reason) > REASON_LIMIT_CHARS:
        raise InvalidRequest(f"a reason may have {REASON_LIMIT_CHARS} characters, not {len(message.reason)}")
