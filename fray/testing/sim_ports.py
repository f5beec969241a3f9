"""Servers at the ports of simulated processes: they send the owner's name, and then echo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from unittest import mock

import trio
from trio.testing import memory_stream_pair

import fray.node.port_tunnels
from fray.net.tunnels.byte_stream import HalfCloseableStream
from fray.testing.ground_truth import GroundTruth


@contextmanager
def echoing(truth: GroundTruth, current_machine: Callable[[], str]) -> Iterator[None]:
    """Connect nodes that open a port to the process that has it by the ground truth.

    Args:
        current_machine: returns the machine of the running task.
    """

    async def open_port(host: str, port: int) -> HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        for process_run in truth.on(current_machine()):
            if port in process_run.ports:
                near, far = memory_stream_pair()
                trio.lowlevel.spawn_system_task(echo, process_run.attempt_id, far, context=copy_context())
                return near
        raise ConnectionRefusedError

    with mock.patch.object(fray.node.port_tunnels, "open_port", open_port):
        yield


async def echo(owner: str, stream: HalfCloseableStream) -> None:
    """Serve one connection until its other side ends or is lost."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(f"{owner}\n".encode())
        while data := await stream.receive_some():
            await stream.send_all(bytes(data))
        await stream.send_eof()
