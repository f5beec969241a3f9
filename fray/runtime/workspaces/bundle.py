"""Scan of a directory into a bundle (a manifest and chunks), with a cache so that no file is read twice.

Invariant: a file is unchanged if its stamp is (size, times, inode, mode), unless it was written so shortly before it
was read that a later change might leave the stamp as it is. So an unchanged tree costs one `lstat` per file, and an
edit costs the changed files and the one chunk each of them is in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import Factory, define, field, frozen

from fray.errors import InvalidRequest
from fray.model.ids import BlobId
from fray.model.workspace import (
    LINK,
    FileEntry,
    Manifest,
    ManifestChunk,
    manifest_parts,
    pack,
    plan_chunks,
    write_manifest,
)
from fray.net.atomic_file import write_atomically
from fray.runtime.workspaces.files import (
    Limits,
    ScannedFile,
    list_files,
    stamp_of,
    unreadable,
)

# Like git's "racily clean" entries: file systems may store times in steps of up to a second.
FRESH_NS = 1_000_000_000
"""Age in nanoseconds below which a file's stamp is not trusted: a later change might not show in it."""
READ_TRIES = 3
FRESH_LIMIT_BYTES = 64 * 1024 * 1024
"""Total size of new chunks cached until they are sent; others are made again."""
CACHES_LIMIT = 64
"""Number of workspaces whose caches are stored on disk."""
_VERSION = 1

log = logging.getLogger("fray.workspace")

_Cut = list[tuple[int, int, int]]


class FileChanged(Exception):
    """A file has changed since the bundle was made."""


@frozen
class Bundle:
    """Snapshot of a workspace; its chunks are read only if the controller lacks them."""

    root: str
    bundle: BlobId
    manifest: Manifest
    parts: dict[BlobId, bytes] = field(repr=False)
    """Parts of the manifest by hash, in order."""
    found: tuple[ScannedFile, ...] = field(repr=False)
    cuts: dict[BlobId, _Cut] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes


@define
class ScanCache:
    """Hashes of one workspace's files and chunks. One scan at a time."""

    root: str
    files: dict[str, tuple[tuple[int, ...], BlobId]] = Factory(dict)
    """Trusted stamp and hash of the content, by path."""
    chunks: dict[str, ManifestChunk] = Factory(dict)
    """Chunks by the hash of their contents' description."""
    fresh: OrderedDict[BlobId, bytes] = Factory(OrderedDict)
    last: Bundle | None = None
    lock: threading.Lock = Factory(threading.Lock)
    dirty: bool = False


def scan(cache: ScanCache, limits: Limits) -> Bundle:
    """Return the bundle of the workspace as it is now.

    Raises:
        InvalidRequest: it cannot be sent; the message says why, and what to do.
    """
    with cache.lock:
        for _ in range(READ_TRIES):
            try:
                return _scan(cache, list_files(cache.root, limits))
            except FileChanged as error:
                changed = error
        raise InvalidRequest(
            f"{changed} in the workspace {cache.root} changes while it is read: launch again when it does not"
        )


def _scan(cache: ScanCache, found: list[ScannedFile]) -> Bundle:
    last = cache.last
    # A file whose stamp is not trusted has to be read again even if it looks unchanged.
    if last is not None and tuple(found) == last.found and all(_is_cached(cache, each) for each in found):
        return last
    reader = _Reader(cache, found)
    cuts = plan_chunks([(each.path, each.size_bytes) for each in found])
    pieces = [reader.piece(each) for each in cuts]
    entries = [FileEntry(each.path, each.mode, reader.blob(index), each.size_bytes) for index, each in enumerate(found)]
    manifest = Manifest(tuple(entries), tuple(pieces))
    text = write_manifest(manifest)
    parts = {hashlib.sha256(part).hexdigest(): part for part in manifest_parts(text)}
    by_blob = {piece.blob: where for piece, where in zip(pieces, cuts, strict=True)}
    _drop_unused(cache, found, reader.used)
    cache.last = Bundle(cache.root, hashlib.sha256(text).hexdigest(), manifest, parts, tuple(found), by_blob)
    return cache.last


def _is_cached(cache: ScanCache, found: ScannedFile) -> bool:
    known = cache.files.get(found.path)
    return known is not None and known[0] == found.stamp


def _drop_unused(cache: ScanCache, found: list[ScannedFile], used: set[str]) -> None:
    paths = {each.path for each in found}
    cache.files = {path: known for path, known in cache.files.items() if path in paths}
    cache.chunks = {key: piece for key, piece in cache.chunks.items() if key in used}


