"""Workspace bundles: a manifest of files, and the chunks that their contents are cut into. Pure.

The contents of all files, concatenated in the order of the manifest, are one stream; the chunks are cuts of it. Small
files share a chunk, large ones have several, so thousands of files need only a few hundred requests. A chunk is named
by the SHA-256 of the bytes that are sent, a file by that of its content, and the bundle by that of the manifest.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from posixpath import normpath

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import BlobId
from fray.model.messages.bundles import CHUNK_LIMIT_BYTES

FILE, PROGRAM, LINK = "f", "x", "l"
"""Modes: regular file, executable file, symbolic link (whose content is its target)."""
FILES_LIMIT = 100_000
"""Files of one workspace."""
MANIFEST_LIMIT_BYTES = 64 * 1024 * 1024
SIZE_LIMIT_BYTES = 20 * 1000**3
"""Limit of all files together, because a small chunk may be named a million times. Drivers have a lower limit of their
own."""
LINK_LIMIT_BYTES = 4095
"""Limit of a link's target."""
LINKS_FOLLOWED = 40
"""Symbolic links that the kernel follows in one path."""
CHUNK_BYTES = 512 * 1024
"""Approximate content of one chunk."""
_SMALL_BYTES = CHUNK_BYTES // 2
_CUT_FROM_BYTES = 128 * 1024
_NAME_CHARS = frozenset("0123456789abcdef")


@frozen
class FileEntry:
    """One file."""

    path: str
    """Relative path with ``/``; bytes that are not UTF-8 are encoded as Python's ``surrogateescape``."""
    mode: str
    blob: BlobId
    """Hash of its content."""
    size_bytes: int


@frozen
class ManifestChunk:
    """One cut of the stream."""

    blob: BlobId
    """Hash of the bytes that are sent."""
    size_bytes: int
    """Size of the content."""
    packed: bool
    """The bytes are the content compressed by zlib."""


@frozen
class Manifest:
    """Content of a bundle. ``files`` are sorted by path."""

    files: tuple[FileEntry, ...]
    chunks: tuple[ManifestChunk, ...]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)


@frozen
class Span:
    """A part of a chunk's content."""

    chunk: int
    at: int
    size_bytes: int


# Text ----------------------------------------------------------------------------------------------------------------


def write_manifest(manifest: Manifest) -> bytes:
    """Return its text, which is the same for equal manifests."""
    files = [[each.path, each.mode, each.blob, each.size_bytes] for each in manifest.files]
    chunks = [[each.blob, each.size_bytes, int(each.packed)] for each in manifest.chunks]
    return json.dumps({"files": files, "chunks": chunks}, separators=(",", ":")).encode()


