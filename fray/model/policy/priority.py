"""Priority bands: strict order of jobs before any fair sharing."""

from __future__ import annotations

import difflib
from enum import StrEnum

from fray.errors import InvalidRequest


class Band(StrEnum):
    """Priority band, from first to last.

    A job of an earlier band is placed first, and may preempt jobs of later bands.
    """

    SYSTEM = "system"
    """Jobs of the cluster itself: reserved for operators."""
    PRODUCTION = "production"
    INTERACTIVE = "interactive"
    """The default: a user is waiting for the result."""
    BATCH = "batch"
    """Runs on surplus capacity."""

    @property
    def rank(self) -> int:
        """Position in the order of bands; 0 is first."""
        return _RANKS[self]


_RANKS = {band: rank for rank, band in enumerate(Band)}


def parse_band(word: str, what: str) -> Band:
    """Return the band of this name.

    Args:
        what: subject of the error message.

    Raises:
        InvalidRequest: unknown band; the message suggests the most similar one.
    """
    try:
        return Band(word)
    except ValueError:
        names = [band.value for band in Band]
        near = difflib.get_close_matches(str(word), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        words = ", ".join(map(repr, names))
        raise InvalidRequest(f"{what}: invalid priority band {word!r}; expected one of {words}{hint}") from None
