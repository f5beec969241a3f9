"""Port forwarding: a port of a job as a port of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from fray.api.async_block import async_block
from fray.api.jobs.job import Job, job_id_of
from fray.errors import InvalidRequest
from fray.model.ids import JobId
from fray.model.messages.tunnels import OpenTunnel
from fray.model.specs import address_of
from fray.runtime.background import open_background_nursery
from fray.runtime.port_forward import serve_forward
from fray.runtime.runtime import current


@async_block("async with fray.open_forward(...) as address")
@asynccontextmanager
async def open_forward(
    job: Job | JobId, port: str, local_port: int = 0, *, member: int = 0, local_host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Listen on this machine, and forward each connection to a port of the job, wherever it runs.

    ``async with open_forward(job, "http") as address``: a browser on this machine reaches the job at that address.
    Connections are relayed by the controller, so only the controller must be reachable. While no process listens at the
    job's port (it is starting or restarting) connections are reset; when the job has ended, all are, and the local port
    is closed.

    Args:
        port: a name of the job's `JobRequest.ports`.
        local_port: port to listen on; default 0: a free one.
        member: rank of the gang member whose port it is.
        local_host: address to listen on. Beyond loopback, every process that
            reaches it can connect without a token.

    Raises:
        NoSuchJob: the cluster does not know it.
        InvalidRequest: it has no such port, or the local one cannot be listened on.
        JobFailed: it has ended.
    """
    runtime = current()
    (record,) = await runtime.client.jobs.watch([job_id_of(job)])
    await Job(runtime, record).wait_port(port, member)
    try:
        listeners = await trio.open_tcp_listeners(local_port, host=local_host)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {local_host}:{local_port}: {error.strerror}") from None
    message = OpenTunnel(to=record.info.job_id, port=port, member=member)
    async with open_background_nursery() as nursery:
        nursery.start_soon(serve_forward, runtime, record, message, listeners)
        yield address_of(local_host, listeners[0].socket.getsockname()[1])
