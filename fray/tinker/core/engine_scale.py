"""Number of engines of one base model: when another one starts, a model moves to another one, and an idle one ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attrs import field, frozen, validators

QUEUED = 0.5
"""Turns that wait on average, from which on the work of an engine counts as queued."""


@frozen
class EngineRange:
    """Number of engines of each base model, and when it changes.

    Attributes:
        least: engines that do not end while they are idle.
        most: engines at a time.
        queue_s: seconds for which work has to queue, while no engine is free, before another one is started.
        idle_s: seconds without work after which an engine ends.

    Raises:
        ValueError: ``least`` is below 1, ``most`` below ``least``, or a time not above 0.
    """

    least: int = field(default=1, validator=validators.ge(1))
    most: int = field(default=1)
    queue_s: float = field(default=10.0, validator=validators.gt(0))
    idle_s: float = field(default=300.0, validator=validators.gt(0))

    def __attrs_post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"most={self.most}: expected at least least={self.least}")

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most


@frozen
class EngineSeen:
    """An engine at one look.

    Attributes:
        number: of the engine among those of its base model.
        is_up: it answers.
        has_failed: it is not started again.
        models: that it trains.
        active: those of them that had requests within the last `EngineRange.queue_s`.
        queued: turns that have waited on average since the look before; samples without a place in a batch count, too.
        has_work: requests are under way or wait.
        seconds: of computation since it was started.
    """

    number: int
    is_up: bool = True
    has_failed: bool = False
    models: int = 0
    active: int = 0
    queued: float = 0.0
    has_work: bool = False
    seconds: float = 0.0

    @property
    def is_free(self) -> bool:
        """Return whether work that queues at another engine can go here."""
        return not self.has_work and not self.active


@frozen
class StartEngine:
    """Start another engine."""


@frozen
class EndEngine:
    """End an engine, which has no model and no work."""

    number: int


@frozen
class MoveModel:
    """Have a model of one engine trained by another: one that is active if there is one."""

    source: int
    target: int


ScaleStep: TypeAlias = StartEngine | EndEngine | MoveModel | None


class EngineScale:
    """Decides, look by look, what changes.

    - Work that queues for ``queue_s`` while no engine is free starts another one, up to ``most``. Until that is up, or
      has failed, no further one is started, and then work has to queue for ``queue_s`` again.
    - While an engine's work queues, models move from it to one with at least two active models fewer.
    - An engine that had no work for ``idle_s`` ends, down to ``least``; the one with the fewest models first. Its
      models move to others before. One that is being started ends if no work has queued for ``idle_s``.

    Args:
        rules: bounds and times.
    """

    def __init__(self, rules: EngineRange) -> None:
        self._rules = rules
        self._queued_since: float | None = None
        self._up: frozenset[int] = frozenset()
        self._seconds: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        self._ending: int | None = None
        """Engine whose models move away, after which it ends."""

    def step(self, now: float, engines: Sequence[EngineSeen]) -> ScaleStep:
        """Return what changes now; what was returned before is done, or refused.

        Args:
            now: seconds.
            engines: all that there are, those that are being started or have failed included.
        """
        self._note(now, engines)
        if len(engines) < self._rules.least:
            return StartEngine()
        is_starting = not all(each.is_up or each.has_failed for each in engines)
        if self._is_queued_for(now) and len(engines) < self._rules.most and not is_starting:
            return StartEngine()
        return self._balance(engines) or self._shrink(now, engines)

    def refused(self, now: float, number: int) -> None:
        """Note that a model could not move from an engine: it does not end before ``idle_s`` have passed again."""
        self._ending = None
        self._idle_since[number] = now

    def explanation(self, now: float, count: int, starting: str = "") -> str:
        """Return why there are ``count`` engines, in words; empty: no work queues.

        Args:
            now: seconds.
            count: engines.
            starting: what one of them waits for that is being started; empty: none is.
        """
        if self._queued_since is None:
            return ""
        text = f"requests have queued for {now - self._queued_since:.0f} s"
        if starting:
            return f"{text}; {starting}"
        if count >= self._rules.most:
            return f"{text}; there are no more than {self._rules.most} engines"
        return f"{text}; after {self._rules.queue_s:g} s another engine is started"

    def _note(self, now: float, engines: Sequence[EngineSeen]) -> None:
        up = [each for each in engines if each.is_up]
        is_queued = any(each.queued >= QUEUED for each in up) and not any(each.is_free for each in up)
        if (names := frozenset(each.number for each in up)) != self._up or not is_queued:
            self._up, self._queued_since = names, None
        if is_queued and self._queued_since is None:
            self._queued_since = now
        idle = {}
        for each in engines:
            if each.is_up or each.has_failed:
                # What it computes for a model that moves away is not work that keeps it.
                has_worked = each.number != self._ending and each.seconds != self._seconds.get(each.number, 0.0)
                is_idle = not each.has_work and not has_worked
            else:
                is_idle = bool(up) and not is_queued and not each.has_work
            if is_idle:
                idle[each.number] = self._idle_since.get(each.number, now)
        self._idle_since, self._seconds = idle, {each.number: each.seconds for each in engines}
        if self._ending not in idle or is_queued:
            self._ending = None

    def _is_queued_for(self, now: float) -> bool:
        return self._queued_since is not None and now - self._queued_since >= self._rules.queue_s

    def _balance(self, engines: Sequence[EngineSeen]) -> ScaleStep:
        up = [each for each in engines if each.is_up]
        queued = [each for each in up if each.queued >= QUEUED]
        if not queued:
            return None
        source = max(queued, key=lambda each: (each.active, -each.number))
        target = min(up, key=lambda each: (each.active, each.models, each.number))
        return MoveModel(source.number, target.number) if source.active >= target.active + 2 else None

    def _shrink(self, now: float, engines: Sequence[EngineSeen]) -> ScaleStep:
        if self._queued_since is not None:
            return None
        if self._ending is None:
            self._ending = self._to_end(now, engines)
        if self._ending is None:
            return None
        ending = next(each for each in engines if each.number == self._ending)
        if not ending.models:
            self._ending = None
            return EndEngine(ending.number)
        others = [each for each in engines if each.is_up and each is not ending]
        target = min(others, key=lambda each: (each.models, each.number))
        return MoveModel(ending.number, target.number)

    def _to_end(self, now: float, engines: Sequence[EngineSeen]) -> int | None:
        left = sum(each.is_up for each in engines)

        def may_end(each: EngineSeen) -> bool:
            if now - self._idle_since.get(each.number, now) < self._rules.idle_s:
                return False
            # The models of one that does not answer cannot move; those of one that has failed have failed with it.
            others = left - each.is_up
            is_needed = others < (1 if each.has_failed else self._rules.least)
            return not is_needed and (each.is_up or not each.models)

        ends = [each for each in engines if may_end(each)]
        return min(ends, key=lambda each: (each.models, -each.number)).number if ends else None
