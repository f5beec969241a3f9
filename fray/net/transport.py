"""Interface of the layer under a channel: whole binary messages in order, and a way to dial and listen.

Addresses are strings: ``tls:HOST:PORT#FINGERPRINT``, ``tcp:HOST:PORT``, ``unix:/path``, ``memory:NAME``,
``relay:INCARNATION#FINGERPRINT``.
`fray.net.transports.websocket` and `fray.net.transports.memory` implement both protocols and pass
`fray.testing.conformance`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import trio
from attrs import field, frozen

from fray.errors import FrayError
from fray.model.messages.client import ProcessMark
from fray.net.auth import Authorize

RELAY_SCHEME = "relay:"
"""Scheme of addresses that lead through the controller (`fray.net.tunnels`): ``relay:INCARNATION``, and with TLS
``#FINGERPRINT`` of the host's certificate."""

Bytes: TypeAlias = bytes | bytearray | memoryview


def is_relayed(address: str) -> bool:
    """Return whether the address leads through the controller."""
    return address.startswith(RELAY_SCHEME)


@frozen
class Credential:
    """Credential of a dialer: it proves that it has ``key``, which the listener finds by ``key_id``. The key is never
    sent."""

    key_id: str
    key: str = field(repr=False)


class CredentialSource(Protocol):
    """Credential that may be replaced while a channel lives, as a token in a file."""

    def current(self) -> Credential:
        """Return the credential for the next dial."""

    def on_refused(self, *, was_accepted: bool) -> bool:
        """Take the refusal of the current one; return whether there is another to try now.

        Args:
            was_accepted: the peer has accepted one before, so that it must have been replaced.
        """


AnyCredential: TypeAlias = Credential | CredentialSource | None


def current_credential(credential: AnyCredential) -> Credential | None:
    """Return the credential for the next dial."""
    return credential if credential is None or isinstance(credential, Credential) else credential.current()


def has_other_credential(credential: AnyCredential, error: FrayError) -> bool:
    """Return whether a dial that was refused may succeed with another credential of the source."""
    if credential is None or isinstance(credential, Credential) or not error.details.get("key_refused"):
        return False
    return credential.on_refused(was_accepted=False)


@frozen
class PeerIdentity:
    """Identity of a dialer as seen by the listener before it reads a frame."""

    key_id: str
    remote: str
    """Origin of the connection, for logs."""
    # The pid comes from the kernel (SO_PEERCRED), not from the peer, so its end may count as proof.
    process: ProcessMark | None = None
    """Process of the dialer, if known: one of this machine, connected by a Unix socket."""
    uris: tuple[str, ...] = ()
    """URIs in the certificate that the dialer has shown and an authority of the listener has issued."""


class Transport(Protocol):
    """One connection. One task sends, one task receives.

    `send` and `receive` raise `fray.errors.ConnectionFailed` (any subclass) once the connection is gone. Before that
    `receive` returns what the peer had sent before it ended the connection, also after a `send` that failed because of
    that end. A cancelled `send` leaves the connection unusable, and the owner must `abort` it.
    """

    peer: PeerIdentity

    async def send(self, parts: Sequence[Bytes]) -> None:
        """Send one message made of ``parts``, without joining them where that costs a copy."""

    async def receive(self) -> Bytes:
        """Return the next message, whole. Raises MessageTooLarge over the limit, which ends the connection."""

    async def aclose(self) -> None:
        """Close in order; takes at most 1 s even if the peer is frozen."""

    def abort(self) -> None:
        """Drop the connection now; idempotent, never blocks."""


class Network(Protocol):
    """Interface to dial and to listen."""

    async def dial(self, address: str, credential: Credential | None, *, timeout_s: float) -> Transport:
        """Connect and authenticate.

        Raises:
            Refused: nothing is listening there (the process that did has ended).
            Unauthorized: the listener does not accept the credential, or cannot prove that it has the key itself.
            ProtocolMismatch: the answer is not of the Fray protocol.
            Unreachable: no answer within ``timeout_s``, or no route.
        """
        ...

    async def listen(
        self,
        address: str,
        authorize: Authorize,
        handler: Callable[[Transport], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled; reports the bound address as started. ``tcp:HOST:0`` picks a port.

        Each connection runs ``handler`` in a task of its own; when that returns or fails the connection is aborted,
        and the listener continues.
        """
