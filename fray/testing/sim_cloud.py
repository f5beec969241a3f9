"""Simulated cloud on the virtual clock: slow machines, stock-outs, preemptions, and lists that lag behind.

It survives controllers, and its machines are machines of the simulated cluster: a node runs on each.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Protocol

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
from fray.model.resources import Capacity, PortRange
from fray.scheduler.autoscaler.plan import idle_since
from fray.scheduler.state.state import State


class CloudHost(Protocol):
    """Machine that the simulated cluster runs for the cloud."""

    def boot(self) -> None:
        """Start a node on it."""


class CloudSite(Protocol):
    """Part of the simulated cluster that the cloud uses."""

    nursery: trio.Nursery

    @property
    def machines(self) -> Mapping[str, CloudHost]:
        """Return its machines by name."""

    def add_machine(self, name: str, capacity: Capacity) -> CloudHost:
        """Add a machine, which does not run yet."""

    def remove_machine(self, name: str) -> None:
        """Remove a machine for good, with all processes there."""

    def enter(self, machine: str) -> None:
        """Make the current task a task of this machine."""


PROVIDER = "sim"
CALL_S = (0.01, 1.5)
BOOT_S = (1.0, 25.0)
END_S = (0.5, 6.0)
LAG_S = 8.0
"""Largest age of a list."""
UNRECORDED_LIMIT_S = 60.0
"""Longest life of a machine without a record: until the next list, and its deletion."""
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
SLICES = GroupConfig(
    name="pods",
    provider=PROVIDER,
    tpu="v4-16",
    cpu=2,
    memory="8GB",
    max=2,
    price_per_hour=2.0,
    idle_s=15.0,
    boot_timeout_s=60.0,
)
"""Group of slices of two hosts, in scenarios that have it."""
TERMS = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=Amounts(cpu_milli=6000))
"""Tenant policy of every driver, each of which is a separate user."""
SPEND_LIMIT_PER_HOUR = 13.0
DELETED_WITHIN_S = 10.0
"""Seconds from the end of a machine's idle time within which it is deleted, without faults."""


@define(eq=False)
class CloudMachine:
    """One machine of the cloud, or a slice with its hosts."""

    seen: SeenMachine
    hosts: Sequence[str]
    """Names of its hosts."""
    made_at: float
    shown_at: float
    """Time from which lists contain it."""
    ended_at: float | None = None
    hidden_at: float = float("inf")
    """Time from which lists no longer contain it."""


