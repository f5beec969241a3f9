"""Ports of jobs from afar, and jobs that leave others behind."""

from __future__ import annotations

from collections.abc import Mapping

import trio
from trio.testing import memory_stream_pair

from fray import ConnectionFailed, EndReason
from fray.model.messages.tunnels import OpenTunnel
from fray.net.tunnels.byte_stream import HalfCloseableStream
from fray.runtime.port_forward import carry_forward
from tests.simulation import workloads
from tests.simulation.operations.context import Act, OperationContext, launch
from tests.simulation.workloads import request

LEFT_S = 30.0


async def forwarded_port(b: OperationContext) -> str:
    """A connection to a port of a job reaches this job, and its bytes arrive complete and in order."""
    job = await launch(b, b.cluster, request(b.token, workloads.linger, b.token, 0.0, ports=("http",)))
    await job.wait_running()
    b.op("forward")
    said = b.rng.randbytes(b.rng.choice((0, 100, 300_000)))
    heard = await _talk(b, job.id, said)
    b.op("terminate")
    await job.terminate()
    b.doomed(b.token)
    b.saw(await job.wait_ended())
    whose, _, echo = heard.partition(b"\n")
    b.check("P4", whose.startswith(f"{job.id}:".encode()) or not heard, f"a port of {job.id} led to {whose!r}")
    b.check("P4", said.startswith(echo), f"{b.token} said {len(said)} bytes, and heard others")
    if not heard or echo != said:
        raise ConnectionFailed(f"a forward to {job.id} was cut after {len(heard)} bytes")
    return f"{len(echo)} bytes there and back"


async def _talk(b: OperationContext, job_id: str, said: bytes) -> bytes:
    """Forward a port as `fray forward` does, without a socket."""
    near, far = memory_stream_pair()
    heard = bytearray()

    async def carry() -> None:
        try:
            await carry_forward(b.cluster._runtime, OpenTunnel(to=job_id, port="http"), far)
        finally:
            await trio.aclose_forcefully(far)

    async with trio.open_nursery() as nursery, near:
        nursery.start_soon(carry)
        await _say(near, said)
        while data := await near.receive_some():
            heard += data
    return bytes(heard)


async def _say(stream: HalfCloseableStream, said: bytes) -> None:
    try:
        await stream.send_all(said)
        await stream.send_eof()
    except trio.BrokenResourceError:
        pass  # it was refused at once


async def whole_tree(b: OperationContext) -> str:
    """A job that leaves a detached job behind is ended: with ``tree`` that job ends too, without it continues."""
    job, left, tree = (
        await launch(b, b.cluster, request(b.token, workloads.leave, b.token, LEFT_S)),
        "",
        b.rng.random() < 0.6,
    )
    with trio.move_on_after(60):
        while not left:
            await trio.sleep(0.5)
            b.op("list")
            found = await b.cluster.list_jobs("*", prefix=f"{b.token}.left")
            left = found[0].job_id if found else ""
    b.op("terminate")
    await b.cluster.terminate(job, tree=tree)
    b.doomed(b.token)
    b.op("wait")
    b.saw(await job.wait_ended())
    if not left:
        return "left no job"
    info = await (await b.cluster.get_job(left)).wait_ended()
    b.saw(info)
    b.check("P2", tree or info.cause is not EndReason.STOPPED, f"{left} was detached, and ended with who launched it")
    if tree and info.cause is EndReason.SUCCEEDED:
        raise ConnectionFailed(f"the end of the tree of {job.id} came too late for {left}")
    return f"tree: {tree}, {info.cause}"


ACTS: Mapping[str, Act] = {"forwarded port": forwarded_port, "whole tree": whole_tree}
