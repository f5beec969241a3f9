"""Tunnels from the controller to ports of jobs on this machine, and to commands that run in their environment.

They end with their attempt, and with the channel that carries them. What an attempt that has succeeded has sent last is
still delivered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import trio

from fray.errors import ChannelFull, ConnectionFailed, FrayError, Refused
from fray.model.ids import AttemptId
from fray.model.messages.tunnels import OpenTunnel, RunCommand
from fray.model.specs import DesiredAttempt
from fray.net.channel.public import Channel
from fray.net.codec import Bytes
from fray.net.tunnels.byte_stream import ByteStreamTunnel, HalfCloseableStream
from fray.net.tunnels.multiplexer import TunnelFlow, TunnelMultiplexer

CONNECT_S = 5.0
LINGER_S = 1.0
"""Seconds that the tunnels of an attempt that has succeeded have to deliver what it sent before its end."""
OpenPort = Callable[[str, int], Awaitable[HalfCloseableStream]]
StartCommand = Callable[[AttemptId, RunCommand], Awaitable[HalfCloseableStream]]


async def open_port(host: str, port: int) -> HalfCloseableStream:
    """Connect to a port of this machine: on loopback, then on the host's address.

    Raises:
        OSError: nothing listens.
    """
    error: OSError = ConnectionRefusedError()
    # Loopback first, since most servers listen on every address; the host's own for those that bind only that one.
    for address in dict.fromkeys(("127.0.0.1", "::1", host)):
        try:
            return await trio.open_tcp_stream(address, port)
        except OSError as reason:
            error = reason
    raise error


class PortTunnels:
    """Tunnels of one membership.

    Args:
        desired_attempts: returns the desired attempts of this node.
        host: returns the name of this machine for others.
        start_command: starts a command in the environment of an attempt; raises FrayError.
        connect: opens connections; default: `open_port`.
    """

    def __init__(
        self,
        desired_attempts: Callable[[], Mapping[AttemptId, DesiredAttempt]],
        host: Callable[[], str],
        start_command: StartCommand,
        connect: OpenPort | None = None,
    ) -> None:
        self._desired, self._host, self._connect = desired_attempts, host, connect or open_port
        self._start_command = start_command
        self._multiplexer: TunnelMultiplexer | None = None
        self._nursery: trio.Nursery | None = None
        self.open: dict[AttemptId, dict[ByteStreamTunnel, None]] = {}
        """Open tunnels by attempt; none of an attempt without."""

    def __repr__(self) -> str:
        return f"<PortTunnels: {sum(map(len, self.open.values()))} open>"

    async def run(self) -> None:
        """Carry connections until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    def attach(self, channel: Channel) -> None:
        self._multiplexer = TunnelMultiplexer(channel, dialed=True, on_open=self._on_open)

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> bool:
        """See `TunnelMultiplexer.on_frame`."""
        return self._multiplexer is not None and self._multiplexer.on_frame(kind, flags, target, ref, body)

    def on_lost(self, why: str) -> None:
        """End all tunnels: the controller does not know them."""
        if self._multiplexer is not None:
            self._multiplexer.on_lost(ConnectionFailed(why))

    def end(self, attempt_id: AttemptId, *, linger: bool) -> None:
        """End the tunnels of an attempt that has ended: after `LINGER_S` if they are to ``linger``, else at once."""
        if linger and self._nursery is not None:
            self._nursery.start_soon(self._end_later, attempt_id, list(self.open.get(attempt_id, ())))
        else:
            self._refuse(attempt_id, list(self.open.get(attempt_id, ())))

    async def _end_later(self, attempt_id: AttemptId, tunnels: list[ByteStreamTunnel]) -> None:
        # Bytes that a server writes right before it exits are still in the kernel's buffers and on their way.
        await trio.sleep(LINGER_S)
        # Most have ended by themselves meanwhile.
        self._refuse(attempt_id, [tunnel for tunnel in tunnels if tunnel in self.open.get(attempt_id, ())])

    def _refuse(self, attempt_id: AttemptId, tunnels: list[ByteStreamTunnel]) -> None:
        for tunnel in tunnels:
            tunnel.refuse(ConnectionFailed(f"{attempt_id} has ended"))

    def _on_open(self, flow: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> ByteStreamTunnel:
        desired = self._desired().get(message.to)
        # So a request reaches only ports that were assigned to this attempt, and no other service of the machine.
        if desired is None or (message.command is None and message.port not in desired.ports):
            raise Refused(f"{message.to} has no port {message.port!r} on this machine")
        if self._nursery is None:
            raise ChannelFull("this node is starting or shutting down; retry later")
        tunnel = ByteStreamTunnel()
        tunnel.begin(flow)
        self.open.setdefault(message.to, {})[tunnel] = None
        # The handler of a channel must not wait, so the connection is made in a task.
        self._nursery.start_soon(self._serve_tunnel, message, desired.ports.get(message.port, 0), tunnel)
        return tunnel

    async def _serve_tunnel(self, message: OpenTunnel, port: int, tunnel: ByteStreamTunnel) -> None:
        try:
            # Servers bind their port some time after the start of their job, so a refusal here is expected; clients try
            # again.
            if message.command is not None:
                stream = await self._start_command(message.to, message.command)
            else:
                stream = await self._connect_to_port(message, port)
            # The client may have reset it while the connection was made.
            if tunnel.error is None:
                tunnel.accept()
            await tunnel.carry(stream)
        except FrayError as error:
            tunnel.refuse(error)
        finally:
            open_tunnels = self.open[message.to]
            del open_tunnels[tunnel]
            if not open_tunnels:
                del self.open[message.to]

    async def _connect_to_port(self, message: OpenTunnel, port: int) -> HalfCloseableStream:
        with trio.move_on_after(CONNECT_S):
            try:
                return await self._connect(self._host(), port)
            except OSError:
                raise Refused(
                    f"connection refused: nothing is listening on port {message.port!r} ({port}) of {message.to} yet"
                ) from None
        raise Refused(f"port {message.port!r} ({port}) of {message.to} does not answer")
