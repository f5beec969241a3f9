"""Turns of users at one engine: the least time served comes first."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import frozen


@frozen
class EngineTurn:
    """Turn that a request waits for or has."""

    number: int
    users: tuple[str, ...]


class FairTurns:
    """Turns, one at a time.

    Each user has a level: the seconds that the user was served, divided by the user's weight. The turn of the lowest
    level is next, and of equal levels the one that was asked for first; a turn of several users has the level of the
    lowest of them. A user who had nothing to do begins at the level of the last turn: time that was not used is not
    saved up.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Served by user."""
        self.weights: Mapping[str, float] = {}
        """Weights by user: one of weight 2 gets twice what one of weight 1 gets; those that are missing have 1."""
        self._levels: dict[str, float] = {}
        self._waiting: list[EngineTurn] = []
        self._current: EngineTurn | None = None
        self._asked = 0
        self._now = 0.0
        """Level of the last turn when it began."""

    def ask(self, users: Collection[str]) -> EngineTurn:
        """Wait for a turn of users, at least one."""
        for user in users:
            self._levels[user] = max(self._levels.get(user, 0.0), self._now)
        self._asked += 1
        turn = EngineTurn(self._asked, tuple(users))
        self._waiting.append(turn)
        return turn

    def withdraw(self, turn: EngineTurn) -> None:
        """Wait no longer."""
        self._waiting.remove(turn)

    def next(self) -> EngineTurn | None:
        """Give the next turn; None: one is under way, or none is waited for."""
        if self._current is not None or not self._waiting:
            return None
        self._current = min(self._waiting, key=lambda turn: (self._level(turn), turn.number))
        self._waiting.remove(self._current)
        self._now = max(self._now, self._level(self._current))
        return self._current

    def end(self, seconds: float) -> None:
        """End the turn under way, which took so many seconds; its users share them."""
        assert self._current is not None, "no turn is under way"
        users, self._current = self._current.users, None
        for user in users:
            self._levels[user] += seconds / len(users) / self.weights.get(user, 1.0)
            self.seconds[user] = self.seconds.get(user, 0.0) + seconds / len(users)

    def behind(self) -> dict[str, int]:
        """Return the users who wait for others who were served less, with the number of these others."""
        waiting = {user for turn in self._waiting for user in turn.users}
        served = waiting.union(self._current.users if self._current else ())
        found = {user: sum(self._levels[other] < self._levels[user] for other in served) for user in waiting}
        return {user: count for user, count in found.items() if count}

    def _level(self, turn: EngineTurn) -> float:
        return min(self._levels[user] for user in turn.users)
