"""Listener within this process: authentication of dialers, and tasks for their connections."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context

import trio
from attrs import define, field

from fray.errors import ConnectionFailed
from fray.net.auth import Authenticator
from fray.net.limited_log import LimitedLog
from fray.net.transport import Transport

logger = logging.getLogger("fray.net")

HANDSHAKE_S = 10.0
"""Longest duration of a handshake at the listener."""


@define(eq=False)
class AuthenticatedListener:
    """One listener. It does not accept connections itself: pass each one to `begin`."""

    authenticator: Authenticator
    handler: Callable[[Transport], Awaitable[None]]
    nursery: trio.Nursery
    context: Context = field(factory=copy_context)
    """Context of the listening task: a connection must not run with the context variables of its dialer."""
    _log: LimitedLog = field(factory=lambda: LimitedLog(logger), init=False)

    def begin(self, transport: Transport, admit: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Serve one connection in a task of its own.

        Args:
            admit: rest of its handshake; the connection is served if it returns True. Default: it is authenticated.
        """
        # Trio's `start_soon` takes over the current context, which here is that of the dialer's task.
        self.context.copy().run(self.nursery.start_soon, self._serve, transport, admit)

    async def _serve(self, transport: Transport, admit: Callable[[], Awaitable[bool]] | None) -> None:
        try:
            if admit is None or await self._admitted(transport, admit):
                await self.handler(transport)
        except Exception:
            logger.exception("the handler of a connection from %s failed", transport.peer.remote)
        finally:
            transport.abort()

    async def _admitted(self, transport: Transport, admit: Callable[[], Awaitable[bool]]) -> bool:
        try:
            with trio.move_on_after(HANDSHAKE_S):
                return await admit()
        except ConnectionFailed as error:
            self._log.write("handshake with %s failed: %s", transport.peer.remote, error)
        return False
