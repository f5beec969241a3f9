"""Sending workspaces ahead of the jobs that name them.

A spec that was just built names a directory (`UNSENT`); before it leaves, the directory becomes a bundle, the
controller is sent what it lacks of it, and ``cwd`` and ``sys_path`` are written as paths in the workspace.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath
from typing import Protocol

import trio
from attrs import evolve, frozen

from fray.errors import ChannelFull, FrayError, InvalidRequest
from fray.model.environment import INSIDE, UNSENT
from fray.model.ids import BlobId
from fray.model.messages.bundles import BundleState, OfferBundle, PutChunk
from fray.model.specs import JobSpec
from fray.runtime.controller_client.client import ControllerClient
from fray.runtime.runtime import Runtime
from fray.runtime.workspaces.bundle import (
    Bundle,
    FileChanged,
    ScanCache,
    cache_directory,
    load_cache,
    read_chunk,
    save_cache,
    scan,
)
from fray.runtime.workspaces.files import Limits

PIECES_AT_ONCE = 4
"""On their way to the controller; about 2 MB, behind which other words wait."""
ROUNDS = 8
"""How often the controller may say that it lacks something."""
TRIES = 3
"""How often a workspace that changes under way is begun anew."""
BUSY_S = 0.2
"""How long to wait when the controller has too many pieces to write."""


class BundleSource(Protocol):
    """A bundle that can be read."""

    @property
    def bundle(self) -> BlobId: ...
    @property
    def parts(self) -> Sequence[BlobId]: ...
    @property
    def size_bytes(self) -> int: ...
    async def read(self, blob: BlobId) -> bytes:
        """A piece, or a part of the manifest. Raises Changed."""


Find = Callable[[str], Awaitable[BundleSource]]


@frozen
class DirectorySource:
    """The bundle of a directory of this machine."""

    cache: ScanCache
    scanned: Bundle

    @property
    def bundle(self) -> BlobId:
        return self.scanned.bundle

    @property
    def parts(self) -> Sequence[BlobId]:
        return tuple(self.scanned.parts)

    @property
    def size_bytes(self) -> int:
        return self.scanned.size_bytes

    async def read(self, blob: BlobId) -> bytes:
        return await trio.to_thread.run_sync(read_chunk, self.cache, self.scanned, blob)


_books: dict[str, ScanCache] = {}


async def find_directory(path: str) -> BundleSource:
    """The bundle of a directory as it is now; see `fray.runtime.workspaces.bundle.scan`."""
    return await trio.to_thread.run_sync(_find, path)


def _find(path: str) -> DirectorySource:
    root = os.path.realpath(path)
    book = _books.get(root)
    if book is None:
        book = _books.setdefault(root, load_cache(root, cache_directory()))
    bundle = scan(book, Limits.of(os.environ))
    save_cache(book, cache_directory())
    return DirectorySource(book, bundle)


# Specs ---------------------------------------------------------------------------------------------------------------


async def bundle_workspaces(runtime: Runtime, specs: Sequence[JobSpec]) -> list[JobSpec]:
    """The specs as they leave: each with the bundle of its workspace, which the controller has now.

    A job whose environment names no workspace has its parent's. In a cluster that runs jobs in place nothing travels.

    Raises:
        InvalidRequest: a workspace cannot travel.
        StoreError: the controller has no room for it.
    """
    await runtime.link.ready.wait()
    controller = runtime.link.controller
    in_place = controller is not None and controller.in_place
    sent: dict[str, BlobId] = {}
    done = []
    for spec in specs:
        named = spec.environment.bundle or ""
        root = named.removeprefix(UNSENT)
        if in_place:
            spec = evolve(spec, environment=evolve(spec.environment, bundle=None))
        elif root != named:
            if root not in sent:
                sent[root] = await send(runtime.link, root, runtime.find_workspace or find_directory)
            spec = set_workspace(spec, sent[root], root)
        elif runtime.bundle and spec.environment.bundle in (None, runtime.bundle):
            spec = set_workspace(spec, runtime.bundle, runtime.workspace)
        done.append(spec)
    return done


def set_workspace(spec: JobSpec, bundle: BlobId, root: str) -> JobSpec:
    """The spec with paths below ``root`` written as paths in the workspace; it works there if nowhere else."""
    return evolve(
        spec,
        environment=evolve(spec.environment, bundle=bundle),
        cwd=workspace_path(spec.cwd or root, root) or INSIDE,
        sys_path=tuple(workspace_path(os.path.realpath(path), root) or path for path in spec.sys_path),
    )


def workspace_path(path: str, root: str) -> str | None:
    """``workspace://src`` of a path below the root; None for others."""
    here = PurePosixPath(path)
    if not here.is_relative_to(root):
        return None
    below = here.relative_to(root).as_posix()
    return INSIDE + ("" if below == "." else below)


# The way -------------------------------------------------------------------------------------------------------------


async def send(link: ControllerClient, path: str, find: Find) -> BlobId:
    """Make sure that the controller has the workspace as it is now; returns its bundle.

    Raises:
        InvalidRequest, StoreError: it cannot.
        ConnectionFailed: the conversation has ended.
    """
    for _ in range(TRIES):
        source = await find(path)
        try:
            await _send(link, source)
        except FileChanged as error:
            changed = error
        else:
            return source.bundle
    raise InvalidRequest(f"{changed} in the workspace {path} changes while it is sent: launch when it is still")


async def _send(link: ControllerClient, source: BundleSource) -> None:
    offer = OfferBundle(bundle=source.bundle, parts=tuple(source.parts), size_bytes=source.size_bytes)
    for _ in range(ROUNDS):
        state: BundleState = await link.request(offer)
        if state.complete:
            return
        await _put_all(link, source, state.missing)
    raise FrayError(f"the controller does not get bundle {source.bundle} together: its log may say why")


async def _put_all(link: ControllerClient, source: BundleSource, lacks: Sequence[BlobId]) -> None:
    left = iter(lacks)
    failure: Exception | None = None

    async def put_some() -> None:
        nonlocal failure
        try:
            for blob in left:
                await _put(link, blob, await source.read(blob))
        except (FrayError, FileChanged) as error:
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(PIECES_AT_ONCE):
            nursery.start_soon(put_some)
    if failure is not None:
        raise failure


async def _put(link: ControllerClient, blob: BlobId, data: bytes) -> None:
    while True:
        try:
            await link.request(PutChunk(chunk=blob), [data])
            return
        except ChannelFull:
            await trio.sleep(BUSY_S)
