"""Upload of workspaces to the controller, before the jobs that use them are launched.

A new spec names a directory (`UNSENT`). Before the spec is sent, the directory becomes a bundle, the controller gets
the chunks it lacks, and ``cwd`` and ``sys_path`` are rewritten as paths in the workspace.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath
from typing import Protocol

import trio
from attrs import evolve, frozen

from fray.errors import InvalidRequest
from fray.model.environment import INSIDE, UNSENT
from fray.model.ids import BlobId
from fray.model.messages.bundles import OfferBundle
from fray.model.specs import JobSpec
from fray.net.part_transfers import send_missing
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

TRIES = 3
"""Maximum number of times the upload of a workspace that changes meanwhile is restarted."""


class BundleSource(Protocol):
    """Interface of a bundle whose chunks can be read."""

    @property
    def bundle(self) -> BlobId: ...
    @property
    def parts(self) -> Sequence[BlobId]: ...
    @property
    def size_bytes(self) -> int: ...
    async def read(self, blob: BlobId) -> bytes:
        """Read a chunk, or a part of the manifest. Raises FileChanged."""


Find = Callable[[str], Awaitable[BundleSource]]


@frozen
class DirectorySource:
    """Bundle of a directory of this machine."""

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


_caches: dict[str, ScanCache] = {}


async def find_directory(path: str) -> BundleSource:
    """Return the bundle of a directory as it is now; see `fray.runtime.workspaces.bundle.scan`."""
    return await trio.to_thread.run_sync(_find, path)


def _find(path: str) -> DirectorySource:
    root = os.path.realpath(path)
    cache = _caches.get(root)
    if cache is None:
        # Threads may scan the same directory at once; they share the cache and its lock.
        cache = _caches.setdefault(root, load_cache(root, cache_directory()))
    bundle = scan(cache, Limits.of(os.environ))
    save_cache(cache, cache_directory())
    return DirectorySource(cache, bundle)


# Specs ---------------------------------------------------------------------------------------------------------------


async def bundle_workspaces(runtime: Runtime, specs: Sequence[JobSpec]) -> list[JobSpec]:
    """Upload the workspaces of specs; return the specs with the bundles, ready to send.

    A job without a workspace inherits its parent's. In a cluster that runs jobs in place nothing is uploaded.

    Raises:
        InvalidRequest: a workspace cannot be sent.
        StoreError: the controller has no room for it.
    """
    controller = await runtime.client.connect()
    in_place = controller is not None and controller.in_place
    sent: dict[str, BlobId] = {}
    done = []
    for spec in specs:
        named = spec.environment.bundle or ""
        root = named.removeprefix(UNSENT)
        # Jobs in this process read the directory itself.
        if in_place:
            spec = evolve(spec, environment=evolve(spec.environment, bundle=None))
        elif root != named:
            # Several specs of one launch share a directory.
            if root not in sent:
                sent[root] = await send(runtime.client, root, runtime.find_workspace or find_directory)
            spec = set_workspace(spec, sent[root], root)
        elif runtime.bundle and spec.environment.bundle in (None, runtime.bundle):
            spec = set_workspace(spec, runtime.bundle, runtime.workspace)
        done.append(spec)
    return done


def set_workspace(spec: JobSpec, bundle: BlobId, root: str) -> JobSpec:
    """Return the spec with paths below ``root`` as paths in the workspace, which is the default of its ``cwd``."""
    return evolve(
        spec,
        environment=evolve(spec.environment, bundle=bundle),
        cwd=workspace_path(spec.cwd or root, root) or INSIDE,
        sys_path=tuple(workspace_path(os.path.realpath(path), root) or path for path in spec.sys_path),
    )


def workspace_path(path: str, root: str) -> str | None:
    """Return a path below the root as ``workspace://src``; None for other paths."""
    here = PurePosixPath(path)
    if not here.is_relative_to(root):
        return None
    below = here.relative_to(root).as_posix()
    return INSIDE + ("" if below == "." else below)


# Transfer of chunks --------------------------------------------------------------------------------------------------


async def send(client: ControllerClient, path: str, find: Find) -> BlobId:
    """Make sure that the controller has the workspace as it is now; returns its bundle.

    Raises:
        InvalidRequest, StoreError: it cannot.
        ConnectionFailed: the conversation has ended.
    """
    # An editor may save a file during the upload; a bundle must be of one state of the tree.
    for _ in range(TRIES):
        source = await find(path)
        try:
            offer = OfferBundle(bundle=source.bundle, parts=tuple(source.parts), size_bytes=source.size_bytes)
            await send_missing(client.request_blobs, offer, source.read)
        except FileChanged as error:
            changed = error
        else:
            return source.bundle
    raise InvalidRequest(f"{changed} in the workspace {path} changes while it is sent: launch when it is still")
