"""Workspaces for the attempts of one node: fetched once a machine, a copy for each attempt.

Law: a tree is made by whoever first has its lock, and everybody else who waits for it finds it there. Who gives up
leaves the pieces that have come for the next one; so does a cut of the connection, a node that is killed, or a
controller that begins anew.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import evolve

from fray.errors import ChannelFull, FrayError, InvalidRequest
from fray.model.environment import INSIDE, WORKSPACE_NAME
from fray.model.ids import BlobId
from fray.model.messages.bundles import FetchBundle, FetchChunk
from fray.model.specs import AttemptSpec, JobSpec
from fray.model.workspace import Manifest, ManifestChunk, join_parts
from fray.net.codec import blob_id
from fray.node.launcher import RequestController
from fray.node.prepare import (
    NotPrepared,
    PreparedEnvironment,
    Preparer,
    Say,
)
from fray.node.workspaces.store import (
    TreeCorrupted,
    WorkspaceRetention,
    WorkspaceStore,
    remove,
)

PIECES_AT_ONCE = 4
TRIES = 3
LOCK_EVERY_S = 0.05
BUSY_S = 0.2
SWEEP_EVERY_S = 600.0
THREADS = 4

log = logging.getLogger("fray.node")


class WorkspaceFailed(Exception):
    """The workspace cannot be had here; the message is for the job's record."""


# Fetching ------------------------------------------------------------------------------------------------------------


class ChunkCache(Protocol):
    """Where what was fetched is kept until the tree is made."""

    async def has(self, blob: BlobId) -> bool: ...
    async def put(self, blob: BlobId, data: bytes) -> None: ...
    async def get(self, blob: BlobId) -> bytes: ...
    async def missing(self, manifest: Manifest) -> list[ManifestChunk]: ...


async def fetch(
    bundle: BlobId, request: RequestController, chunk_cache: ChunkCache, say: Say
) -> tuple[Manifest, Sequence[BlobId]]:
    """Have everything on the chunk_cache that the tree of this bundle lacks; its manifest, and the parts that this
    came in.

    Raises:
        FrayError: the controller does not have it, or the conversation has ended.
        OSError: the chunk_cache cannot take it.
    """
    state, _ = await request(FetchBundle(bundle=bundle))
    await _fetch_all(request, chunk_cache, [part for part in state.parts if not await chunk_cache.has(part)])
    manifest = join_parts(bundle, [await chunk_cache.get(part) for part in state.parts])
    missing = await chunk_cache.missing(manifest)
    if missing:
        size = sum(piece.size_bytes for piece in missing)
        say(f"workspace: fetching {size / 1e6:,.1f} of {manifest.size_bytes / 1e6:,.1f} MB")
        await _fetch_all(request, chunk_cache, [piece.blob for piece in missing])
    return manifest, state.parts


async def _fetch_all(request: RequestController, chunk_cache: ChunkCache, blobs: Sequence[BlobId]) -> None:
    left = iter(blobs)
    failure: Exception | None = None

    async def fetch_next() -> None:
        nonlocal failure
        try:
            for blob in left:
                await chunk_cache.put(blob, await _piece(request, blob))
        except (FrayError, OSError) as error:
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(min(PIECES_AT_ONCE, len(blobs))):
            nursery.start_soon(fetch_next)
    if failure is not None:
        raise failure


async def _piece(request: RequestController, blob: BlobId) -> bytes:
    while True:
        try:
            _, (data,) = await request(FetchChunk(chunk=blob))
        except ChannelFull:
            await trio.sleep(BUSY_S)
            continue
        if blob_id(data) != blob:
            raise InvalidRequest(f"the piece {blob} of a workspace came damaged from the controller")
        return bytes(data)


# On this machine -----------------------------------------------------------------------------------------------------


