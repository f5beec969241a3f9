"""Workspaces on their way: from a driver to the controller, and from there to the nodes that lack them.

Law: who has something says what it is, who lacks something asks. Each piece is named by the SHA-256 of its bytes and
checked where it arrives; what is there already is never sent again. So a cut, or a restart of either side, costs the
pieces that were under way, and repeating anything takes effect once.
"""

from __future__ import annotations

from fray.model.frozen import frozen
from fray.model.ids import BlobId

CHUNK_LIMIT_BYTES = 2 * 1024 * 1024
"""No piece is larger, packed or unpacked."""


@frozen(kw_only=True)
class OfferBundle:
    """Driver or job to controller: this is the bundle. Reply: `BundleState`.

    To be said again once what it lacks was put, until it is complete; and before each launch that names it, so that
    it stays. Errors: InvalidRequest; StoreError: no room.
    """

    bundle: BlobId
    parts: tuple[BlobId, ...]
    """Pieces that make up the manifest."""
    size_bytes: int
    """Of all pieces, about."""


@frozen(kw_only=True)
class PutChunk:
    """Here is a piece, attached. Reply: `Done`, once it is kept.

    Errors: InvalidRequest; StoreError: no room; ChannelFull: try again later.
    """

    chunk: BlobId


@frozen(kw_only=True)
class BundleState:
    """What the controller has of a bundle."""

    complete: bool
    parts: tuple[BlobId, ...] = ()
    missing: tuple[BlobId, ...] = ()
    """What is missing as far as it can tell: the parts of the manifest, or, once these are there, the pieces."""


@frozen(kw_only=True)
class FetchBundle:
    """Node to controller: what is this bundle? Reply: `BundleState` with ``parts``. Error: InvalidRequest."""

    bundle: BlobId


@frozen(kw_only=True)
class FetchChunk:
    """Reply: `Done` with the piece attached. Error: InvalidRequest: it is not (or no longer) there, or damaged."""

    chunk: BlobId
