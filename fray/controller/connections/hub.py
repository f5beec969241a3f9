"""Interface between a connection and the gateway that holds all connections."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from fray.controller.workspaces.bundles import RequestOrigin
from fray.model.ids import JobId, NodeName, SessionId
from fray.model.messages.node import StackCapture
from fray.net.channel.public import Channel
from fray.net.channel.requests import Requests
from fray.net.limited_log import LimitedLog
from fray.net.tunnels.multiplexer import TunnelMultiplexer


class ConnectionHub(Protocol):
    """The gateway as one connection sees it: the other connections, background tasks, and what to report."""

    foreign_attempts: LimitedLog
    """Log of attempts of which a node speaks and that are another node's."""

    def client_ended(self, session: SessionId, channel: Channel) -> None:
        """Forget the connection of a client; its channel has ended."""

    def node_ended(self, node: NodeName, channel: Channel) -> None:
        """Forget the connection of a node; its channel has ended."""

    def node_requests(self, node: NodeName) -> Requests | None:
        """Return what sends requests to a node; None while it is not connected."""

    def client_tunnels(self, incarnation: str) -> TunnelMultiplexer | None:
        """Return the carrier of tunnels to a process; None if it has no connection."""

    def node_tunnels(self, node: NodeName) -> TunnelMultiplexer | None:
        """Return the carrier of tunnels to ports of jobs on a node; None if it has no connection."""

    def declared_secrets(self) -> set[str] | None:
        """Return the names of all secrets that any node declares; None while no node is connected."""

    def secrets_changed(self) -> None:
        """Try again to start attempts that wait for secrets: a driver has provided some."""

    def request_stacks(self, origin: RequestOrigin, ref: int, job_id: JobId) -> None:
        """Capture the stacks of a job and reply later.

        Raises:
            NoSuchJob: the job is unknown.
            ChannelFull: too many captures are in progress.
        """

    def stacks_captured(self, node: NodeName, capture: StackCapture) -> None:
        """Take a node's answer to a `CaptureRequest`."""

    def drop_keys(self, key_ids: Collection[str], reason: str) -> None:
        """End the connections that were opened with these keys."""

    def previous_token_users(self) -> tuple[str, ...]:
        """Return the present connections that were opened with the cluster's previous token, as text."""

    def next_revision(self) -> int:
        """Return the number of the next `DesiredState`; it grows for as long as this controller runs."""

    def start_soon(
        self, task: Callable[..., Awaitable[object]], origin: RequestOrigin, ref: int, *args: object
    ) -> None:
        """Start the task of one request, which may outlive the connection; what it raises is the request's answer."""
