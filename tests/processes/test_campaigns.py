"""The campaigns of `bench` in short: deaths leave nothing behind, and mixed load makes nothing grow."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import restarts, soak
from bench.faults.campaign import Campaign
from bench.faults.lab import Lab


async def test_sixty_deaths_of_an_actor_leave_nothing_behind() -> None:
    found = await restarts.campaign(60)
    assert found["left"] == {}
    assert found["to_next_answer_ms"]["p50"] < 1000


async def test_twenty_seconds_of_mixed_load_make_nothing_grow() -> None:
    found = await soak.soak(0.3, load_s=2.0)
    assert found["left"] == {}
    assert set(found["done"]) == {activity.__name__ for activity in soak.ACTIVITIES}
    assert all(count > 0 for count in found["done"].values())


@pytest.mark.within(600)
async def test_fifteen_random_kills_of_whatever_there_is_leave_nothing_behind(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    try:
        found = await Campaign(lab, random.Random(15)).run(15)
    finally:
        lab.close()
    assert found["broken"] == {}
    assert found["jobs"]["accepted"] > 15
    assert found["history"]["increment, value"] > 5, "the history is not empty"
    assert found["history"]["run, value"] > 15
