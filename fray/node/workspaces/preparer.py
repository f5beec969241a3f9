"""Workspaces for the attempts of one node: fetched once per machine, a copy for each attempt.

Invariants: the first attempt that gets the lock of a tree builds it, and the others that wait for the lock find it
complete. Chunks that were fetched stay in the store when an attempt gives up, the connection breaks, the node is killed
or the controller restarts, so the next attempt continues from there.
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

from fray.errors import FrayError, InvalidRequest
from fray.model.environment import INSIDE, WORKSPACE_NAME
from fray.model.ids import BlobId
from fray.model.messages.bundles import FetchBundle, FetchChunk
from fray.model.specs import AttemptSpec, JobSpec
from fray.model.text import byte_size_text
from fray.model.workspace import Manifest, ManifestChunk, join_parts
from fray.net.codec import blob_id
from fray.net.part_transfers import RequestController, for_each_part, request_when_free
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

TRIES = 3
LOCK_EVERY_S = 0.05
SWEEP_EVERY_S = 600.0
THREADS = 4

log = logging.getLogger("fray.node")


class WorkspaceFailed(Exception):
    """The workspace cannot be provided on this machine; the message is for the job's record."""


# Fetching ------------------------------------------------------------------------------------------------------------


class ChunkCache(Protocol):
    """Storage of the fetched chunks until the tree is built."""

    async def has(self, blob: BlobId) -> bool: ...
    async def put(self, blob: BlobId, data: bytes) -> None: ...
    async def get(self, blob: BlobId) -> bytes: ...
    async def missing(self, manifest: Manifest) -> list[ManifestChunk]: ...


async def fetch(
    bundle: BlobId, request: RequestController, chunk_cache: ChunkCache, say: Say
) -> tuple[Manifest, Sequence[BlobId]]:
    """Fetch all chunks that the tree of this bundle lacks. Return its manifest, and the parts of the manifest.

    Raises:
        FrayError: the controller does not have the bundle, or the channel has ended.
        OSError: the chunks cannot be stored.
    """
    state, _ = await request(FetchBundle(bundle=bundle))
    # The manifest travels in parts, too: it may be larger than a message.
    await _fetch_all(request, chunk_cache, [part for part in state.parts if not await chunk_cache.has(part)])
    manifest = join_parts(bundle, [await chunk_cache.get(part) for part in state.parts])
    missing = await chunk_cache.missing(manifest)
    if missing:
        size = sum(chunk.size_bytes for chunk in missing)
        say(f"workspace: fetching {byte_size_text(size)} of {byte_size_text(manifest.size_bytes)}")
        await _fetch_all(request, chunk_cache, [chunk.blob for chunk in missing])
    return manifest, state.parts


async def _fetch_all(request: RequestController, chunk_cache: ChunkCache, blobs: Sequence[BlobId]) -> None:
    async def fetch_chunk(blob: BlobId) -> None:
        _, (data,) = await request_when_free(request, FetchChunk(chunk=blob))
        if blob_id(data) != blob:
            raise InvalidRequest(f"the chunk {blob} of a workspace arrived corrupted from the controller")
        await chunk_cache.put(blob, bytes(data))

    await for_each_part(fetch_chunk, blobs)


# On this machine -----------------------------------------------------------------------------------------------------


class _StoreFromThreads:
    """A `WorkspaceStore` as a `ChunkCache`, called in threads."""

    def __init__(self, trees: WorkspaceStore, limiter: trio.CapacityLimiter) -> None:
        self.trees, self._limiter = trees, limiter

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)

    async def has(self, blob: BlobId) -> bool:
        return bool(await self.run(self.trees.has_chunk, blob))

    async def put(self, blob: BlobId, data: bytes) -> None:
        await self.run(self.trees.put_chunk, blob, data)

    async def get(self, blob: BlobId) -> bytes:
        data: bytes = await self.run(self.trees.chunk, blob)
        return data

    async def missing(self, manifest: Manifest) -> list[ManifestChunk]:
        found: list[ManifestChunk] = await self.run(self.trees.missing, manifest)
        return found


