"""Environments of `rl.py`: a bandit, and grids to find a way in. Many episodes are played at once, as arrays.

An observation is two binary features of many: the *view* (where the goal lies, and which ways are blocked) has the same
meaning in every grid, so that it helps in the next one; the *place* belongs to one environment only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

ACTIONS = 4
"""Up, right, down, left; or one of four arms."""
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
VIEWS = 9 * 16
"""Goal above, level or below, and left, here or right; and which of the four ways are blocked."""
STEP_COSTS = 0.02


class Outcome(NamedTuple):
    """Result of one step of many episodes."""

    state: Array
    reward: Array
    over: Array
    won: Array


@dataclass(frozen=True)
class Bandit:
    """Four arms, each of which pays with its own probability. An episode is one step, won if the arm pays."""

    chances: tuple[float, ...] = (0.1, 0.3, 0.2, 0.95)

    limit = 1
    places = 1

    def begin(self, rng: np.random.Generator, episodes: int) -> Array:
        return np.zeros(episodes, dtype=np.int64)

    def views(self, state: Array) -> Array:
        return np.full_like(state, VIEWS)  # there is nothing to observe

    def step(self, rng: np.random.Generator, state: Array, actions: Array) -> Outcome:
        won = rng.random(len(state)) < np.array(self.chances)[actions]
        return Outcome(state, won.astype(float), np.ones_like(won), won)


@dataclass(frozen=True)
class Grid:
    """Map on which to find the way to ``G``: ``#`` is a wall, and episodes start on an ``S``, or anywhere without one.

    An episode is won if it reaches the goal within ``limit`` steps; a step into a wall or out of the map has no effect.
    """

    rows: tuple[str, ...]
    limit: int

    @property
    def places(self) -> int:
        return len(self.rows) * len(self.rows[0])

    def begin(self, rng: np.random.Generator, episodes: int) -> Array:
        return rng.choice(self._starts, episodes)

    def views(self, state: Array) -> Array:
        return self._views[state]

    def step(self, rng: np.random.Generator, state: Array, actions: Array) -> Outcome:
        after = self._next[state, actions]
        won = after == self._goal
        return Outcome(after, won - STEP_COSTS, won, won)

    @cached_property
    def _goal(self) -> int:
        return "".join(self.rows).index("G")

    @cached_property
    def _starts(self) -> list[int]:
        cells = "".join(self.rows)
        marked = [place for place, cell in enumerate(cells) if cell == "S"]
        return marked or [place for place, cell in enumerate(cells) if cell == "."]

    @cached_property
    def _next(self) -> Array:
        """Return the next place by place and action."""
        return np.array([[self._beside(place, move) for move in MOVES] for place in range(self.places)])

    def _beside(self, place: int, move: tuple[int, int]) -> int:
        width = len(self.rows[0])
        row, column = place // width + move[0], place % width + move[1]
        inside = 0 <= row < len(self.rows) and 0 <= column < width
        return row * width + column if inside and self.rows[row][column] != "#" else place

    @cached_property
    def _views(self) -> Array:
        width = len(self.rows[0])
        place = np.arange(self.places)
        vertical = np.sign(self._goal // width - place // width) + 1
        horizontal = np.sign(self._goal % width - place % width) + 1
        barred = (self._next == place[:, None]) @ (1 << np.arange(ACTIONS))
        return (3 * vertical + horizontal) * 16 + barred


World: TypeAlias = Bandit | Grid


@dataclass(frozen=True)
class Lesson:
    """Environment, and the share of episodes to be won in it before the next lesson."""

    name: str
    world: World
    passing: float


SMALL = ("..G", "...", "...")
WALLS = ("..#.G", "..#..", "S.#..", "S...#", "SSS..")
MAZE = ("...#..G", ".#.#.#.", ".#...#.", ".####..", "....##.", ".##....", "SS.#.#.")

LESSONS: tuple[Lesson, ...] = (
    Lesson("bandit", Bandit(), 0.85),
    Lesson("grid 3x3", Grid(SMALL, limit=6), 0.9),
    Lesson("grid 5x5, walls", Grid(WALLS, limit=14), 0.93),
    Lesson("grid 7x7, maze", Grid(MAZE, limit=26), 0.93),
)


def features(lesson: int, state: Array, lessons: Sequence[Lesson] = LESSONS) -> Array:
    """Return the view and the place of each episode."""
    world, before = lessons[lesson].world, sum(one.world.places for one in lessons[:lesson])
    return np.stack([world.views(state), VIEWS + 1 + before + state], axis=1)


def count_features(lessons: Sequence[Lesson] = LESSONS) -> int:
    return VIEWS + 1 + sum(one.world.places for one in lessons)
