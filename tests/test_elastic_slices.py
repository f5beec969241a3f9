"""The elastic example: members join and leave as the reservation grows and shrinks, and training goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

import fray

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import elastic_slices


def test_training_goes_on_with_the_slices_there_are() -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with fray.open_cluster("machine?nodes=3&cpu=2") as cluster:
                sizes = await elastic_slices.train(cluster, 3)
        phases = [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]
        assert phases[-3:] == [3, 2, 3]

    trio.run(main)
