"""Refusals of the Tinker API: what is not there, has ended, or is beyond a limit."""

from __future__ import annotations

from fray.tinker.wire.tinker_proto import WireError

TTL_RANGE_S = (3_600, 315_360_000)
"""Seconds that a checkpoint may be kept: an hour to ten years."""


class NotFound(Exception):
    """Session, model, sampler, checkpoint or request that the user does not have."""


class Expired(Exception):
    """Session that has ended."""


class TooMany(Exception):
    """Request beyond a limit of the user; the message has the limit."""


def check_ttl(seconds: int | None) -> None:
    """Check how long a checkpoint is kept. Raises WireError."""
    if seconds is not None and not TTL_RANGE_S[0] <= seconds <= TTL_RANGE_S[1]:
        raise WireError(f"ttl_seconds: {seconds}; expected {TTL_RANGE_S[0]} to {TTL_RANGE_S[1]}, or null: never")
