"""Priority bands: who goes before whom, whatever their shares are."""

from __future__ import annotations

import difflib
from enum import StrEnum

from fray.errors import InvalidRequest


class Band(StrEnum):
    """From first to last. A job of an earlier band is placed first, and may take the place of one of a later band."""

    SYSTEM = "system"
    """What the cluster itself needs: left to operators."""
    PRODUCTION = "production"
    INTERACTIVE = "interactive"
    """The default: somebody waits for it."""
    BATCH = "batch"
    """Whenever there is room."""

    @property
    def rank(self) -> int:
        """0 goes first."""
        return _RANKS[self]


_RANKS = {band: rank for rank, band in enumerate(Band)}


def parse_band(word: str, what: str) -> Band:
    """The band of this name.

    Args:
        what: who asks, for the error.

    Raises:
        InvalidRequest: there is none; the message names the near one.
    """
    try:
        return Band(word)
    except ValueError:
        names = [band.value for band in Band]
        near = difflib.get_close_matches(str(word), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        words = ", ".join(map(repr, names))
        raise InvalidRequest(f"{what}: priority={word!r} is no band: write one of {words}{hint}") from None
