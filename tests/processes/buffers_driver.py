"""A driver that can be killed: a cluster of real processes, an actor that lends and borrows; says both directories."""

from __future__ import annotations

from typing import Any

import numpy
import trio

import fray
from fray.net.buffers import shared_memory


class Stateful:
    """All sync: on its process's main thread."""

    def __init__(self) -> None:
        self.kept: Any = None

    def keep(self, value: Any) -> None:
        self.kept = value

    def get(self) -> Any:
        return self.kept

    def directory(self) -> str:
        pool = shared_memory.known_pool()
        return "" if pool is None else pool.directory


async def main() -> None:
    async with fray.open_cluster("machine?nodes=2&cpu=1") as cluster, cluster.open_scope("lenders") as scope:
        actor = await scope.create_actor(Stateful)
        await actor.keep(numpy.ones(1_000_000))
        mine = await actor.get()
        pool = shared_memory.known_pool()
        assert pool is not None
        assert mine[-1] == 1
        print(pool.directory, await actor.directory(), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
