"""Workspaces without files: bundles of simulated drivers, and chunk caches of simulated machines.

``/sim/7`` is the directory in its seventh version: of six files one or two differ from one version to the next.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import trio
from attrs import define, field, frozen

from fray.model.ids import BlobId
from fray.model.workspace import (
    FileEntry,
    Manifest,
    ManifestChunk,
    file_spans,
    manifest_parts,
    pack,
    plan_chunks,
    unpack_chunk,
    write_manifest,
)

ROOT = "/sim/"
FILES = 6
FILE_BYTES = 300_000
"""File size: large enough for chunks of its own; it compresses well."""


@frozen
class SimSource:
    """A bundle of one version (`fray.runtime.workspaces.upload.BundleSource`)."""

    bundle: BlobId
    manifest: Manifest
    data: dict[BlobId, bytes] = field(repr=False)
    parts: tuple[BlobId, ...]

    @property
    def size_bytes(self) -> int:
        return self.manifest.size_bytes

    async def read(self, blob: BlobId) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.data[blob]


async def find(path: str) -> SimSource:
    """Return the bundle of a simulated driver's directory."""
    await trio.lowlevel.checkpoint()
    return version(int(path.removeprefix(ROOT)))


@lru_cache(64)
def version(number: int) -> SimSource:
    files = {f"m{index}.py": _content(index, number) for index in range(FILES)}
    data: dict[BlobId, bytes] = {}
    chunks = []
    for spans_ in plan_chunks([(path, len(content)) for path, content in files.items()]):
        content = b"".join(list(files.values())[index][at : at + size] for index, at, size in spans_)
        blob, packed = pack(content)
        chunks.append(ManifestChunk(_name(blob), len(content), packed))
        data[chunks[-1].blob] = blob
    entries = [FileEntry(path, "f", _name(content), len(content)) for path, content in files.items()]
    manifest = Manifest(tuple(entries), tuple(chunks))
    text = write_manifest(manifest)
    parts = manifest_parts(text)
    data |= {_name(part): part for part in parts}
    return SimSource(_name(text), manifest, data, tuple(map(_name, parts)))


def _content(index: int, number: int) -> bytes:
    """Return a content that changes with every (index + 1)th version."""
    return hashlib.sha256(f"{index}/{number // (index + 1)}".encode()).digest() * (FILE_BYTES // 32)


def _name(data: bytes) -> BlobId:
    return hashlib.sha256(data).hexdigest()


@define
class SimChunkCache:
    """Disk of one machine (`fray.node.workspaces.preparer.ChunkCache`); it survives its nodes."""

    chunks: dict[BlobId, bytes] = field(factory=dict)

    async def has(self, blob: BlobId) -> bool:
        return blob in self.chunks

    async def put(self, blob: BlobId, data: bytes) -> None:
        self.chunks[blob] = data

    async def get(self, blob: BlobId) -> bytes:
        return self.chunks[blob]

    async def missing(self, manifest: Manifest) -> list[ManifestChunk]:
        return [chunk for chunk in manifest.chunks if chunk.blob not in self.chunks]

    def damage(self, bundle: BlobId, manifest: Manifest) -> str:
        """Return what is wrong with the tree built from this manifest as the workspace of the bundle; empty:
        nothing."""
        if _name(write_manifest(manifest)) != bundle:
            return "it has another manifest"
        contents = [unpack_chunk(chunk, self.chunks[chunk.blob]) for chunk in manifest.chunks]
        for entry, where in file_spans(manifest):
            content = b"".join(contents[span.chunk][span.at : span.at + span.size_bytes] for span in where)
            if _name(content) != entry.blob:
                return f"{entry.path} has another content"
        return ""
