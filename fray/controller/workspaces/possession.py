"""Content that clients have uploaded, by which they prove that they have it.

To know the hash of a workspace or value proves nothing: a client that sees its own alone is asked for content that is
stored already, too, until it has sent each part of it once. Nothing of this is saved: after a restart of the controller
a client is asked again, unless a job of its own on record has the content. That costs a transfer and nothing else, as a
launch that is refused for it is repeated with its content (`fray.runtime.scope.scope`).
"""

from __future__ import annotations

from typing import TypeVar

from attrs import define, field

from fray.model.ids import BlobId

CHUNKS_LIMIT = 200_000
"""Chunks of all clients that are remembered; of more, those used longest ago are forgotten, and asked for again."""
CONTENTS_LIMIT = 20_000

K = TypeVar("K")


@define(eq=False)
class Possession:
    """Record of uploads, by client (`AccessScope.owner`)."""

    _chunks: dict[tuple[str, BlobId], None] = field(factory=dict, repr=False)
    _contents: dict[tuple[str, BlobId], None] = field(factory=dict, repr=False)

    def add_chunk(self, owner: str, chunk: BlobId) -> None:
        """Note that a client has sent a chunk."""
        _add(self._chunks, (owner, chunk), CHUNKS_LIMIT)

    def has_chunk(self, owner: str, chunk: BlobId) -> bool:
        return _is_in(self._chunks, (owner, chunk))

    def add(self, owner: str, content: BlobId) -> None:
        """Note that a client has sent all of a workspace or value."""
        _add(self._contents, (owner, content), CONTENTS_LIMIT)

    def has(self, owner: str, content: BlobId) -> bool:
        """Return whether a client has sent all of a workspace or value."""
        return _is_in(self._contents, (owner, content))


def _add(known: dict[K, None], key: K, limit: int) -> None:
    known.pop(key, None)
    if len(known) >= limit:
        del known[next(iter(known))]
    known[key] = None


def _is_in(known: dict[K, None], key: K) -> bool:
    if key not in known:
        return False
    # Moved to the end: it was used now.
    del known[key]
    known[key] = None
    return True