def read_manifest(text: bytes) -> Manifest:
    """Return the manifest of an untrusted text, checked so that it can safely be built below a directory.

    Raises:
        InvalidRequest: not a manifest of a workspace.
    """
    try:
        data = json.loads(text)
        manifest = Manifest(
            tuple(
                FileEntry(_checked_text(path), _checked_text(mode), _checked_hash(blob), _checked_size(size))
                for path, mode, blob, size in data["files"]
            ),
            tuple(ManifestChunk(_checked_hash(b), _checked_size(s), bool(packed)) for b, s, packed in data["chunks"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidRequest(f"invalid workspace manifest: {error}") from None
    _check(manifest)
    return manifest


def _checked_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def _checked_size(value: object) -> int:
    """Return an int; floats are rejected, because `int` of infinity would raise another error."""
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _checked_hash(value: object) -> BlobId:
    blob = _checked_text(value)
    if len(blob) != 64 or not _NAME_CHARS.issuperset(blob):
        raise ValueError(f"{blob!r} is not a SHA-256")
    return blob


def _check(manifest: Manifest) -> None:
    if len(manifest.files) > FILES_LIMIT:
        raise InvalidRequest(f"a workspace has at most {FILES_LIMIT:,} files, not {len(manifest.files):,}")
    before = ""
    for entry in manifest.files:
        if not before < entry.path:
            raise InvalidRequest(f"the paths of a manifest are sorted, and {entry.path!r} is not")
        before = entry.path
        check_path(entry.path)
        if entry.mode not in (FILE, PROGRAM, LINK) or entry.size_bytes < 0:
            raise InvalidRequest(f"{entry.path!r} has the mode {entry.mode!r} and {entry.size_bytes} bytes")
        if entry.mode == LINK and not 0 < entry.size_bytes <= LINK_LIMIT_BYTES:
            raise InvalidRequest(f"the link {entry.path!r} leads nowhere: its target has {entry.size_bytes} bytes")
    paths = {entry.path for entry in manifest.files}
    for path in paths:
        if any(above in paths for above in _parents(path)):
            raise InvalidRequest(f"{path!r} is below another file of the workspace")
    if any(not 0 < chunk.size_bytes <= CHUNK_LIMIT_BYTES for chunk in manifest.chunks):
        raise InvalidRequest(f"a chunk of a workspace has 1 to {CHUNK_LIMIT_BYTES} bytes")
    if manifest.size_bytes > SIZE_LIMIT_BYTES:
        raise InvalidRequest(f"a workspace has at most {SIZE_LIMIT_BYTES:,} bytes, not {manifest.size_bytes:,}")
    if manifest.size_bytes != sum(entry.size_bytes for entry in manifest.files):
        raise InvalidRequest("the chunks of the workspace do not make up its files")


def check_path(path: str) -> None:
    """Raise InvalidRequest unless ``path`` is a relative path that stays below its directory."""
    parts = path.split("/")
    sound = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
    try:
        encoded = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        sound, encoded = False, b""
    if not sound or len(encoded) > 4000 or any(len(part) > 255 for part in encoded.split(b"/")):
        raise InvalidRequest(f"{path!r} is not a valid path in a workspace")


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def is_outside(path: str, target: str) -> bool:
    """Return whether a symbolic link at ``path`` in a workspace points outside of it."""
    if target.startswith("/"):
        return True
    end = normpath(f"{path.rpartition('/')[0]}/{target}".lstrip("/"))
    return end == ".." or end.startswith("../")


def find_escape(links: Mapping[str, str]) -> str | None:
    """Return a symbolic link of a workspace that leads out of it, alone or through others; None if there is none.

    Args:
        links: targets by the path of the link.
    """
    # `is_outside` reads a path as text: behind a link to a directory of another depth, ".." leads elsewhere.
    return next((path for path in links if is_outside(path, links[path]) or _escapes(path, links)), None)


def _escapes(link: str, links: Mapping[str, str]) -> bool:
    """Return whether following a link leaves the workspace, step by step as the kernel does."""
    at: list[str] = []
    left, followed = link.split("/")[::-1], 0
    while left:
        part = left.pop()
        if part == "..":
            if not at:
                return True
            at.pop()
        elif part not in ("", "."):
            target = links.get("/".join((*at, part)))
            if target is None:
                at.append(part)
                continue
            followed += 1
            if followed > LINKS_FOLLOWED:
                return False  # the kernel gives up, too (ELOOP)
            if target.startswith("/"):
                return True
            left += target.split("/")[::-1]
    return False


def manifest_parts(text: bytes) -> list[bytes]:
    """Return the compressed manifest in chunks for sending."""
    packed = zlib.compress(text, 6)
    return [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]


def join_parts(bundle: BlobId, parts: Sequence[bytes]) -> Manifest:
    """Inverse of `manifest_parts`.

    Raises:
        InvalidRequest: together they are not the manifest of this bundle.
    """
    text = unpack(b"".join(parts), MANIFEST_LIMIT_BYTES)
    if hashlib.sha256(text).hexdigest() != bundle:
        raise InvalidRequest(f"these are not the parts of bundle {bundle}: send them again")
    return read_manifest(text)


# Chunks --------------------------------------------------------------------------------------------------------------


def pack(content: bytes) -> tuple[bytes, bool]:
    """Return the bytes to send, and whether they are compressed; content that does not shrink by a tenth is not."""
    sample = content[: 32 * 1024]
    if len(zlib.compress(sample, 1)) > len(sample) * 0.9:
        return content, False
    packed = zlib.compress(content, 1)
    return (packed, True) if len(packed) < len(content) * 0.9 else (content, False)


def unpack(data: bytes, limit_bytes: int = CHUNK_LIMIT_BYTES) -> bytes:
    """Return the zlib-decompressed data, within a limit.

    Raises:
        InvalidRequest: not compressed, truncated, or larger than the limit.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(data, limit_bytes)
    except zlib.error as error:
        raise InvalidRequest(f"a chunk of a workspace cannot be unpacked: {error}") from None
    if not stream.eof:
        raise InvalidRequest(f"a chunk of a workspace is truncated, or has more than {limit_bytes} bytes")
    return content


def unpack_chunk(chunk: ManifestChunk, data: bytes) -> bytes:
    """Return the content of a chunk.

    Raises:
        InvalidRequest: the data are not this chunk.
    """
    if hashlib.sha256(data).hexdigest() != chunk.blob:
        raise InvalidRequest(f"these bytes are not the chunk {chunk.blob}")
    content = unpack(data) if chunk.packed else data
    if len(content) != chunk.size_bytes:
        raise InvalidRequest(f"the chunk {chunk.blob} has {len(content)} bytes and not {chunk.size_bytes}")
    return content


def plan_chunks(sizes: Sequence[tuple[str, int]]) -> list[list[tuple[int, int, int]]]:
    """Return where to cut the stream of files (path and size, in order): lists of (index of the file, from, bytes).

    A file of 256 KiB and more has chunks of its own. Others share a chunk, which ends where the hash of a path says so:
    an added, removed or changed file leaves the cuts around it as they are.
    """
    chunks: list[list[tuple[int, int, int]]] = []
    group: list[tuple[int, int, int]] = []
    group_bytes = 0
    for index, (path, size) in enumerate(sizes):
        if size >= _SMALL_BYTES or group_bytes + size > CHUNK_BYTES + _SMALL_BYTES:
            chunks += [group] if group else []
            group, group_bytes = [], 0
        if size >= _SMALL_BYTES:
            chunks += [[(index, at, min(CHUNK_BYTES, size - at))] for at in range(0, size, CHUNK_BYTES)]
        elif size:
            group.append((index, 0, size))
            group_bytes += size
        may_cut = group_bytes >= _CUT_FROM_BYTES and zlib.crc32(path.encode("utf-8", "replace")) % 8 == 0
        if group_bytes >= CHUNK_BYTES or may_cut:
            chunks.append(group)
            group, group_bytes = [], 0
    return [*chunks, group] if group else chunks


def file_spans(manifest: Manifest) -> Iterator[tuple[FileEntry, list[Span]]]:
    """Yield each file, and the spans of its content."""
    number, at = 0, 0
    for entry in manifest.files:
        found, left = [], entry.size_bytes
        while left:
            take = min(left, manifest.chunks[number].size_bytes - at)
            if take:
                found.append(Span(number, at, take))
            left, at = left - take, at + take
            if at == manifest.chunks[number].size_bytes:
                number, at = number + 1, 0
        yield entry, found
