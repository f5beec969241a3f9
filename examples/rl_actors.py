"""Actors of `rl.py`, made by the driver, whose handles each job gets: the curriculum and the weight coordinator."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_policy import Batch, Weights
from rl_worlds import LESSONS

WINDOW = 128
"""Number of the last episodes that decide whether a lesson is passed."""
REHEARSALS = 0.2
"""Share of batches that repeat a passed lesson, so that it is not forgotten."""


class Curriculum:
    """Chooses lessons: it advances when enough episodes of the current one are won, and ends after the last."""

    def __init__(
        self, lessons: Sequence[tuple[str, float]] = tuple((one.name, one.passing) for one in LESSONS)
    ) -> None:
        self._lessons = lessons
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._last: deque[tuple[int, int]] = deque()
        self._passed: list[dict[str, Any]] = []
        self._episodes = 0

    def sample_lesson(self, seed: int) -> int:
        """Return the number of a lesson: mostly the current one, sometimes a passed one."""
        rng, current = np.random.default_rng(seed), min(len(self._passed), len(self._lessons) - 1)
        return int(rng.integers(current)) if current and rng.random() < REHEARSALS else current

    def report(self, lesson: int, episodes: int, won: int) -> None:
        """Record the episodes of a lesson that were played and won."""
        with self._lock:
            if lesson != len(self._passed) or self.over():
                return
            self._episodes += episodes
            self._last.append((episodes, won))
            while sum(played for played, _ in self._last) - self._last[0][0] >= WINDOW:
                self._last.popleft()
            if sum(played for played, _ in self._last) >= WINDOW and self._rate() >= self._lessons[lesson][1]:
                self._pass(lesson)

    def over(self) -> bool:
        """Return whether all lessons are passed."""
        return len(self._passed) == len(self._lessons)

    def standing(self) -> list[dict[str, Any]]:
        """Return the passed lessons: number of episodes, time, and share of successes."""
        return list(self._passed)

    def _rate(self) -> float:
        return sum(won for _, won in self._last) / max(1, sum(played for played, _ in self._last))

    def _pass(self, lesson: int) -> None:
        seconds, rate = round(time.monotonic() - self._began, 3), round(self._rate(), 3)
        name = self._lessons[lesson][0]
        self._passed.append({"lesson": name, "episodes": self._episodes, "seconds": seconds, "passed_at": rate})
        self._last.clear()
        self._episodes = 0


class WeightCoordinator:
    """Passes weights by version from the trainer to the rollouts, and batches back.

    Several calls run concurrently (``max_concurrency``), as `push` waits while the trainer is behind.

    Args:
        weights: version 0.
        room: largest number of queued batches.
    """

    def __init__(self, weights: Weights, room: int) -> None:
        self._version, self._weights, self._room = 0, weights, room
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._rollouts: dict[int, dict[str, int]] = {}
        self._closed = False

    def publish(self, version: int, weights: Weights) -> None:
        """Publish the trainer's next version; ignore an old version, from a trainer that was considered lost."""
        with self._changed:
            if version > self._version:
                self._version, self._weights = version, weights

    def fetch(self, known: int = -1) -> tuple[int, Weights] | None:
        """Return the newest weights and their version; None if that version is ``known``."""
        with self._changed:
            return None if known == self._version else (self._version, self._weights)

    def begin(self, rollout: int) -> int:
        """Record a start of a rollout; return the number of its starts."""
        with self._changed:
            mine = self._rollouts.setdefault(rollout, {"begun": 0, "batches": 0, "episodes": 0})
            mine["begun"] += 1
            return mine["begun"]

    def push(self, rollout: int, batch: Batch) -> bool:
        """Queue a batch for the trainer, once there is room. Return False once the coordinator is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._batches) < self._room)
            if self._closed:
                return False
            self._batches.append(batch)
            self._rollouts[rollout]["batches"] += 1
            self._rollouts[rollout]["episodes"] += batch.episodes
            self._changed.notify_all()
            return True

    def pull(self, within_s: float) -> list[Batch] | None:
        """Wait for batches and return all of them; an empty list if none arrives in time, None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._batches, within_s)
            batches = list(self._batches)
            self._batches.clear()
            self._changed.notify_all()
            return None if self._closed else batches

    def standing(self) -> dict[int, dict[str, int]]:
        """Return the starts and the batches of each rollout."""
        with self._changed:
            return {rollout: dict(counts) for rollout, counts in sorted(self._rollouts.items())}

    def close(self) -> None:
        """Close the coordinator: waiting calls return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
