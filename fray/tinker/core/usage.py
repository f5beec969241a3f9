"""Use of the engines by user, within the last minute: tokens and time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from attrs import frozen

WINDOW_S = 60.0


@frozen
class UserUsage:
    """Use by one user.

    Attributes:
        tokens_per_s: generated and validated tokens, over the window.
        share: of the time of all engines, 0 to 1.
        busy_s: seconds of engines within the window.
    """

    tokens_per_s: float
    share: float
    busy_s: float


class UsageWindow:
    """Requests that engines have executed in the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._used: deque[tuple[float, str, int, float]] = deque()

    def add(self, now: float, user_id: str, tokens: int, seconds: float) -> None:
        """Note an executed request."""
        self._forget(now)
        self._used.append((now, user_id, tokens, seconds))

    def by_user(self, now: float) -> Mapping[str, UserUsage]:
        """Return the use by user id; users without any are missing."""
        self._forget(now)
        tokens: dict[str, int] = {}
        seconds: dict[str, float] = {}
        for _, user_id, count, spent in self._used:
            tokens[user_id] = tokens.get(user_id, 0) + count
            # A long request counts within the window only.
            seconds[user_id] = seconds.get(user_id, 0.0) + min(spent, WINDOW_S)
        total = sum(seconds.values())
        return {
            user_id: UserUsage(tokens[user_id] / WINDOW_S, spent / total if total else 0.0, spent)
            for user_id, spent in seconds.items()
        }

    def _forget(self, now: float) -> None:
        while self._used and self._used[0][0] < now - WINDOW_S:
            self._used.popleft()