@define(eq=False)
class SimCloud:
    """Provider ``sim``, the same object for every start of the controller."""

    site: CloudSite
    rng: random.Random
    machines: dict[str, CloudMachine] = field(factory=dict)
    made: list[str] = field(factory=list)
    stocked_out: dict[str, ErrorKind] = field(factory=dict)
    """Zones that refuse requests, with the error."""
    hangs: bool = False
    mute: bool = False
    groups: Sequence[GroupConfig] = GROUPS
    halves: bool = False
    """Set while only the first host of a slice comes up."""
    silent: bool = False
    """Set while orders for machines are carried out, and not answered."""
    unclear: bool = False
    """Set while no order for a machine is answered, whether it is carried out or not."""

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        pass

    async def create(self, request: MachineRequest) -> None:
        await self._call()
        if request.zone in self.stocked_out:
            raise ProviderError(self.stocked_out[request.zone], f"no capacity in {request.zone or 'the only zone'}")
        if request.name in self.machines:
            return
        if self.unclear and self.rng.random() < 0.5:
            raise ProviderError(ErrorKind.TRANSIENT, "the connection to the cloud was lost")
        self.made.append(request.name)
        group, name = request.group, request.name
        hosts = [name] if group.hosts == 1 else [f"{name}-{number}" for number in range(group.hosts)]
        for number, host in enumerate(hosts):
            self.site.add_machine(host, evolve(group.capacity(request.zone, name, number), ports=PORTS))
        seen = SeenMachine(name, group.name, request.zone, MachineState.CREATING, hosts=group.hosts)
        now = trio.current_time()
        made = self.machines[name] = CloudMachine(seen, hosts, now, now + self.rng.uniform(0, LAG_S))
        self.site.nursery.start_soon(self._bring_up, made)
        await self._call()
        while self.silent:  # noqa: ASYNC110
            await trio.sleep(1)
        if self.unclear:
            raise ProviderError(ErrorKind.TRANSIENT, "the connection to the cloud was lost")

    async def _bring_up(self, made: CloudMachine) -> None:
        self.site.enter(made.seen.name)
        await trio.sleep(self.rng.uniform(*BOOT_S))
        if made.ended_at is None:
            made.seen = evolve(made.seen, state=MachineState.RUNNING)
            for host in made.hosts[:1] if self.halves else made.hosts:
                self.site.machines[host].boot()

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
            for host in made.hosts:
                self.site.remove_machine(host)

    async def list(self) -> Sequence[SeenMachine]:
        await self._call()
        if self.mute:
            raise ProviderError(ErrorKind.TRANSIENT, "the cloud does not answer")
        now = trio.current_time()
        return [machine.seen for machine in self.machines.values() if machine.shown_at <= now < machine.hidden_at]

    async def _call(self) -> None:
        """Take the time of a call; may be cancelled at any point, like an abandoned call."""
        await trio.sleep(self.rng.uniform(*CALL_S))
        while self.hangs:  # noqa: ASYNC110
            await trio.sleep(1)

    async def aclose(self) -> None:
        pass

    # Called by faults and checks

    def living(self) -> Sequence[CloudMachine]:
        return [machine for machine in self.machines.values() if machine.ended_at is None]

    def hosts(self, name: str) -> Sequence[str]:
        """Return the names of the hosts of a machine or slice; none for another name."""
        return self.machines[name].hosts if name in self.machines else ()

    def preempt(self, rng: random.Random) -> str:
        """Preempt a machine; return its name, or "" if none is running."""
        running = [machine for machine in self.living() if machine.seen.state is MachineState.RUNNING]
        if not running:
            return ""
        taken = rng.choice(running)
        self._end(taken, MachineState.PREEMPTED)
        return taken.seen.name

    def delete_outside(self, rng: random.Random, preferred: Sequence[str] = ()) -> str:
        """Delete a machine that was listed, so that no list has it any more; return its name, or "" without one."""
        now = trio.current_time()
        listed = [machine for machine in self.living() if machine.shown_at <= now]
        liked = [machine for machine in listed if machine.seen.name in preferred]
        if not listed:
            return ""
        gone = rng.choice(liked or listed)
        self._end(gone, MachineState.DELETING)
        gone.hidden_at = now
        return gone.seen.name

    def bring_back(self, rng: random.Random, hidden_s: float, unnoticed: Container[str]) -> str:
        """List a machine again that was deleted and in no list for so long; return its name, or "" without one.

        Args:
            unnoticed: names of those that stay deleted: the scheduler has not yet recorded it.
        """
        hidden_since = trio.current_time() - hidden_s
        gone = [
            machine
            for machine in self.machines.values()
            if machine.hidden_at <= hidden_since and machine.seen.name not in unnoticed
        ]
        if not gone:
            return ""
        back = rng.choice(gone)
        back.seen, back.ended_at, back.hidden_at = evolve(back.seen, state=MachineState.RUNNING), None, float("inf")
        return back.seen.name

    def breaches(self, state: State, *, calm: bool) -> Iterator[str]:
        """Yield violations: unknown machines, and machines made twice; if ``calm``, also machines without a use."""
        now = trio.current_time()
        for name in self.made:
            if self.made.count(name) > 1:
                yield f"{name} was made twice"
        units = state.fleet.units
        for machine in self.living():
            unit = units.get(machine.seen.name)
            if (unit is None or unit.phase.value == "gone") and now - machine.made_at > UNRECORDED_LIMIT_S and calm:
                yield f"{machine.seen.name} exists, and the scheduler has no record of it"
        if calm:
            for config in self.groups:
                present = [machine.seen.name for machine in self.living() if machine.seen.group == config.name]
                # A scenario without faults may end within the idle time of a machine that its last jobs have used.
                since = state.now - config.idle_s - DELETED_WITHIN_S
                unused = [name for name in present if name not in units or idle_since(state, units[name]) < since]
                if unused and len(present) > config.min + config.buffer:
                    yield f"group {config.name} is idle and has {present}"
