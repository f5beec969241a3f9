"""Port forwarding: connections to a listener of this process, each carried to a port of a job.

They always go through the controller, also where the job's port could be dialed: one way that works everywhere, and no
port of a job's machine has to be reachable. Any end but an end of stream is a reset.
"""

from __future__ import annotations

import logging
from functools import partial

import trio

from fray.errors import ConnectionFailed, FrayError
from fray.model.messages.tunnels import OpenTunnel
from fray.net.tunnels.byte_stream import ByteStreamTunnel, HalfCloseableStream, reset_at_close
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.runtime import Runtime

DRAIN_S = 5.0
"""Seconds after the end of a job at which connections that its node has not ended are cut."""

log = logging.getLogger("fray.forward")


async def serve_forward(
    runtime: Runtime, record: JobRecord, message: OpenTunnel, listeners: list[trio.SocketListener]
) -> None:
    """Serve the listeners until the job has ended, and open connections until its node has delivered what it sent."""

    async def carry(stream: trio.SocketStream) -> None:
        await carry_forward(runtime, message, stream)

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.serve_listeners, carry, listeners, handler_nursery=connections))
            await record.ended.wait()
            nursery.cancel_scope.cancel()
        connections.cancel_scope.deadline = trio.current_time() + DRAIN_S


async def carry_forward(runtime: Runtime, message: OpenTunnel, stream: HalfCloseableStream) -> None:
    """Carry one connection until both sides have finished, or one of them is cut; close ``stream`` then."""
    tunnel = ByteStreamTunnel()
    assert runtime.client.tunnels is not None
    try:
        await runtime.client.tunnels.open_pipe(message, tunnel)
        await tunnel.wait_accepted()
    except FrayError as error:
        log.warning("a connection to port %r of %s was not carried: %s", message.port, message.to, error)
        reset_at_close(stream)
        return
    except BaseException as error:
        tunnel.refuse(ConnectionFailed("the listener has ended"))
        raise error
    await tunnel.carry(stream)
