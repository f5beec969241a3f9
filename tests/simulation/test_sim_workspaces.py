"""Workspaces in transfer while connections, machines and controllers on their way fail."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve

from fray.model.workspace import read_manifest, write_manifest
from fray.testing.sim_workspaces import SimChunkCache, version
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import direct_plan


@pytest.mark.parametrize("seed", range(3))
def test_jobs_have_the_workspace_they_name_whatever_fails_in_transfer(seed: int) -> None:
    faults = [
        (0.2, "break connections", 0.0),
        (1.5, "crash controller", 2.0),
        (5.2, "restart node", 1.0),
        (8.4, "cut off", 4.0),
        (14.6, "crash at save", 1.0),
        (18.3, "break connections", 0.0),
        (20.5, "kill machine", 5.0),
    ]
    result = run_seed(seed, plan=direct_plan(["workspace job"] * 25, faults))
    assert not result.breaches, result.breaches
    assert sum(result.faults.values()) >= 5


def test_a_machine_that_would_start_with_another_workspace_is_found() -> None:
    one, other = version(1), version(2)
    cache = SimChunkCache({**one.data, **other.data})
    assert cache.damage(one.bundle, one.manifest) == ""
    assert cache.damage(one.bundle, other.manifest) == "it has another manifest"
    mixed = evolve(one.manifest, chunks=(other.manifest.chunks[0], *one.manifest.chunks[1:]))
    assert mixed == read_manifest(write_manifest(mixed))
    assert one.manifest.chunks[0] != other.manifest.chunks[0]


def test_versions_share_what_is_the_same() -> None:
    async def pieces() -> list[str]:
        cache = SimChunkCache(dict(version(10).data))
        return [piece.blob for piece in await cache.missing(version(11).manifest)]

    lacking = trio.run(pieces)
    assert 0 < len(lacking) < len(version(11).manifest.chunks)
