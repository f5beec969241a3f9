"""Garbage collector of a part of a run: tuned in a process of its own, and nowhere else."""

from __future__ import annotations

import gc

import fray
from fray.gc_tuning import THRESHOLDS
from fray.rl.process_start import loading


class Part:
    """Actor that loads something; async, so that a local cluster runs it in this process."""

    def __init__(self) -> None:
        self.before = gc.get_freeze_count(), gc.get_threshold()
        with loading():
            self.loaded = [[] for _ in range(1_000)]  # type: ignore[var-annotated]

    async def collector(self) -> tuple[int, tuple[int, int, int], bool]:
        return gc.get_freeze_count() - self.before[0], gc.get_threshold(), gc.isenabled()


async def test_what_a_process_of_its_own_has_loaded_is_frozen() -> None:
    async with fray.open_cluster("machine", logs=False) as cluster, cluster.open_scope("run") as scope:
        part = await scope.create_actor(Part)
        frozen, thresholds, is_enabled = await part.collector()
    assert frozen > 1_000
    assert thresholds == THRESHOLDS
    assert is_enabled


async def test_the_collector_of_a_users_process_stays_as_it_is() -> None:
    before = gc.get_threshold()
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        part = await scope.create_actor(Part)
        assert await part.collector() == (0, before, True)
