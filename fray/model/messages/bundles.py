"""Messages that move workspaces and large values: to the controller, and from there to those that lack them.

Contract: the holder of a bundle offers it, and the side that lacks something requests it. Each chunk is named by the
SHA-256 of its bytes and verified where it arrives; chunks that are already there are never sent again. So a lost
connection, or a restart of either side, costs the chunks in flight, and repeating any message takes effect once.
"""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import BlobId

CHUNK_LIMIT_BYTES = 2 * 1024 * 1024
"""Largest chunk, packed or unpacked."""


@frozen(kw_only=True)
class OfferBundle:
    """Offer a bundle (driver or job to controller). Reply: `BundleState`.

    Repeated after the missing chunks were sent, until the bundle is complete; and before each launch that names it, so
    that it is retained. Errors: InvalidRequest; StoreError: no room.
    """

    bundle: BlobId
    parts: tuple[BlobId, ...]
    """Chunks that make up the manifest."""
    size_bytes: int
    """Approximate size of all chunks."""


@frozen(kw_only=True)
class PutChunk:
    """Store the attached chunk. Reply: `Done`, once it is stored.

    Errors: InvalidRequest; StoreError: no room; ChannelFull: try again later.
    """

    chunk: BlobId


@frozen(kw_only=True)
class BundleState:
    """Chunks of a bundle that the controller has."""

    complete: bool
    parts: tuple[BlobId, ...] = ()
    missing: tuple[BlobId, ...] = ()
    """Missing chunks as far as the controller can tell: parts of the manifest, or, once these are there, of the
    files."""
    size_bytes: int = 0
    """Size of a large value, whose chunks ``parts`` are then; 0 for a bundle."""


@frozen(kw_only=True)
class FetchBundle:
    """Look up a bundle (node to controller). Reply: `BundleState` with ``parts``. Error: InvalidRequest."""

    bundle: BlobId


@frozen(kw_only=True)
class FetchChunk:
    """Fetch a chunk. Reply: `Done` with the chunk attached. Errors: InvalidRequest: missing or damaged; Unauthorized:
    it is of no own value."""

    chunk: BlobId
    value: BlobId = ""
    """Large value of which it is a part; only nodes fetch chunks of anything else."""


@frozen(kw_only=True)
class OfferValue:
    """Offer a large payload or result (driver, job or node to controller). Reply: `BundleState`.

    As `OfferBundle`: repeated after the missing parts were sent, until the value is complete. A value that no job names
    within an hour is removed. Errors: InvalidRequest; StoreError: no room.
    """

    value: BlobId
    size_bytes: int
    parts: tuple[BlobId, ...]
    """Hashes of its parts in order (`fray.model.messages.large_values`)."""


@frozen(kw_only=True)
class FetchValue:
    """Look up a large value (node or client to controller). Reply: `BundleState` with ``parts``. Error:
    InvalidRequest: it is not stored."""

    value: BlobId
