"""Roles, and the one table of what each may request of the controller. Pure.

Every request of a peer is looked up here before it is handled; a request without a row is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from attrs import frozen

from fray.model.messages import bundles, client, history, machine_groups, maintenance, node, people, tunnels, usage


class AccessRole(StrEnum):
    """Role of a peer, which follows from the key that it has proven."""

    VIEWER = "viewer"
    """Person: reads records, logs and results of the whole cluster; runs nothing."""
    USER = "user"
    """Person: runs jobs in namespaces of its own, and in those that are shared with it."""
    OPERATOR = "operator"
    """Person: a user who also reads and stops what is others', and maintains machines."""
    ADMIN = "admin"
    """Person, or the holder of the cluster's token: may do everything."""
    JOB = "job"
    """Process of a job, by the key of its attempt."""
    NODE = "node"
    """A fray-node, by its own key or by the cluster's token."""
    NONE = "none"
    """Peer without a key, or with one that has expired or was revoked."""


PEOPLE = (AccessRole.VIEWER, AccessRole.USER, AccessRole.OPERATOR, AccessRole.ADMIN)
"""Roles that a person may have."""


class Access(StrEnum):
    """Access of a role to one kind of request."""

    ALL = "yes"
    OWN = "own"
    """Only what is the peer's own: see `fray.controller.connections.access`."""
    NO = "no"


@frozen
class Identity:
    """Identity behind a connection: its role and its user."""

    role: AccessRole
    user: str = ""
    """User of all that this peer does."""
    key_id: str = ""
    is_stated: bool = False
    """True if the user is only what the peer says: it has the cluster's token, which names no user."""

    def __str__(self) -> str:
        return f"{self.role} {self.user!r}" if self.user else str(self.role)


_COLUMNS = (*PEOPLE, AccessRole.JOB, AccessRole.NODE, AccessRole.NONE)
_LETTERS = {"y": Access.ALL, "o": Access.OWN, "-": Access.NO}
# One letter for each of viewer, user, operator, admin, job, node, none.
_ROWS: dict[str, tuple[type, ...]] = {
    "-ooyo--": (
        *(client.Launch, client.ProvideSecrets, client.CreateReservation),
        *(client.Register, client.Unregister, client.Watch, client.Unwatch),
        *(client.SaveCheckpoint, client.FetchCheckpoint, client.ReportWait),
        *(tunnels.OpenTunnel, people.GetLaunchUsers),
    ),
    # Of one's own jobs alone, also for operators: a command may do all that the job may.
    "-ooy---": (tunnels.RunCommand, people.ShareNamespace),
    "-oyyo--": (client.Terminate, client.Requeue, client.GetStacks, client.RenewReservation, client.ReleaseReservation),
    "yoyyo--": (
        *(client.WatchJobs, client.FindJob, client.ListJobs, client.ListGroups, client.Explain, client.GetEvents),
        client.GetJobSpec,
        *(client.FollowLogs, client.WatchLogs, node.ReadLog),
        *(client.WatchReservation, client.ListReservations),
        *(client.ListActors, client.FindActor),
        *(usage.GetQueue, usage.GetUsage, usage.GetCounts, client.ListNodes, maintenance.WhatIf),
        *(history.GetAttempts, history.SumAttempts, history.GetNodeHistory, history.FindEvents),
        history.GetReservationHistory,
    ),
    "yoyyoy-": (bundles.FetchValue, bundles.FetchChunk),
    "-yyyy--": (bundles.OfferBundle,),
    "-yyyyy-": (bundles.OfferValue, bundles.PutChunk),
    "-----y-": (bundles.FetchBundle,),
    "yyyyy--": (machine_groups.ListMachines, history.GetCapacity),
    "ooooo--": (client.EndSession,),
    "--yy---": (
        *(maintenance.CordonNodes, maintenance.UncordonNodes, machine_groups.ScaleGroup),
        *(people.ListUsers, people.ReadAudit),
    ),
    "---y---": (client.FetchBlob, client.CreateJoinToken, people.AddUser, people.RemoveUser),
    "oooy---": (people.ListKeys, people.RevokeKeys),
    "yoyy---": (people.ListNamespaces,),
}
ACCESS: dict[type, dict[AccessRole, Access]] = {
    request: {role: _LETTERS[letter] for role, letter in zip(_COLUMNS, letters, strict=True)}
    for letters, requests in _ROWS.items()
    for request in requests
}
"""Access of each role, by class of the request."""


def access_of(role: AccessRole, request: type) -> Access:
    """Return what a role may do with requests of a class; a class without a row is refused to all."""
    return ACCESS[request][role] if request in ACCESS else Access.NO


def table_lines() -> Iterator[str]:
    """Yield the table as lines of Markdown, for the documentation."""
    yield f"| request | {' | '.join(_COLUMNS)} |"
    yield f"|---|{'---|' * len(_COLUMNS)}"
    for request in sorted(ACCESS, key=lambda each: each.__name__):
        yield f"| `{request.__name__}` | {' | '.join(ACCESS[request][role] for role in _COLUMNS)} |"
