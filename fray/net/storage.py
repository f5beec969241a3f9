"""Files in a storage supported by fsspec: ``file:///shared/ckpt``, ``gs://bucket/ckpt``, and many more.

The only module that imports fsspec, which is an optional dependency, and that waits for it: in worker threads, because
its file systems block.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import trio

from fray.errors import InvalidRequest


async def write(location: str, data: bytes) -> None:
    """Write a file and its directories; raises what the storage raises."""
    await trio.to_thread.run_sync(partial(write_now, location, data))


async def read(location: str) -> bytes:
    """Read a file; raises what the storage raises."""
    return await trio.to_thread.run_sync(partial(read_now, location))


async def delete(location: str) -> None:
    """Remove a file, if it exists."""
    # Abandoned when cancelled: the end of a process waits for a storage only so long.
    await trio.to_thread.run_sync(partial(_delete, location), abandon_on_cancel=True)


def _filesystem(location: str) -> tuple[Any, str]:
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidRequest(
            f"{location!r} needs fsspec, which is not installed here: pip install 'fray[storage]'"
        ) from error
    filesystem, path = fsspec.core.url_to_fs(location)
    return filesystem, path


def write_now(location: str, data: bytes) -> None:
    """Write a file in this thread; see `write`."""
    write_parts_now(location, [data])


def write_parts_now(location: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write the concatenation of these parts, in this thread."""
    filesystem, path = _filesystem(location)
    # Does nothing on object stores, which have no directories.
    filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
    with filesystem.open(path, "wb") as file:
        for part in parts:
            file.write(part)


def read_now(location: str) -> bytes:
    """Read a file in this thread; see `read`."""
    filesystem, path = _filesystem(location)
    with filesystem.open(path, "rb") as file:
        data: bytes = file.read()
    return data


def _delete(location: str) -> None:
    filesystem, path = _filesystem(location)
    if filesystem.exists(path):
        filesystem.rm(path)
