"""Number of engines: bounds, and when one starts, is relieved of a model, or ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from fray.tinker.core.engine_scale import EndEngine, EngineRange, EngineScale, EngineSeen, MoveModel, StartEngine

RULES = EngineRange(1, 3, queue_s=10, idle_s=60)


def steps_of(looks: list[list[EngineSeen]], rules: EngineRange = RULES, period_s: float = 1.0) -> list[Any]:
    """Return the steps of each look, with its time, that change something."""
    scale = EngineScale(rules)
    found = [(at * period_s, scale.step(at * period_s, engines)) for at, engines in enumerate(looks)]
    return [each for each in found if each[1] is not None]


def busy(number: int = 0, queued: float = 1.0, **facts: Any) -> EngineSeen:
    return EngineSeen(number, queued=queued, has_work=True, **facts)


def idle(number: int = 0, **facts: Any) -> EngineSeen:
    return EngineSeen(number, **facts)


def test_work_that_queues_for_the_whole_time_starts_another_engine() -> None:
    assert steps_of([[busy()]] * 11) == [(10.0, StartEngine())]
    assert steps_of([[busy(0), busy(1, queued=0.0)]] * 11) == [(10.0, StartEngine())], "no engine is free"


def test_a_pause_of_the_queue_begins_its_time_again() -> None:
    assert steps_of([*[[busy()]] * 10, [busy(queued=0.2)], *[[busy()]] * 10]) == []


@pytest.mark.parametrize(
    "engines",
    [
        # It is being started, and may wait for room.
        [busy(0), EngineSeen(1, is_up=False)],
        # The other one has time for what queues here.
        [busy(0), idle(1)],
        [busy(0), busy(1), busy(2)],
        [EngineSeen(0, is_up=False, has_work=True)],
    ],
    ids=["one is being started", "one is free", "no more than three", "none is up"],
)
def test_no_engine_starts(engines: list[EngineSeen]) -> None:
    assert steps_of([engines] * 50) == []


def test_an_engine_that_has_come_has_the_whole_time_before_another_starts() -> None:
    before, after = [busy(0), EngineSeen(1, is_up=False)], [busy(0), busy(1)]
    assert steps_of([*[before] * 15, *[after] * 11]) == [(25.0, StartEngine())]


def test_models_move_to_an_engine_with_two_active_ones_fewer_while_work_queues() -> None:
    assert steps_of([[busy(0, models=3, active=3), idle(1)]]) == [(0.0, MoveModel(0, 1))]
    assert steps_of([[busy(0, models=2, active=2), busy(1, 0.0, models=1, active=1)]]) == []
    assert steps_of([[busy(0, 0.0, models=3, active=3), idle(1)]]) == [], "nothing waits"
    assert steps_of([[busy(0, models=9, active=1), idle(1)]]) == [], "models without requests take no time"


def test_an_idle_engine_ends_after_its_models_have_moved_and_the_last_stays() -> None:
    rules = EngineRange(1, 3, idle_s=5)
    scale = EngineScale(rules)
    engines = [busy(0, 0.0, models=2), idle(1, models=1)]
    assert [scale.step(float(at), engines) for at in range(6)] == [*[None] * 5, MoveModel(1, 0)]
    # The snapshot took time of this engine.
    engines = [busy(0, 0.0, models=3), idle(1, seconds=0.5)]
    assert scale.step(6.0, engines) == EndEngine(1)
    assert [scale.step(7.0 + at, [idle(0, models=3)]) for at in range(20)] == [None] * 20


def test_an_engine_whose_model_cannot_move_stays_and_is_asked_again_later() -> None:
    scale = EngineScale(EngineRange(1, 2, idle_s=5))
    engines = [busy(0, 0.0), idle(1, models=1)]
    assert [scale.step(float(at), engines) for at in range(6)][-1] == MoveModel(1, 0)
    scale.refused(5.0, 1)
    assert [scale.step(6.0 + at, engines) for at in range(5)] == [*[None] * 4, MoveModel(1, 0)]


@pytest.mark.parametrize(
    "engine",
    [
        busy(1, 0.0),
        # It is lost, and is started again with its models.
        EngineSeen(1, is_up=False, models=1),
    ],
)
def test_an_engine_with_work_or_models_to_come_does_not_end(engine: EngineSeen) -> None:
    assert steps_of([[busy(0, 0.0), engine]] * 100) == []


def test_an_engine_that_was_used_between_two_looks_is_not_idle() -> None:
    assert steps_of([[busy(0, 0.0), idle(1, seconds=at / 10)] for at in range(200)]) == []


def test_an_engine_that_waits_for_room_ends_when_nothing_queues_any_more() -> None:
    looks = [[busy(0, 0.0), EngineSeen(1, is_up=False)]] * 61
    assert steps_of(looks) == [(60.0, EndEngine(1))]


def test_a_failed_engine_makes_room_for_another() -> None:
    looks = [[busy(0), busy(1), EngineSeen(2, is_up=False, has_failed=True)]] * 61
    assert steps_of(looks)[-1:] == [], "while work queues it counts"
    looks = [[busy(0, 0.0), busy(1, 0.0), EngineSeen(2, is_up=False, has_failed=True)]] * 61
    assert steps_of(looks) == [(60.0, EndEngine(2))]


def test_the_explanation_says_how_long_work_queues_and_what_follows() -> None:
    scale = EngineScale(RULES)
    assert scale.explanation(0.0, 1) == ""
    scale.step(1.0, [busy()])
    assert scale.explanation(4.0, 1) == "requests have queued for 3 s; after 10 s another engine is started"
    assert scale.explanation(4.0, 2, "it needs room") == "requests have queued for 3 s; it needs room"
    assert scale.explanation(4.0, 3) == "requests have queued for 3 s; there are no more than 3 engines"


@pytest.mark.parametrize("numbers", [{"least": 0}, {"least": 2, "most": 1}, {"queue_s": 0}, {"idle_s": -1}])
def test_a_range_that_allows_nothing_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(numbers))):
        EngineRange(**numbers)


@define
class Engines:
    """Engines that come up some seconds after they are started, and models with requests at some times."""

    rules: EngineRange
    rng: random.Random
    up_at: dict[int, float] = field(factory=dict)
    homes: dict[int, int] = field(factory=dict)
    """Engine of each model."""
    active: set[int] = field(factory=set)
    seconds: dict[int, float] = field(factory=dict)
    changes: list[tuple[float, Any]] = field(factory=list)

    def run(self, until: float, scale: EngineScale, now: float = 0.0) -> float:
        while len(self.up_at) < self.rules.least:
            self.up_at[len(self.up_at)] = now
        while now < until:
            for number, at in self.up_at.items():
                if at <= now and any(self.homes[model] == number for model in self.active):
                    self.seconds[number] = self.seconds.get(number, 0.0) + 1.0
            self.take(now, scale.step(now, [self.seen(number, now) for number in sorted(self.up_at)]))
            now += 1.0
        return now

    def seen(self, number: int, now: float) -> EngineSeen:
        mine = [model for model, home in self.homes.items() if home == number]
        working = [model for model in mine if model in self.active]
        is_up = self.up_at[number] <= now
        queued = max(0, len(working) - 1) if is_up else 0.0
        seconds = self.seconds.get(number, 0.0)
        return EngineSeen(number, is_up, False, len(mine), len(working), queued, bool(working), seconds)

    def take(self, now: float, step: Any) -> None:
        if isinstance(step, StartEngine):
            number = next(each for each in range(9) if each not in self.up_at)
            self.up_at[number] = now + self.rng.uniform(1, 40)
        elif isinstance(step, EndEngine):
            assert step.number not in self.homes.values(), "it holds no model"
            del self.up_at[step.number]
        elif isinstance(step, MoveModel):
            assert self.up_at[step.target] <= now
            mine = [model for model, home in self.homes.items() if home == step.source]
            self.homes[max(mine, key=lambda each: each in self.active)] = step.target
        if isinstance(step, StartEngine | EndEngine):
            self.changes.append((now, step))
        assert self.rules.least <= len(self.up_at) <= self.rules.most


@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.randoms())
def test_engines_follow_the_load_within_their_bounds_and_come_to_rest(
    least: int, more: int, loads: list[int], rng: random.Random
) -> None:
    rules = EngineRange(least, least + more, queue_s=10, idle_s=60)
    engines, scale, now = Engines(rules, rng), EngineScale(rules), 0.0
    engines.homes = dict.fromkeys(range(6), 0)
    for load in [*loads, 0]:
        engines.active = set(rng.sample(range(6), load))
        now = engines.run(now + 1_000, scale, now)
        assert all(at < now - 200 for at, _ in engines.changes), "no number is left and reached again and again"
        working = [engines.homes[model] for model in engines.active]
        busiest = max((working.count(number) for number in engines.up_at), default=0)
        assert busiest <= 1 or len(engines.up_at) == rules.most, "what waits has had more engines"
        if len(engines.up_at) == rules.most:
            assert busiest <= 1 + load // rules.most
    assert len(engines.up_at) == rules.least
