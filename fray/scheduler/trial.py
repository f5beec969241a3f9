"""What a pool would say if something were otherwise: whatever is tried within is as before afterwards.

Only what `Pool` offers to everybody is used, in pairs: what was released is taken again, what was placed is given back.
The order of port numbers and the pool's counters are put back too, so that nobody can tell that somebody has asked.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

from fray.model.ids import NodeName
from fray.model.resources import Demand
from fray.scheduler.asks import Ask, Placed
from fray.scheduler.match import Pool


class Trial:
    """Made by `pretending`."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._released: list[tuple[NodeName, Demand, tuple[str, ...], tuple[int, ...]]] = []

    def release(self, node: NodeName, demand: Demand, devices: tuple[str, ...], ports: Sequence[int]) -> None:
        """As if an attempt had ended."""
        self.pool.release(node, demand, devices, ports)
        self._released.append((node, demand, devices, tuple(ports)))

    def place(self, ask: Ask, closed: Container[NodeName] = ()) -> tuple[Placed, ...] | None:
        """Where it would go; nothing is taken."""
        placed = self.pool.place(ask, closed)
        if placed is not None:
            self.pool.give_back(ask, placed)
        return placed

    def undo(self) -> None:
        while self._released:
            self.pool.take(*self._released.pop())


@contextmanager
def pretending(pool: Pool, now: float) -> Iterator[Trial]:
    """While entered, the pool may be asked; it is left as it was."""
    counters = pool.now, pool.version, pool.changes
    freed = dict(pool.freed)
    ports = {name: machine.ports.mark() for name, machine in pool.machines.items()}
    trial = Trial(pool)
    pool.now = now
    try:
        yield trial
    finally:
        trial.undo()
        for name, mark in ports.items():
            pool.machines[name].ports.reset(mark)
        pool.freed.clear()
        pool.freed.update(freed)
        pool.now, pool.version, pool.changes = counters
