"""Files in a storage supported by fsspec: ``file:///shared/ckpt``, ``gs://bucket/ckpt``, and many more.

The only module that imports fsspec, which is an optional dependency, and that waits for it: in worker threads, because
its file systems block.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from fray.errors import InvalidRequest

COPY_BYTES = 8 << 20
"""Bytes of a file that are copied at once."""


async def write(location: str, data: bytes) -> None:
    """Write a file and its directories; raises what the storage raises."""
    await trio.to_thread.run_sync(partial(write_now, location, data))


async def read(location: str) -> bytes:
    """Read a file; raises what the storage raises."""
    return await trio.to_thread.run_sync(partial(read_now, location))


async def delete(location: str) -> None:
    """Remove a file, if it exists."""
    # Abandoned when cancelled: the end of a process waits for a storage only so long.
    await trio.to_thread.run_sync(partial(remove_now, location, recursive=False), abandon_on_cancel=True)


def _filesystem(location: str) -> tuple[Any, str]:
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidRequest(
            f"{location!r} needs fsspec, which is not installed here: pip install 'fray[storage]'"
        ) from error
    try:
        filesystem, path = fsspec.core.url_to_fs(location)
    except ImportError as error:
        # Its text has the name of the package.
        raise InvalidRequest(f"{location!r} needs a package that is not installed here: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"invalid location {location!r}: {error}") from error
    return filesystem, path


def check(location: str) -> None:
    """Check that a storage can be used from here.

    Raises:
        InvalidRequest: a package that it needs is missing, or there is no storage of this protocol.
    """
    _filesystem(location)


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


def names_now(location: str) -> list[str]:
    """Return the names of the files and directories in a directory; none if there is no such directory."""
    filesystem, path = _filesystem(location)
    # Others write there, too.
    filesystem.invalidate_cache()
    try:
        found = [str(each).rstrip("/") for each in filesystem.ls(path, detail=False)]
    except FileNotFoundError:
        return []
    # Some storages have an entry for the directory itself.
    return sorted(each.rpartition("/")[2] for each in found if each.strip("/") != path.strip("/"))


def upload_file_now(file: Path, location: str) -> None:
    """Copy a file to a storage."""
    filesystem, path = _filesystem(location)
    filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
    with file.open("rb") as source, filesystem.open(path, "wb") as target:
        shutil.copyfileobj(source, target, COPY_BYTES)


def upload_now(directory: Path, location: str) -> None:
    """Copy the files of a directory, and of those in it, to a storage."""
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            upload_file_now(file, f"{location}/{file.relative_to(directory).as_posix()}")


def download_now(location: str, directory: Path) -> None:
    """Copy the files of a directory of a storage, and of those in it. Raises FileNotFoundError if there are none."""
    filesystem, path = _filesystem(location)
    filesystem.invalidate_cache()
    found = [str(each) for each in filesystem.find(path)]
    if not found:
        raise FileNotFoundError(f"there are no files at {location}")
    for each in found:
        file = directory / each.strip("/").removeprefix(path.strip("/")).lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        with filesystem.open(each, "rb") as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)


def remove_now(location: str, *, recursive: bool = True) -> None:
    """Remove a file or, if ``recursive``, a directory and all in it, if there is one."""
    filesystem, path = _filesystem(location)
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        filesystem.rm(path, recursive=recursive)
