"""``fray exec``: a command in the environment of a job, on this terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator

import trio
from attrs import Factory, define

from fray.api.cluster import Cluster
from fray.cli.live.terminal import is_terminal, raw_keyboard
from fray.cli.main import PIPE_CLOSED
from fray.cli.output import say_json
from fray.cli.target import find_running
from fray.errors import ConnectionFailed
from fray.model.ids import JobId
from fray.model.messages.command_frames import FrameKind, FrameReader, data_frame, number_frame, number_of, size_frame
from fray.model.messages.tunnels import OpenTunnel, RunCommand
from fray.net.tunnels.byte_stream import ByteStreamTunnel
from fray.runtime.runtime import current

READ_BYTES = 64 * 1024
FRAMES_AHEAD = 4
"""Frames of input that may wait for the connection."""


async def run_command(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray exec``."""
    info = await find_running(cluster, options, "commands run in running jobs only")
    has_terminal = is_terminal() and not options.no_terminal and not options.json
    size = shutil.get_terminal_size() if has_terminal else os.terminal_size((0, 0))
    command = RunCommand(
        job=info.job_id,
        member=options.member,
        argv=tuple(options.command),
        terminal=has_terminal,
        rows=size.lines,
        columns=size.columns,
        term=os.environ.get("TERM", ""),
    )
    session = _CommandSession(has_terminal, keeps_output=options.json)
    with raw_keyboard() if has_terminal else contextlib.nullcontext():
        code = await session.run(command)
    if options.json:
        out, error = session.kept_text()
        say_json({"job_id": info.job_id, "member": options.member, "exit_code": code, "out": out, "err": error})
    return code


async def run_recorder(job: JobId, seconds: int) -> tuple[int, str, str]:
    """Record the native stacks of a job; return the exit code, the output and the errors of py-spy.

    Ctrl-C is sent to py-spy, which writes what it has; a second one ends it. Raises FrayError: see `OpenTunnel`.
    """
    session = _CommandSession(has_terminal=False, keeps_output=True, has_input=False)
    code = await session.run(RunCommand(job=job, argv=("py-spy", "record"), record_s=seconds))
    return code, *session.kept_text()


@contextlib.asynccontextmanager
async def _open(command: RunCommand) -> AsyncIterator[ByteStreamTunnel]:
    """Start the command. Raises FrayError: see `OpenTunnel`."""
    tunnel, tunnels = ByteStreamTunnel(), current().client.tunnels
    assert tunnels is not None
    try:
        await tunnels.open_pipe(OpenTunnel(to=command.job, command=command), tunnel)
        await tunnel.wait_accepted()
        yield tunnel
    finally:
        tunnel.refuse(ConnectionFailed("the command line has ended"))


def _kept() -> dict[FrameKind, bytearray]:
    return {FrameKind.OUTPUT: bytearray(), FrameKind.ERROR: bytearray()}


@define(eq=False)
class _CommandSession:
    """Connection to a command: the stream that the tunnel carries (`HalfCloseableStream`)."""

    has_terminal: bool
    keeps_output: bool
    has_input: bool = True
    code: int | None = None
    """Exit code; None until the command has ended."""
    kept: dict[FrameKind, bytearray] = Factory(_kept)
    _reader: FrameReader = Factory(FrameReader)
    _out: trio.MemorySendChannel[bytes] | None = None
    _frames: trio.MemoryReceiveChannel[bytes] | None = None

    async def run(self, command: RunCommand) -> int:
        """Run a command until it has ended; return its exit code.

        Raises:
            ConnectionFailed: the connection is lost.
            FrayError: as `OpenTunnel`.
        """
        self._out, self._frames = trio.open_memory_channel[bytes](FRAMES_AHEAD)
        async with _open(command) as tunnel, trio.open_nursery() as nursery:
            nursery.start_soon(self._read_input)
            nursery.start_soon(self._pass_signals, nursery.cancel_scope)
            await tunnel.carry(self)
            nursery.cancel_scope.cancel()
        if self.code is None:
            raise ConnectionFailed(f"the command was ended with its connection: {tunnel.error or 'the job has ended'}")
        return self.code

    def kept_text(self) -> tuple[str, str]:
        """Return what the command has written as output and as errors."""
        out, error = (self.kept[kind].decode("utf-8", "replace") for kind in (FrameKind.OUTPUT, FrameKind.ERROR))
        return out, error

    async def _read_input(self) -> None:
        if not self.has_input:
            await self._send(data_frame(FrameKind.INPUT, b""))
            return
        while True:
            # In a thread, which is left behind at the end: standard input may be a file, or what cannot be waited for.
            data = await trio.to_thread.run_sync(os.read, 0, READ_BYTES, abandon_on_cancel=True)
            await self._send(data_frame(FrameKind.INPUT, data))
            if not data:
                return

    async def _pass_signals(self, scope: trio.CancelScope) -> None:
        passed = (signal.SIGWINCH,) if self.has_terminal else (signal.SIGINT,)
        interrupts = 0
        with trio.open_signal_receiver(*passed, signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGWINCH:
                    size = shutil.get_terminal_size()
                    await self._send(size_frame(size.lines, size.columns))
                elif number == signal.SIGINT and not interrupts:
                    interrupts += 1
                    await self._send(number_frame(FrameKind.SIGNAL, number))
                else:
                    # What ends this command line ends the command; and so does a second Ctrl-C.
                    self.code = 128 + number
                    scope.cancel()

    async def _send(self, frame: bytes) -> None:
        assert self._out is not None
        with contextlib.suppress(trio.ClosedResourceError):  # the command has ended, and reads nothing more
            await self._out.send(frame)

    # The stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        assert self._frames is not None
        try:
            return await self._frames.receive()
        except trio.EndOfChannel:
            return b""

    async def send_all(self, data: bytes) -> None:
        for kind, content in self._reader.feed(data):
            if kind is FrameKind.EXIT:
                self.code = number_of(content)
                # The other side waits for this end.
                await self.aclose()
            elif self.keeps_output:
                self.kept[kind] += content
            else:
                await self._show(1 if kind is FrameKind.OUTPUT else 2, content)

    async def _show(self, descriptor: int, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                written = await trio.to_thread.run_sync(os.write, descriptor, rest, abandon_on_cancel=True)
                rest = rest[written:]
        except BrokenPipeError:
            self.code = PIPE_CLOSED
            raise

    async def send_eof(self) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._out is not None:
            self._out.close()
