"""A port of a job, as a port of the driver's machine: real sockets, real processes, by way of the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import http_services
import pytest
import trio

import fray
from fray import Entrypoint, InvalidRequest, JobFailed, JobRequest, ResourceConfig

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="256MB")


@asynccontextmanager
async def forwarded(fn: Callable[[], Any], **more: Any) -> AsyncIterator[tuple[fray.Job, int]]:
    """A job that runs ``fn``, and the port here that leads to its port ``echo``."""
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster, cluster.open_scope("s") as scope:
        request = JobRequest(
            name="server", entrypoint=Entrypoint.from_callable(fn), resources=SMALL, ports=["echo"], **more
        )
        job = await scope.launch(request, on_failure="absorb")
        async with fray.open_forward(job, "echo") as address:
            host, _, port = address.rpartition(":")
            assert host == "127.0.0.1"
            yield job, int(port)
        await job.terminate()


async def connect(port: int, say: bytes = b"?", hear: bytes = b"?") -> trio.SocketStream:
    """Once the job listens: until then connections are reset."""
    while True:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        try:
            await stream.send_all(say)
            assert await stream.receive_some(1) == hear
        except trio.BrokenResourceError:
            await trio.sleep(0.01)
        else:
            return stream


async def read_all(stream: trio.SocketStream) -> bytes:
    data = bytearray()
    async for chunk in stream:
        data += chunk
    return bytes(data)


async def test_a_server_in_a_job_is_reached_from_the_driver_in_full_and_connections_end_alike() -> None:
    async with forwarded(http_services.echo_server) as (job, port):
        with trio.fail_after(20):
            assert job.info.ports["echo"] == await job.wait_port("echo")
            stream = await connect(port)
            data = bytes(range(256)) * 20_000

            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    await stream.send_all(data)
                    await stream.send_eof()

                nursery.start_soon(send)
                assert await read_all(stream) == data + b"goodbye"

            streams = [await connect(port) for _ in range(50)]
            for number, each in enumerate(streams):
                await each.send_all(b"%d" % number)
            for number, each in enumerate(streams):
                await each.send_eof()
                assert await read_all(each) == b"%dgoodbye" % number
            await stream.aclose()
            with pytest.raises(InvalidRequest, match=r"no port 'web' .*: request it with JobRequest"):
                await job.wait_port("web")


async def test_a_reader_that_does_not_read_holds_up_its_writer_and_the_end_of_the_job_cuts_the_connection() -> None:
    async with forwarded(http_services.silent_server) as (job, port):
        with trio.fail_after(20):
            stream = await connect(port, b"", b"!")
            sent = 0
            with trio.CancelScope() as scope:
                while not scope.cancel_called:
                    scope.deadline = trio.current_time() + 0.5
                    await stream.send_all(bytes(65536))
                    sent += 65536
            assert sent < 64 * 1024 * 1024
            await job.terminate()
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some(1)
            await job.wait_ended()
            with pytest.raises(OSError, match=r"failed to connect|all attempts"):
                while True:
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            with pytest.raises(JobFailed):
                async with fray.open_forward(job, "echo"):
                    pass
