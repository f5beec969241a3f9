"""Errors that end a run."""

from __future__ import annotations

from fray.errors import FrayError


class NonFiniteUpdatesError(FrayError):
    """Several updates in a row had a loss or a gradient that is infinite or not a number; none was applied."""


class EpisodesFailed(FrayError):
    """Episodes failed in a way at which the run ends (`fray.rl.Run(on_error=...)`); the message has the last error."""


class RankLost(FrayError):
    """Processes of one trainer lost each other: one has ended, or is silent for too long. All of them are replaced."""
