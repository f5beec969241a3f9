"""Environments without packages: a simulated machine builds each once, in random time, and some fail."""

from __future__ import annotations

import random

import trio
from attrs import define, field

from fray.model.environment import EnvironmentSpec

BUILD_S = (0.5, 20.0)
BROKEN = "broken"
"""Name of a package that cannot be resolved."""


@define
class SimEnvironments:
    """Environments of one machine, over all incarnations of its node."""

    rng: random.Random
    ready: set[EnvironmentSpec] = field(factory=set)
    locks: dict[EnvironmentSpec, trio.Lock] = field(factory=dict)
    built: list[EnvironmentSpec] = field(factory=list)

    async def prepare(self, spec: EnvironmentSpec) -> str:
        """Build an environment unless it exists; return an error or "". After a cancellation the next waiter builds
        it."""
        key = EnvironmentSpec(extras=spec.extras, pip_packages=spec.pip_packages)
        if key == EnvironmentSpec():
            return ""
        async with self.locks.setdefault(key, trio.Lock()):
            if key not in self.ready:
                await trio.sleep(self.rng.uniform(*BUILD_S))
                if BROKEN in key.pip_packages:
                    return f"no solution: {BROKEN} was not found"
                self.ready.add(key)
                self.built.append(key)
        return ""
