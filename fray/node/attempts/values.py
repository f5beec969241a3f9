"""Large payloads and results of attempts, as files on the node's disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import trio
from attrs import evolve

from fray.errors import FrayError
from fray.model.ids import BlobId
from fray.model.messages.large_values import PART_BYTES
from fray.model.specs import EndReason, Outcome
from fray.net.large_values import WritePart, download, list_parts, upload
from fray.net.part_transfers import RequestController
from fray.net.transport import Bytes


async def fetch_to_file(request: RequestController, value: BlobId, path: str) -> None:
    """Fetch a value from the controller into a new file.

    Raises:
        FrayError: it cannot be had.
        OSError: it cannot be stored; no file is left then.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def allocate(size_bytes: int) -> WritePart:
        async def write(at: int, data: Bytes) -> None:
            # In a thread, as a disk that is busy must not hold up the node.
            await trio.to_thread.run_sync(_write_at, descriptor, data, at)

        return write

    try:
        await download(request, value, allocate)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: Bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


async def send_from_file(request: RequestController, outcome: Outcome, path: Path) -> Outcome:
    """Send a result to the controller; return the outcome with the result's name, or the failure to send it."""
    try:
        return await _send(request, outcome, path)
    except (FrayError, OSError) as error:
        # A result that cannot be delivered is a failure, as its author waits for it.
        message = f"the job ended, but its result of {outcome.value_bytes:,} bytes could not be sent: {error}"
        return evolve(outcome, cause=EndReason.FAILURE, message=message, value=None, value_bytes=0)


async def _send(request: RequestController, outcome: Outcome, path: Path) -> Outcome:
    size_bytes = outcome.value_bytes
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        value = await trio.to_thread.run_sync(lambda: list_parts(size_bytes, _pieces(descriptor, size_bytes)))

        async def read(at: int, size: int) -> bytes:
            return await trio.to_thread.run_sync(os.pread, descriptor, size, at)

        await upload(request, value, read)
    finally:
        os.close(descriptor)
    return evolve(outcome, value=value.name)


def _pieces(descriptor: int, size_bytes: int) -> Iterator[bytes]:
    return (os.pread(descriptor, PART_BYTES, at) for at in range(0, size_bytes, PART_BYTES))


async def send_from_memory(request: RequestController, outcome: Outcome, content: Bytes) -> Outcome:
    """Send a result of an attempt that ran in this process. As `send_from_file`."""
    view = memoryview(content)
    value = list_parts(len(view), (view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)))

    async def read(at: int, size: int) -> Bytes:
        return view[at : at + size]

    try:
        await upload(request, value, read)
    except FrayError as error:
        message = f"the job ended, but its result of {len(view):,} bytes could not be sent: {error}"
        return evolve(outcome, cause=EndReason.FAILURE, message=message, value=None, value_bytes=0)
    return evolve(outcome, value=value.name, value_bytes=len(view))