class Workspaces:
    """The workspaces of this machine, as used by one of its nodes.

    Args:
        root: directory of the store, shared by all nodes of this machine and user.
        request: sends a request to the controller.
    """

    def __init__(
        self, root: Path, request: RequestController, boot_id: str = "", retention: WorkspaceRetention | None = None
    ) -> None:
        self._trees, self._request = WorkspaceStore(root, boot_id), request
        self._retention = retention or WorkspaceRetention()
        self._disk = _StoreFromThreads(self._trees, trio.CapacityLimiter(THREADS))
        self._turns: dict[BlobId, trio.Lock] = {}
        self._is_open = False
        self._swept_at = float("-inf")

    @asynccontextmanager
    async def use(self, bundle: BlobId, say: Say = lambda line: None) -> AsyncIterator[Path]:
        """Hold the bundle's tree: complete, read-only, and not removed inside the block.

        Raises:
            WorkspaceFailed: it cannot be provided; the message names the cause.
        """
        try:
            descriptor = await self._acquire(bundle, say)
        except (FrayError, TreeCorrupted) as error:
            raise WorkspaceFailed(f"the workspace cannot be fetched: {error}") from error
        except OSError as error:
            raise WorkspaceFailed(self._store_error_text(error)) from error
        try:
            yield self._trees.tree(bundle)
        finally:
            os.close(descriptor)

    async def ready(self, bundle: BlobId, say: Say = lambda line: None) -> Path:
        """Return the bundle's tree without holding it; see `use`."""
        async with self.use(bundle, say) as tree:
            return tree

    async def copy_to(
        self,
        bundle: BlobId,
        into: Path,
        say: Say = lambda line: None,
        *,
        user: str = "",
        is_reusable: bool = True,
    ) -> None:
        """Create the directory ``into`` with a copy of the workspace, to which an attempt of ``user`` may write.

        Args:
            is_reusable: `return_copy` may take it back.

        Raises:
            WorkspaceFailed: see `use`.
        """
        # Each attempt gets a copy (10,000 files: 0.3 s) and not links to the tree (0.1 s), to which it could write:
        # nodes often run as root, and other owners of a file can make it writable.
        for _ in range(TRIES):
            async with self.use(bundle, say):
                try:
                    await self._disk.run(lambda: self._trees.copy(bundle, into, user, is_reusable=is_reusable))
                    return
                except TreeCorrupted as error:
                    say(f"workspace: {error}; building it again")
                except OSError as error:
                    raise WorkspaceFailed(self._store_error_text(error)) from error
            await self._discard_damaged(bundle, into)
        raise WorkspaceFailed(
            f"the workspace in {self._trees.root} was modified {TRIES} times: another process writes there"
        )

    def return_copy(self, bundle: BlobId, copy: Path, user: str = "") -> bool:
        """Give the copy of an ended attempt of ``user`` to the store. Return whether the store took it. Blocks."""
        return self._trees.return_copy(bundle, copy, user)

    async def _discard_damaged(self, bundle: BlobId, into: Path) -> None:
        await self._disk.run(remove, into)
        descriptor = await self._lock(bundle, fcntl.LOCK_EX)
        try:
            await self._disk.run(self._trees.discard_damaged, bundle)
        finally:
            os.close(descriptor)

    def _store_error_text(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full: no space left for the workspace in {self._trees.root}"
        return f"cannot store the workspace in {self._trees.root}: {error}"

    # Building trees

    async def _acquire(self, bundle: BlobId, say: Say) -> int:
        """Return a shared lock on the tree, which exists then."""
        if not self._is_open:
            await self._disk.run(self._trees.open)
            self._is_open = True
        # One attempt of this node polls the file lock, and the others wait here in order.
        turn = self._turns.setdefault(bundle, trio.Lock())
        async with turn:
            try:
                for _ in range(TRIES):
                    descriptor = await self._lock(bundle, fcntl.LOCK_SH)
                    if self._trees.has(bundle):
                        return descriptor
                    os.close(descriptor)
                    # A lock cannot be upgraded without a moment in which another process gets it; hence the loop.
                    await self._build_locked(bundle, say)
            finally:
                if not turn.statistics().tasks_waiting:
                    del self._turns[bundle]
        raise WorkspaceFailed("the workspace is evicted as soon as it is built: the machine's limit may be too low")

    async def _build_locked(self, bundle: BlobId, say: Say) -> None:
        descriptor = await self._lock(bundle, fcntl.LOCK_EX)
        try:
            if not self._trees.has(bundle):
                await self._build(bundle, say)
        finally:
            os.close(descriptor)

    async def _lock(self, bundle: BlobId, how: int) -> int:
        while True:  # polled: there is no notification for a flock that becomes free, and waiting would need a thread
            descriptor = self._trees.try_lock(bundle, how)
            if descriptor is not None:
                return descriptor
            await trio.sleep(LOCK_EVERY_S)

    async def _build(self, bundle: BlobId, say: Say) -> None:
        began = time.monotonic()
        await self._sweep()
        for last in (*[False] * (TRIES - 1), True):
            manifest, parts = await fetch(bundle, self._request, self._disk, say)
            try:
                await self._disk.run(self._trees.build, bundle, manifest, parts)
            except (FileNotFoundError, TreeCorrupted, InvalidRequest):
                # A chunk was removed by another node's sweep, or damaged on disk: what is missing now is fetched again.
                if last:
                    raise
            else:
                say(f"workspace: {len(manifest.files):,} files ready after {time.monotonic() - began:.1f} s")
                return

    async def _sweep(self) -> None:
        """Remove old workspaces, at most every `SWEEP_EVERY_S`."""
        if time.monotonic() - self._swept_at > SWEEP_EVERY_S:
            self._swept_at = time.monotonic()
            removed = await self._disk.run(self._trees.sweep, self._retention)
            if removed:
                log.info("removed old workspaces", extra={"trees": removed})


# Preparing an attempt ------------------------------------------------------------------------------------------------


def workspace_of(attempt_spec: AttemptSpec) -> Path | None:
    """Return the directory of an attempt's own copy of its workspace, None if its job has none."""
    return Path(attempt_spec.directory, WORKSPACE_NAME) if attempt_spec.spec.environment.bundle is not None else None


class WorkspacePreparer:
    """A `fray.node.prepare.Preparer` that prepares the workspace, then calls another one for the rest."""

    def __init__(self, workspaces: Workspaces, then: Preparer) -> None:
        self.workspaces, self.then = workspaces, then

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        place = workspace_of(attempt_spec)
        if place is None:
            return await self.then.prepare(attempt_spec, say)
        try:
            spec = attempt_spec.spec
            # Other processes of an account may still write to a copy that is taken back.
            mine = attempt_spec.account is None
            bundle = spec.environment.bundle or ""
            await self.workspaces.copy_to(bundle, place, say, user=spec.user, is_reusable=mine)
        except WorkspaceFailed as error:
            raise NotPrepared(str(error)) from error
        prepared = await self.then.prepare(attempt_spec, say)
        cwd, inside = paths_in(attempt_spec.spec, str(place))
        return evolve(prepared, cwd=cwd, sys_path=(*inside, *prepared.sys_path))

    def return_copy(self, attempt_spec: AttemptSpec) -> None:
        """Keep the workspace of an ended attempt for another one. Call it in a thread, before the attempt's directory
        is removed."""
        place = workspace_of(attempt_spec)
        if place is not None and attempt_spec.account is None and place.is_dir():
            spec = attempt_spec.spec
            self.workspaces.return_copy(spec.environment.bundle or "", place, spec.user)


# Paths in a workspace ------------------------------------------------------------------------------------------------


def paths_in(spec: JobSpec, workspace: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the working directory of an attempt, and the entries of ``sys.path`` in its workspace.

    The workspace itself is the last entry if the driver's ``sys.path`` did not contain it, so that its modules are
    found by name.
    """
    inside = tuple(_resolve(path, workspace) for path in spec.sys_path if path.startswith(INSIDE))
    cwd = _resolve(spec.cwd, workspace) if spec.cwd and spec.cwd.startswith(INSIDE) else spec.cwd
    return cwd, inside if workspace in inside else (*inside, workspace)


def _resolve(path: str, workspace: str) -> str:
    return f"{workspace}/{path.removeprefix(INSIDE)}".rstrip("/")
