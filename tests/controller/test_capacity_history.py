"""The capacity over time: recorded once a minute, thinned, bounded, and given as means that are compared with plain
ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from fray.controller.history import capacity as module
from fray.controller.history.capacity import FINE_S, KEPT_PART, PERIOD_S, mean_capacity
from fray.controller.store import Store
from fray.errors import InvalidRequest
from fray.model.messages.history import CapacityHistory, CapacitySample, GetCapacity
from fray.scheduler.explain.capacity import capacity_samples
from tests.support.controller import spec, stage

AMOUNTS = ("total", "used", "reserved", "idle", "quarantined", "closed")


def sample(at: float, kind: str = "cpu", zone: str = "", used: float = 0.0, total: float = 4.0) -> CapacitySample:
    return CapacitySample(at=at, kind=kind, zone=zone, total=total, used=used, idle=total - used)


def times(store: Store) -> list[float]:
    return [row[0] for row in store._db.execute("SELECT at FROM past_capacity ORDER BY id")]


def read(store: Store, since: float, until: float, period_s: float) -> list[CapacitySample]:
    """Return the samples of all pages."""
    found: list[CapacitySample] = []
    while True:
        page, since = mean_capacity(store._db, store.capacity.rows_between(since, until), period_s)
        found += page
        if not since:
            return found


# The table


def test_samples_are_there_again_in_a_store_that_was_made_without_the_table(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store._db.execute("DROP TABLE past_capacity")
    store.close()
    store = Store(tmp_path / "store")
    store.save(capacity=[sample(60.0, used=1.5), sample(60.0, "gpu:h100", "a")])
    store.close()
    store = Store(tmp_path / "store")
    assert read(store, 0.0, 100.0, 60.0) == [sample(60.0, used=1.5), sample(60.0, "gpu:h100", "a")]
    store.close()


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_oldest_rows_make_room(tmp_path: Path, beyond: int) -> None:
    store = Store(tmp_path / "store", history_limit=2_000)
    # In one minute, so that none of them is thinned out; it is looked after once in 1,000 rows.
    for number in range(3_000):
        store.save(capacity=[sample(FINE_S + number / 100)])
    assert len(times(store)) == 2_000
    assert times(store)[0] == FINE_S + 10.0
    for number in range(999 + beyond):
        store.save(capacity=[sample(FINE_S + 30 + number / 100)])
    assert len(times(store)) == (2_999 if not beyond else 2_000)
    store.close()


def test_of_what_is_older_than_a_day_each_tenth_minute_stays() -> None:
    store = Store.memory()
    minutes = 3 * 1_440
    for minute in range(minutes):
        store.save(capacity=[sample(minute * PERIOD_S + 0.5)])
    # It was thinned when the last thousand was reached.
    edge = 3_999 * PERIOD_S + 0.5 - FINE_S
    expected = [
        minute * PERIOD_S + 0.5
        for minute in range(minutes)
        if minute % KEPT_PART == 0 or minute * PERIOD_S + 0.5 >= edge
    ]
    assert times(store) == expected


def test_means_over_periods_are_those_of_the_samples_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    store, rows = Store.memory(), []
    for minute in range(200):
        # Machines come and go: a zone is not in every sample, and some minutes have none.
        taken = [
            sample(minute * 60.0, kind, zone, float(rng.randint(0, 4)))
            for kind in ("cpu", "gpu:h100")
            for zone in ("", "a")
            if rng.random() < 0.7
        ]
        rows += taken
        store.save(capacity=taken)
    for since, until, period_s in ((0.0, 12_000.0, 60.0), (600.0, 9_000.0, 600.0), (120.0, 11_000.0, 1_234.0)):
        chosen = [one for one in rows if since <= one.at < until]
        expected: dict[tuple[float, str, str], dict[str, float]] = {}
        for one in chosen:
            begin = one.at // period_s * period_s
            moments = {other.at for other in chosen if other.at // period_s * period_s == begin}
            sums = expected.setdefault((begin, one.kind, one.zone), dict.fromkeys(AMOUNTS, 0.0))
            for amount in AMOUNTS:
                sums[amount] += getattr(one, amount) / len(moments)
        monkeypatch.setattr(module, "ROWS_LIMIT", 9)
        found = read(store, since, until, period_s)
        assert [(one.at, one.kind, one.zone) for one in found] == sorted(expected)
        for one in found:
            for amount, value in expected[one.at, one.kind, one.zone].items():
                assert getattr(one, amount) == pytest.approx(value)


@pytest.mark.parametrize("rows", [4, 5])
def test_what_does_not_fit_into_a_reply_is_got_with_the_next_one(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(module, "ROWS_LIMIT", 4)
    store = Store.memory()
    for number in range(rows):
        store.save(capacity=[sample(number * 60.0)])
    page, next_at = mean_capacity(store._db, store.capacity.rows_between(0.0, 1e9), 60.0)
    assert (len(page), next_at) == (4, 0.0 if rows == 4 else 240.0)


# The controller


async def test_each_minute_is_recorded_as_the_scheduler_knows_it(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        node = await cluster.node("n1")
        state, clock = cluster.controller.state, cluster.controller.loop.current_time

        async def history(**more: Any) -> CapacityHistory:
            found = await driver.ask(GetCapacity(since=0.0, until=4e9, **more))
            assert isinstance(found, CapacityHistory)
            return found

        begin = clock()
        await trio.sleep(150)
        idle = capacity_samples(state, clock())
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await trio.sleep(120)
        busy = capacity_samples(state, clock())
        assert [one.used for one in busy if one.kind == "cpu"] == [1.0]
        node.succeed("work-1:0:0")
        await driver.job_ended("work-1")
        await trio.sleep(60)
        found = await history()
        assert found.current == capacity_samples(state, clock())
        cpu = [one for one in found.samples if one.kind == "cpu"]
        first = (begin // 60 + 1) * 60
        assert [one.at for one in cpu] == [first + 60 * number for number in range(len(cpu))]
        assert len(cpu) == int((clock() - first) // 60) + 1
        known = {evolve(one, at=0.0) for one in (*idle, *busy)}
        assert {evolve(one, at=0.0) for one in found.samples} == known
        assert {one.used for one in cpu} == {0.0, 1.0}
        for period_s in (59.0, 1e12, -60.0):
            with pytest.raises(InvalidRequest, match="must be 60 to"):
                await history(period_s=period_s)
