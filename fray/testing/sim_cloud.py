"""A cloud on the virtual clock: machines that take their time, run out, are taken away, and lists that lag behind.

It outlives controllers, and its machines are machines of the simulated house: a node runs on each that is there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import trio
from attrs import define, evolve, field

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.model.policy.policy import Amounts, TenantPolicy
from fray.model.resources import PortRange

if TYPE_CHECKING:
    from fray.scheduler.state.state import State
    from fray.testing.sim_cluster import SimCluster, SimMachine

PROVIDER = "sim"
CALL_S = (0.01, 1.5)
BOOT_S = (1.0, 25.0)
END_S = (0.5, 6.0)
LAG_S = 8.0
"""Lists are up to so old."""
LATE_S = 60.0
"""A cloud machine that no record wants may be there so long: until the next list, and its delete."""
PORTS = PortRange(21_000, 12)

GROUPS = (
    GroupConfig(
        name="cheap",
        provider=PROVIDER,
        cpu=2,
        memory="8GB",
        zones=("z1", "z2"),
        spot=True,
        max=3,
        price_per_hour=1.0,
        prices={"z2": 1.5},
        idle_s=15.0,
        boot_timeout_s=60.0,
    ),
    GroupConfig(
        name="sure",
        provider=PROVIDER,
        cpu=4,
        memory="16GB",
        min=1,
        buffer=1,
        max=3,
        price_per_hour=4.0,
        idle_s=15.0,
        boot_timeout_s=60.0,
    ),
)
TERMS = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=Amounts(cpu_milli=6000))
"""Of every driver, who is a user each."""
SPEND_LIMIT_PER_HOUR = 13.0


@define(eq=False)
class CloudMachine:
    """One of the cloud's."""

    seen: SeenMachine
    machine: SimMachine
    made_at: float
    shown_at: float
    """From then on lists have it."""
    ended_at: float | None = None
    hidden_at: float = float("inf")
    """From then on they have it no more."""


@define(eq=False)
class SimCloud:
    """Provider ``sim``, the same object for every life of the controller."""

    house: SimCluster
    rng: random.Random
    machines: dict[str, CloudMachine] = field(factory=dict)
    made: list[str] = field(factory=list)
    stocked_out: dict[str, ErrorKind] = field(factory=dict)
    """Zones that make nothing, and what they say."""
    hangs: bool = False
    mute: bool = False

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        pass

    async def create(self, request: MachineRequest) -> None:
        await self._call()
        if request.zone in self.stocked_out:
            raise ProviderError(
                self.stocked_out[request.zone], f"nothing to be had in {request.zone or 'the only zone'}"
            )
        if request.name in self.machines:
            return
        self.made.append(request.name)
        capacity = request.group.capacity(request.zone, request.name)
        machine = self.house.hire(request.name, evolve(capacity, ports=PORTS))
        seen = SeenMachine(request.name, request.group.name, request.zone, MachineState.CREATING)
        now = trio.current_time()
        made = self.machines[request.name] = CloudMachine(seen, machine, now, now + self.rng.uniform(0, LAG_S))
        self.house.nursery.start_soon(self._bring_up, made)
        await self._call()

    async def _bring_up(self, made: CloudMachine) -> None:
        self.house.enter(made.seen.name)
        await trio.sleep(self.rng.uniform(*BOOT_S))
        if made.ended_at is None:
            made.seen = evolve(made.seen, state=MachineState.RUNNING)
            made.machine.boot()

    async def delete(self, name: str, zone: str, group: str) -> None:
        await self._call()
        made = self.machines.get(name)
        if made is not None and made.hidden_at == float("inf"):
            self._end(made, MachineState.DELETING)
            made.hidden_at = trio.current_time() + self.rng.uniform(*END_S) + self.rng.uniform(0, LAG_S)

    def _end(self, made: CloudMachine, state: MachineState) -> None:
        made.seen = evolve(made.seen, state=state)
        if made.ended_at is None:
            made.ended_at = trio.current_time()
            self.house.fire(made.seen.name)

    async def list(self) -> Sequence[SeenMachine]:
        await self._call()
        if self.mute:
            raise ProviderError(ErrorKind.TRANSIENT, "the cloud says nothing today")
        now = trio.current_time()
        return [one.seen for one in self.machines.values() if one.shown_at <= now < one.hidden_at]

    async def _call(self) -> None:
        """Cancelled at any point of it, as a call that is given up."""
        await trio.sleep(self.rng.uniform(*CALL_S))
        while self.hangs:  # noqa: ASYNC110
            await trio.sleep(1)

    async def aclose(self) -> None:
        pass

    # Trouble, and the truth

    def living(self) -> Sequence[CloudMachine]:
        return [one for one in self.machines.values() if one.ended_at is None]

    def preempt(self, rng: random.Random) -> str:
        """Take one away; its name, or nothing if none runs."""
        running = [one for one in self.living() if one.seen.state is MachineState.RUNNING]
        if not running:
            return ""
        taken = rng.choice(running)
        self._end(taken, MachineState.PREEMPTED)
        return taken.seen.name

    def breaches(self, state: State, *, calm: bool) -> Iterator[str]:
        """Machines that nobody knows, and that were made twice; ``calm``: machines that nobody needs."""
        now = trio.current_time()
        for name in self.made:
            if self.made.count(name) > 1:
                yield f"{name} was made twice"
        units = state.fleet.units
        for one in self.living():
            unit = units.get(one.seen.name)
            if (unit is None or unit.phase.value == "gone") and now - one.made_at > LATE_S and calm:
                yield f"{one.seen.name} is there, and the law knows nothing of it"
        if calm:
            for config in GROUPS:
                here = [one.seen.name for one in self.living() if one.seen.group == config.name]
                if len(here) > config.min + config.buffer:
                    yield f"group {config.name} has nothing to do and has {here}"
