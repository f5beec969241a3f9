"""Records in the audit log of what one client did, and what it was refused."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from fray.controller.context import ControllerContext
from fray.errors import FrayError, Unauthorized
from fray.model.access.roles import Identity
from fray.model.ids import Namespace, SessionId
from fray.model.messages import client as messages
from fray.model.messages import machine_groups, maintenance, people
from fray.model.messages.people import AuditRecord
from fray.model.messages.tunnels import OpenTunnel, RunCommand
from fray.net.channel.public import Channel

TARGETS_SHOWN = 5
COMMAND_SHOWN = 200
"""Characters of a command that are recorded."""
PENDING_LIMIT = 10_000
"""Requests of one client whose outcome is not known yet."""


class ClientAudit:
    """Audit of one client's requests: a record is written when the outcome is known."""

    def __init__(
        self,
        context: ControllerContext,
        identity: Callable[[], Identity],
        session: SessionId,
        namespace: Namespace,
        channel: Channel,
    ) -> None:
        self._context, self._identity = context, identity
        self._session, self._namespace, self._channel = session, namespace, channel
        self._pending: dict[int, object] = {}

    def begin(self, ref: int, message: object) -> None:
        """Note a request, until it is answered."""
        if len(self._pending) >= PENDING_LIMIT:
            first = next(iter(self._pending))
            self._write(self._pending.pop(first), "unknown: too many requests were under way")
        self._pending[ref] = message

    def end(self, ref: int, error: FrayError | None = None) -> None:
        """Record a request that was answered, if requests of its class are recorded or it was refused for its role."""
        message = self._pending.pop(ref, None)
        if message is not None:
            self.record(message, error)

    def record(self, message: object, error: FrayError | None = None) -> None:
        if type(message) in _TARGETS or isinstance(error, Unauthorized):
            self._write(message, "done" if error is None else f"refused: {error}")

    def close(self) -> None:
        """Record what was not answered when the connection ended."""
        for message in self._pending.values():
            if type(message) in _TARGETS:
                self._write(message, "unknown: the connection ended before the answer")
        self._pending.clear()

    def _write(self, message: object, outcome: str) -> None:
        identity, find = self._identity(), _TARGETS.get(type(message))
        self._context.audit.write(
            AuditRecord(
                at=self._context.inbox.current_time(),
                user=identity.user,
                role=identity.role.value,
                action=type(message).__name__,
                outcome=outcome,
                target=find(message) if find is not None else "",
                remote=self._channel.remote,
                key=identity.key_id,
                session=self._session,
                namespace=self._namespace,
            )
        )


def _list(texts: Iterable[str]) -> str:
    found = list(texts)
    more = f" and {len(found) - TARGETS_SHOWN} more" if len(found) > TARGETS_SHOWN else ""
    return ", ".join(found[:TARGETS_SHOWN]) + more


def _command(message: RunCommand) -> str:
    command = shlex.join(message.argv)
    shown = command if len(command) <= COMMAND_SHOWN else f"{command[:COMMAND_SHOWN]} …"
    return f"{message.job} member {message.member}: {shown}"


def _launch(message: messages.Launch) -> str:
    whose = f" for {message.on_behalf_of}" if message.on_behalf_of else ""
    return _list(spec.job_id for spec in message.jobs) + whose


def _terminate(message: messages.Terminate) -> str:
    named = {"name": message.name, "prefix": message.prefix, "group": message.group}
    chosen = [f"{key}={value}" for key, value in named.items() if value]
    return f"{_list([*message.jobs, *chosen])}: {message.reason}"


# Targets only: no variables, no payloads, no values of secrets.
_TARGETS: dict[type, Callable[..., str]] = {
    messages.Launch: _launch,
    messages.ProvideSecrets: lambda message: _list(message.secrets),
    messages.Terminate: _terminate,
    messages.Requeue: lambda message: f"{_list(message.generations)}: {message.reason}",
    messages.FetchBlob: lambda message: message.blob,
    messages.GetStacks: lambda message: message.job,
    messages.CreateReservation: lambda message: message.spec.reservation_id,
    messages.ReleaseReservation: lambda message: f"{message.reservation_id}: {message.reason}",
    messages.CreateJoinToken: lambda message: f"machine {message.machine}, {message.hosts} hosts",
    machine_groups.ScaleGroup: lambda message: f"{message.group}: min={message.min} max={message.max}",
    maintenance.CordonNodes: lambda message: (
        f"{_list(message.nodes)}{' (drain)' if message.drain else ''}: {message.reason}"
    ),
    maintenance.UncordonNodes: lambda message: _list(message.nodes),
    OpenTunnel: lambda message: f"{message.to} port {message.port!r}" if message.port else message.to,
    RunCommand: _command,
    people.AddUser: lambda message: f"{message.user} as {message.role}",
    people.RemoveUser: lambda message: message.user,
    people.RevokeKeys: lambda message: _list([*message.keys, *([f"user={message.user}"] if message.user else [])]),
    people.ShareNamespace: lambda message: (
        f"{message.namespace} {'with' if message.on else 'no more with'} {_list(message.users)}"
    ),
    people.ReadAudit: lambda message: "",
}
"""Texts for the targets of requests that are recorded, by their class."""