class _StoreFromThreads:
    """`Trees` as a chunk_cache, from threads."""

    def __init__(self, trees: WorkspaceStore, limiter: trio.CapacityLimiter) -> None:
        self.trees, self._limiter = trees, limiter

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)

    async def has(self, blob: BlobId) -> bool:
        return bool(await self.run(self.trees.has_piece, blob))

    async def put(self, blob: BlobId, data: bytes) -> None:
        await self.run(self.trees.put_piece, blob, data)

    async def get(self, blob: BlobId) -> bytes:
        data: bytes = await self.run(self.trees.piece, blob)
        return data

    async def missing(self, manifest: Manifest) -> list[ManifestChunk]:
        found: list[ManifestChunk] = await self.run(self.trees.missing, manifest)
        return found


class Workspaces:
    """All workspaces of this machine, as one of its nodes uses them.

    Args:
        root: of the store, shared by all nodes of this machine and user.
        request: how the controller is asked; None until the node has joined.
    """

    def __init__(
        self, root: Path, request: RequestController, boot_id: str = "", kept: WorkspaceRetention | None = None
    ) -> None:
        self._trees, self._request, self._kept = WorkspaceStore(root, boot_id), request, kept or WorkspaceRetention()
        self._disk = _StoreFromThreads(self._trees, trio.CapacityLimiter(THREADS))
        self._turns: dict[BlobId, trio.Lock] = {}
        self._is_open = False
        self._swept_at = float("-inf")

    @asynccontextmanager
    async def use(self, bundle: BlobId, say: Say = lambda line: None) -> AsyncIterator[Path]:
        """The bundle's tree, ready, whole, read-only, and not removed as long as this lasts.

        Raises:
            WorkspaceFailed: it cannot be had; the message says whose doing that is.
        """
        try:
            descriptor = await self._acquire(bundle, say)
        except (FrayError, TreeCorrupted) as error:
            raise WorkspaceFailed(f"the workspace cannot be fetched: {error}") from error
        except OSError as error:
            raise WorkspaceFailed(self._why(error)) from error
        try:
            yield self._trees.tree(bundle)
        finally:
            os.close(descriptor)

    async def ready(self, bundle: BlobId, say: Say = lambda line: None) -> Path:
        """The bundle's tree, for a moment's look; see `held`."""
        async with self.use(bundle, say) as tree:
            return tree

    async def copy_to(self, bundle: BlobId, into: Path, say: Say = lambda line: None) -> None:
        """A copy of the workspace at ``into`` (made here), which its attempt may write to.

        Raises:
            WorkspaceFailed: see `held`.
        """
        share = os.geteuid() != 0  # read-only files are no obstacle to root
        for _ in range(TRIES):
            async with self.use(bundle, say):
                try:
                    await self._disk.run(lambda: self._trees.copy(bundle, into, share=share))
                    return
                except TreeCorrupted as error:
                    say(f"workspace: {error}; it is made anew")
                except OSError as error:
                    raise WorkspaceFailed(self._why(error)) from error
            await self._discard_damaged(bundle, into)
        raise WorkspaceFailed(f"the workspace in {self._trees.root} is damaged again and again: who writes there?")

    def return_copy(self, bundle: BlobId, copy: Path) -> bool:
        """In a thread: an attempt has left its copy. False: it is not wanted, and still there."""
        return self._trees.return_copy(bundle, copy)

    async def _discard_damaged(self, bundle: BlobId, into: Path) -> None:
        await self._disk.run(remove, into)
        descriptor = await self._lock(bundle, fcntl.LOCK_EX)
        try:
            await self._disk.run(self._trees.discard_damaged, bundle)
        finally:
            os.close(descriptor)

    def _why(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the workspace does not fit on the disk of this machine: {self._trees.root} has no room left"
        return f"the workspace cannot be kept in {self._trees.root}: {error}"

    # Making it ready

    async def _acquire(self, bundle: BlobId, say: Say) -> int:
        """A shared lock on a tree that is there."""
        if not self._is_open:
            await self._disk.run(self._trees.open)
            self._is_open = True
        turn = self._turns.setdefault(bundle, trio.Lock())
        async with turn:
            for _ in range(TRIES):
                descriptor = await self._lock(bundle, fcntl.LOCK_SH)
                if self._trees.has(bundle):
                    return descriptor
                os.close(descriptor)
                await self._make_alone(bundle, say)
            if not turn.statistics().tasks_waiting:
                self._turns.pop(bundle, None)
        raise WorkspaceFailed("the workspace is removed as soon as it is there: is the limit of this machine too low?")

    async def _make_alone(self, bundle: BlobId, say: Say) -> None:
        descriptor = await self._lock(bundle, fcntl.LOCK_EX)
        try:
            if not self._trees.has(bundle):
                await self._make(bundle, say)
        finally:
            os.close(descriptor)

    async def _lock(self, bundle: BlobId, how: int) -> int:
        while True:  # nobody tells when a lock of the kernel's is free
            descriptor = self._trees.try_lock(bundle, how)
            if descriptor is not None:
                return descriptor
            await trio.sleep(LOCK_EVERY_S)

    async def _make(self, bundle: BlobId, say: Say) -> None:
        began = time.monotonic()
        await self._sweep()
        for last in (*[False] * (TRIES - 1), True):
            manifest, parts = await fetch(bundle, self._request, self._disk, say)
            try:
                await self._disk.run(self._trees.build, bundle, manifest, parts)
            except (FileNotFoundError, TreeCorrupted, InvalidRequest):
                if last:
                    raise
            else:
                say(f"workspace: {len(manifest.files):,} files ready after {time.monotonic() - began:.1f} s")
                return

    async def _sweep(self) -> None:
        """Before something is added; not more often than is good."""
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            removed = await self._disk.run(self._trees.sweep, self._kept)
            if removed:
                log.info("old workspaces were removed", extra={"trees": removed})


# Before a shim is asked for ----------------------------------------------------------------------------------------


def workspace_of(attempt_spec: AttemptSpec) -> Path | None:
    """Where an attempt's own copy of its workspace is, once `WorkspacePreparer` has begun what comes after it."""
    return Path(attempt_spec.directory, WORKSPACE_NAME) if attempt_spec.spec.environment.bundle is not None else None


class WorkspacePreparer:
    """A `fray.node.prepare.Preparer`: the workspace first, then whatever else is to be prepared."""

    def __init__(self, workspaces: Workspaces, then: Preparer) -> None:
        self.workspaces, self.then = workspaces, then

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        place = workspace_of(attempt_spec)
        if place is None:
            return await self.then.prepare(attempt_spec, say)
        try:
            await self.workspaces.copy_to(attempt_spec.spec.environment.bundle or "", place, say)
        except WorkspaceFailed as error:
            raise NotPrepared(str(error)) from error
        prepared = await self.then.prepare(attempt_spec, say)
        cwd, inside = paths_in(attempt_spec.spec, str(place))
        return evolve(prepared, cwd=cwd, sys_path=(*inside, *prepared.sys_path))

    def return_copy(self, attempt_spec: AttemptSpec) -> None:
        """In a thread, before the directory of an attempt is removed: its workspace may do for another."""
        place = workspace_of(attempt_spec)
        if place is not None and place.is_dir():
            self.workspaces.return_copy(attempt_spec.spec.environment.bundle or "", place)


# Paths in it ---------------------------------------------------------------------------------------------------------


def paths_in(spec: JobSpec, workspace: str) -> tuple[str | None, tuple[str, ...]]:
    """Where an attempt of this spec works, and what of its author's ``sys.path`` is in its workspace.

    The workspace itself is the last of those in it if the author had it not: its modules are found by name.
    """
    inside = tuple(_real(path, workspace) for path in spec.sys_path if path.startswith(INSIDE))
    cwd = _real(spec.cwd, workspace) if spec.cwd and spec.cwd.startswith(INSIDE) else spec.cwd
    return cwd, inside if workspace in inside else (*inside, workspace)


def _real(path: str, workspace: str) -> str:
    return f"{workspace}/{path.removeprefix(INSIDE)}".rstrip("/")
