"""Use of the engines by user: tokens and time, within the last minute and by day."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

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


@frozen
class DayUsage:
    """Use by one user on one day.

    Attributes:
        day: of UTC, such as ``2026-11-29``.
        user_id: whose.
        tokens: generated, validated, and of forward passes.
        busy_s: seconds of engines.
    """

    day: str
    user_id: str
    tokens: int
    busy_s: float


class DayTotals:
    """Sums by day and user."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], DayUsage] = {}

    def add(self, each: DayUsage) -> None:
        """Add a use to that of its day and user."""
        key = (each.day, each.user_id)
        old = self._sums.get(key, DayUsage(*key, 0, 0.0))
        self._sums[key] = DayUsage(*key, old.tokens + each.tokens, old.busy_s + each.busy_s)

    def take(self) -> list[DayUsage]:
        """Return the sums, and begin with none again."""
        found = list(self._sums.values())
        self._sums.clear()
        return found

    def restore(self, taken: Iterable[DayUsage]) -> None:
        """Add what was taken and could not be written."""
        for each in taken:
            self.add(each)
