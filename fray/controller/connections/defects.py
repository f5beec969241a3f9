"""Consequences of a failure at an event, an effect or the task of a connection: never the end of the controller.

A request is answered with the error. What a peer or this machine has shown (a process has exited, a node reports, a
connection was lost) is true whether it could be handled or not, so it is handled again after `REPEAT_S`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import trio

from fray.controller.connections.client import ClientConnection
from fray.controller.connections.node import NodeConnection
from fray.controller.connections.session_errors import internal_error
from fray.controller.context import ControllerContext
from fray.controller.workspaces.bundles import RequestOrigin
from fray.errors import FrayError
from fray.model.ids import NodeName, SessionId
from fray.scheduler.effects import (
    Event,
    EventRefused,
    NodeDied,
    NodeJoined,
    NodeLeaving,
    NodeProbed,
    NodeReported,
    NodeSilent,
    SessionClosed,
    SessionLost,
    SessionOpened,
)

REPEAT_S = 5.0
"""Seconds until what was observed and could not be handled is handled again."""

_log = logging.getLogger("fray.controller")


class Defects:
    """Consequences of failures for the connections of one gateway."""

    def __init__(
        self,
        context: ControllerContext,
        clients: Mapping[SessionId, ClientConnection],
        nodes: Mapping[NodeName, NodeConnection],
        nursery: trio.Nursery,
    ) -> None:
        self._context = context
        self._clients = clients
        self._nodes = nodes
        self._nursery = nursery

    def on_event_refused(self, refused: EventRefused) -> None:
        """Answer the requester, or see to it that what was observed is handled later."""
        event = refused.event
        ref: int | None = getattr(event, "ref", None)
        client = self._clients.get(getattr(event, "session", ""))
        if ref is not None and client is not None:
            client.refuse(ref, refused.error)
        if isinstance(event, SessionOpened):
            # Without a session none of its requests can be handled: an error now, and no wait without end.
            self.end_client(event.session, refused.error)
        if isinstance(event, NodeReported | NodeJoined | _REPEATED) and ref is None:
            self._nursery.start_soon(self._repeat, event)
        else:
            self._context.unpin_blobs((event,))

    def end_client(self, session: SessionId, error: FrayError) -> None:
        if session in self._clients:
            self._clients[session].channel.end(error)

    async def _repeat(self, event: Event) -> None:
        # The values that a report has brought stay pinned until a repeated one has pinned them.
        await trio.sleep(REPEAT_S)
        if isinstance(event, NodeReported | NodeJoined):
            name = event.node if isinstance(event, NodeReported) else event.hello.node
            connection = self._nodes.get(name)
            # A complete report as after a reconnection, since later ones may have arrived meanwhile. Another
            # incarnation has reported by itself.
            if connection is not None and connection.channel.connected:
                connection.on_resumed()
        elif self._is_still_true(event):
            self._context.inbox.post(event)
        self._context.unpin_blobs((event,))

    def _is_still_true(self, event: Event) -> bool:
        """Return whether a peer whose loss could not be handled is still away; all else that is repeated stays true."""
        if isinstance(event, SessionLost):
            client = self._clients.get(event.session)
            return client is None or not client.channel.connected
        if isinstance(event, NodeSilent):
            node = self._nodes.get(event.node)
            return node is None or not node.channel.connected
        return True

    async def serve(
        self, task: Callable[..., Awaitable[object]], origin: RequestOrigin, ref: int, *args: object
    ) -> None:
        """Run the task of one request: what it raises is its answer."""
        try:
            await task(origin, ref, *args)
        except Exception as error:  # noqa: BLE001 - a defect costs this request and not the controller
            _log.exception("a request failed in its task")
            origin.refuse(ref, internal_error("the controller could not handle this request", error))

    async def run_connection(self, connection: ClientConnection | NodeConnection) -> None:
        """Send a peer its updates until its connection has ended."""
        while True:
            try:
                await connection.run()
                return
            except Exception as error:  # noqa: BLE001 - a defect must not end the controller
                _log.exception("the updates of %r failed", connection)
                if isinstance(connection, ClientConnection):
                    # An error, since an update that was lost would be a wait without end.
                    connection.channel.end(internal_error("updates for this client could not be sent", error))
                    return
                # A node's attempts would end with its channel.
                await trio.sleep(REPEAT_S)
                connection.on_joined()


_REPEATED = SessionLost | SessionClosed | NodeSilent | NodeDied | NodeLeaving | NodeProbed
