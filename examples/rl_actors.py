"""What the jobs of `rl.py` share: two actors, made by the controller, whose handles each job is given."""

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
"""A lesson is passed by the share of this many episodes, the last ones."""
REHEARSALS = 0.2
"""The share of batches that go back to a lesson passed before, so that it is not forgotten."""


class Curriculum:
    """Which lesson is played. It moves on when enough of the current one is won, and is over after the last."""

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
        """The number of a lesson: mostly the current one, now and then one that was passed."""
        rng, current = np.random.default_rng(seed), min(len(self._passed), len(self._lessons) - 1)
        return int(rng.integers(current)) if current and rng.random() < REHEARSALS else current

    def report(self, lesson: int, episodes: int, won: int) -> None:
        """So many episodes of it were played and won."""
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
        """All lessons are passed."""
        return len(self._passed) == len(self._lessons)

    def standing(self) -> list[dict[str, Any]]:
        """The lessons that were passed: with how many episodes, when, and at which share of successes."""
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
    """Between the trainer and the rollouts: weights by version one way, batches the other.

    Several calls run in it at once (``max_concurrency``), as `push` waits while the trainer has more than it can take.

    Args:
        weights: version 0.
        room: how many batches wait here at most.
    """

    def __init__(self, weights: Weights, room: int) -> None:
        self._version, self._weights, self._room = 0, weights, room
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._rollouts: dict[int, dict[str, int]] = {}
        self._closed = False

    def publish(self, version: int, weights: Weights) -> None:
        """The trainer's next version. One who was thought dead and comes with an old one is not heard."""
        with self._changed:
            if version > self._version:
                self._version, self._weights = version, weights

    def fetch(self, known: int = -1) -> tuple[int, Weights] | None:
        """The newest weights and their version; None: it is the one that is ``known``."""
        with self._changed:
            return None if known == self._version else (self._version, self._weights)

    def begin(self, rollout: int) -> int:
        """A rollout begins; how often it has, with this time."""
        with self._changed:
            mine = self._rollouts.setdefault(rollout, {"begun": 0, "batches": 0, "episodes": 0})
            mine["begun"] += 1
            return mine["begun"]

    def push(self, rollout: int, batch: Batch) -> bool:
        """Leave a batch for the trainer, when there is room. False: it is over, nobody wants more."""
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
        """All batches that are here, as soon as there is one; nothing within that time: an empty list. None: it is
        over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._batches, within_s)
            batches = list(self._batches)
            self._batches.clear()
            self._changed.notify_all()
            return None if self._closed else batches

    def standing(self) -> dict[int, dict[str, int]]:
        """By rollout: how often it has begun, and what it has brought."""
        with self._changed:
            return {rollout: dict(counts) for rollout, counts in sorted(self._rollouts.items())}

    def close(self) -> None:
        """It is over: whoever waits here goes home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
