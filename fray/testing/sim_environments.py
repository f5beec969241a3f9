"""Environments without packages: a simulated machine makes each once, in its time, and some not at all."""

from __future__ import annotations

import random

import trio
from attrs import define, field

from fray.model.environment import EnvironmentSpec

BUILD_S = (0.5, 20.0)
BROKEN = "broken"
"""A package that no resolver finds."""


@define
class SimEnvironments:
    """Of one machine, over all lives of its node."""

    rng: random.Random
    ready: set[EnvironmentSpec] = field(factory=set)
    locks: dict[EnvironmentSpec, trio.Lock] = field(factory=dict)
    built: list[EnvironmentSpec] = field(factory=list)

    async def have(self, spec: EnvironmentSpec) -> str:
        """Return once it is there; says why it cannot be. Cancelled: the next one who waits begins anew."""
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
