"""What listens at the ports of simulated processes: it says whose port it is, and then whatever it is told."""

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
def echoing(truth: GroundTruth, here: Callable[[], str]) -> Iterator[None]:
    """Nodes that open a port reach the process that has it, by the book.

    Args:
        here: the machine of the running task.
    """

    async def open_port(host: str, port: int) -> HalfCloseableStream:
        await trio.lowlevel.checkpoint()
        for life in truth.on(here()):
            if port in life.ports:
                near, far = memory_stream_pair()
                trio.lowlevel.spawn_system_task(echo, life.attempt_id, far, context=copy_context())
                return near
        raise ConnectionRefusedError

    with mock.patch.object(fray.node.port_tunnels, "open_port", open_port):
        yield


async def echo(whose: str, stream: HalfCloseableStream) -> None:
    """One connection, until its other side has said all, or is gone."""
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(f"{whose}\n".encode())
        while data := await stream.receive_some():
            await stream.send_all(bytes(data))
        await stream.send_eof()