class _Reader:
    """Reader of one scan: reads files that are not cached, a chunk at a time."""

    def __init__(self, cache: ScanCache, found: list[ScannedFile]) -> None:
        self.cache, self.found = cache, found
        self.used: set[str] = set()
        self._blobs: dict[int, BlobId] = {
            index: cache.files[each.path][1] for index, each in enumerate(found) if _is_cached(cache, each)
        }

    def blob(self, index: int) -> BlobId:
        """Return the hash of a file's content."""
        if index not in self._blobs:
            self._read_through(index)
        return self._blobs[index]

    def piece(self, where: _Cut) -> ManifestChunk:
        for index, at, size in where:
            # A file larger than a chunk is hashed as a whole first: the chunk's key needs the hash.
            if index not in self._blobs and at == 0 and size < self.found[index].size_bytes:
                self._read_through(index)
        # Small files are read once, for their hash and for the chunk.
        if any(index not in self._blobs for index, _, _ in where):
            return self._make_chunk(where, self._read_whole(where))
        known = self.cache.chunks.get(self._key(where))
        if known is None:
            return self._make_chunk(
                where, b"".join(read_part(self.cache.root, self.found[i], at, n) for i, at, n in where)
            )
        self.used.add(self._key(where))
        return known

    def _key(self, where: _Cut) -> str:
        text = ";".join(f"{self._blobs[index]},{at},{size}" for index, at, size in where)
        return hashlib.sha256(text.encode()).hexdigest()

    def _make_chunk(self, where: _Cut, content: bytes) -> ManifestChunk:
        data, packed = pack(content)
        piece = ManifestChunk(hashlib.sha256(data).hexdigest(), len(content), packed)
        key = self._key(where)
        self.used.add(key)
        self.cache.chunks[key], self.cache.dirty = piece, True
        _cache_chunk(self.cache, piece.blob, data)
        return piece

    def _read_whole(self, where: _Cut) -> bytes:
        """Read small files once, for their hashes and for the chunk."""
        contents = []
        for index, at, size in where:
            content = read_part(self.cache.root, self.found[index], at, size)
            self._set_hash(index, hashlib.sha256(content).hexdigest())
            contents.append(content)
        return b"".join(contents)

    def _read_through(self, index: int) -> None:
        """Read a large file for its hash alone."""
        found, hashed, step = self.found[index], hashlib.sha256(), 1 << 20
        for at in range(0, found.size_bytes, step):
            hashed.update(read_part(self.cache.root, found, at, min(step, found.size_bytes - at)))
        self._set_hash(index, hashed.hexdigest())

    def _set_hash(self, index: int, blob: BlobId) -> None:
        found = self.found[index]
        self._blobs[index] = blob
        if max(found.stamp[1], found.stamp[2]) + FRESH_NS < time.time_ns():
            self.cache.files[found.path], self.cache.dirty = (found.stamp, blob), True
        else:
            self.cache.files.pop(found.path, None)


def _cache_chunk(cache: ScanCache, blob: BlobId, data: bytes) -> None:
    # The controller will probably ask for new chunks, so they are kept for a moment.
    cache.fresh[blob] = data
    while sum(map(len, cache.fresh.values())) > FRESH_LIMIT_BYTES:
        cache.fresh.popitem(last=False)


def read_part(root: str, found: ScannedFile, at: int, size_bytes: int) -> bytes:
    """Return bytes of a file that has not changed since the scan.

    Raises:
        FileChanged: it has changed.
        InvalidRequest: it cannot be read.
    """
    path = f"{root}/{found.path}"
    try:
        if found.mode == LINK:
            data, seen = os.fsencode(os.readlink(path))[at : at + size_bytes], os.lstat(path)
        else:
            # The path was a regular file at the scan. If it is a link or a pipe now, it must be neither followed nor
            # waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                data = os.pread(descriptor, size_bytes, at)
                seen = os.fstat(descriptor)
            finally:
                os.close(descriptor)
    except FileNotFoundError:
        raise FileChanged(repr(found.path)) from None
    except OSError as error:
        raise unreadable(root, found.path, error) from error
    # Checked after reading, at the open file: what was read is of the scanned state.
    if len(data) != size_bytes or stamp_of(seen) != found.stamp:
        raise FileChanged(repr(found.path))
    return data


def read_chunk(cache: ScanCache, bundle: Bundle, blob: BlobId) -> bytes:
    """Return the bytes of one chunk (or part of the manifest), made again if necessary.

    Raises:
        FileChanged: a file in it has changed since the scan.
    """
    data = bundle.parts.get(blob) or cache.fresh.pop(blob, None)
    if data is None:
        where = bundle.cuts[blob]
        data, _ = pack(b"".join(read_part(bundle.root, bundle.found[i], at, size) for i, at, size in where))
    # A chunk is named by its content; a wrong one would be refused by the controller as damaged.
    if hashlib.sha256(data).hexdigest() != blob:
        raise FileChanged("a file")
    return data


# On disk, for the next driver ----------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Return the directory in which this user's drivers store the hashes of workspaces."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fray" / "hashes"


def load_cache(root: str, directory: Path) -> ScanCache:
    """Load the cache of an earlier driver for this workspace; empty if it cannot be read."""
    cache = ScanCache(root)
    with suppress(OSError, ValueError, KeyError, TypeError):
        data: dict[str, Any] = json.loads(_file_of(root, directory).read_bytes())
        # File names are cut hashes, so another directory might have the same one.
        if data["version"] == _VERSION and data["root"] == root:
            cache.files = {path: (tuple(stamp), blob) for path, stamp, blob in data["files"]}
            cache.chunks = {key: ManifestChunk(blob, size, packed) for key, blob, size, packed in data["pieces"]}
    return cache


def save_cache(cache: ScanCache, directory: Path) -> None:
    """Store the cache for the next driver; errors of the file system are ignored."""
    with cache.lock, suppress(OSError):
        if not cache.dirty:
            return
        cache.dirty = False
        data = {
            "version": _VERSION,
            "root": cache.root,
            "files": [(path, stamp, blob) for path, (stamp, blob) in cache.files.items()],
            "pieces": [(key, piece.blob, piece.size_bytes, piece.packed) for key, piece in cache.chunks.items()],
        }
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps(data, separators=(",", ":"))
        # Several drivers of one project may save at once.
        write_atomically(_file_of(cache.root, directory), text.encode(), concurrent=True)
        _remove_oldest(directory)


def _file_of(root: str, directory: Path) -> Path:
    return directory / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:24]}.json"


def _remove_oldest(directory: Path) -> None:
    files = sorted(directory.glob("*.json"), key=lambda file: -file.stat().st_mtime)
    left = (draft for draft in directory.glob("*.new") if time.time() - draft.stat().st_mtime > 60)
    for file in (*files[CACHES_LIMIT:], *left):
        file.unlink(missing_ok=True)
