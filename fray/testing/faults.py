"""Faults of a simulated cluster, by name.

Each begins, lasts for its duration (or until the scenario calms), and is undone.

A fault chooses its target when it begins; without a target it reports that and does not count.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import trio
from attrs import evolve

from fray.model.policy.machine_groups import ErrorKind
from fray.model.policy.policy import Amounts, Policy, Preemption, TenantPolicy
from fray.model.specs import EndReason
from fray.scheduler.autoscaler.provider_events import is_unit_in_use
from fray.scheduler.effects import CordonRequested, GroupScaled, PolicyChanged, UncordonRequested
from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.state.state import State
from fray.scheduler.state.unit_rows import CloudUnit
from fray.testing.sim_cloud import GROUPS
from fray.testing.sim_cluster import (
    CONTROLLER,
    EPOCH_S,
    DriverProcess,
    SimCluster,
    SimMachine,
)

LEFT_WITHIN_S = 60.0
"""Seconds, beyond its `NodeConfig.drain_s`, in which a node that was asked to leave has ended."""
ORDERED_WITHIN_S = 600.0
"""Seconds for which an order is repeated until the controller has taken it."""
HEARD_WITHIN_S = 5.0
"""Seconds in which a controller without faults has taken an order, and planned by it."""

Wait = Callable[[float], Awaitable[None]]
"""Wait for so many seconds, or until all faults must end."""


EVERYWHERE = "everywhere"


class FaultHistory:
    """Places with active faults, and since when they have none: promises about reachable machines are judged by it."""

    def __init__(self) -> None:
        self._active: dict[str, int] = {}
        self._ended: dict[str, float] = {}
        self._log: list[tuple[tuple[str, ...], float, float]] = []

    @contextmanager
    def trouble(self, *places: str) -> Iterator[None]:
        """Mark places as unreachable while the block runs (`CONTROLLER`: all are). Always includes `EVERYWHERE`."""
        touched = dict.fromkeys((*places, EVERYWHERE))
        for place in touched:
            self._active[place] = self._active.get(place, 0) + 1
        began = trio.current_time()
        try:
            yield
        finally:
            self._log.append((tuple(touched), began, trio.current_time()))
            for place in touched:
                self._active[place] -= 1
                self._ended[place] = trio.current_time()

    def was_trouble(self, place: str, since: float, until: float, at_least_s: float = 0.0) -> bool:
        """Return whether a fault at a place overlapped a span of time and lasted long enough."""
        return any(
            place in places and began <= until and ended >= since and ended - began >= at_least_s
            for places, began, ended in self._log
        )

    def fine_since(self, *places: str) -> float | None:
        """Return since when all places are reachable; None: not now."""
        asked = dict.fromkeys((*places, CONTROLLER))
        if any(self._active.get(place) for place in asked):
            return None
        return max(self._ended.get(place, 0.0) for place in asked)


class FaultTarget(Protocol):
    """Parts of a scenario that faults use."""

    sim: SimCluster
    fault_history: FaultHistory

    def drivers(self) -> list[DriverProcess]:
        """Return the living drivers."""
        ...

    def ask_to_leave(self, driver: DriverProcess, how: str) -> None:
        """Make the driver end itself: ``leaves`` or ``fails``."""
        ...


Fault = Callable[[FaultTarget, random.Random, float, Wait], Awaitable[str]]
"""Begin, wait, undo; returns a description, or an empty string without a target."""


def _machines(target: FaultTarget) -> list[SimMachine]:
    return [machine for machine in target.sim.machines.values() if machine.up]


async def kill_machine(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait, silent: bool = False) -> str:
    """Kill node and jobs of a machine at once, and start it again after a while."""
    machines = _machines(target)
    if not machines:
        return ""
    machine = rng.choice(machines)
    with target.fault_history.trouble(machine.name):
        machine.kill(silent=silent)
        await wait(span_s)
        if not machine.up:
            machine.boot()
    return machine.name


async def power_cut(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Kill a machine without notice: connections stay half open."""
    return await kill_machine(target, rng, span_s, wait, silent=True)


async def restart_node(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """End a node's process, and its attempts with it; another incarnation starts."""
    return await kill_machine(target, rng, min(span_s, 2.0), wait)


async def kill_process(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Kill the process of one job."""
    for machine in rng.sample(_machines(target), len(_machines(target))):
        assert machine.launcher is not None
        living = [process_run.attempt_id for process_run in target.sim.truth.on(machine.name)]
        if living:
            attempt_id = rng.choice(living)
            with target.fault_history.trouble():
                machine.launcher.crash(attempt_id)
            return attempt_id
    return ""


async def _cut(target: FaultTarget, a: str, b: str, one_way: bool, span_s: float, wait: Wait) -> str:
    network = target.sim.network
    with target.fault_history.trouble(*(place for place in (a, b) if CONTROLLER in (a, b) and place != CONTROLLER)):
        network.cut(a, b, both=not one_way)
        await wait(span_s)
        network.heal(a, b)
    return f"{a} {'to' if one_way else 'and'} {b}"


async def partition(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Separate two machines (or a driver and a machine); both reach the controller."""
    places = [*target.sim.machines, *(driver.name for driver in target.drivers())]
    a, b = rng.sample(places, 2)
    return await _cut(target, a, b, rng.random() < 0.3, span_s, wait)


async def cut_off(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Separate a machine or a driver from the controller, in one or both directions."""
    places = [*target.sim.machines, *(driver.name for driver in target.drivers())]
    pair = [rng.choice(places), CONTROLLER]
    rng.shuffle(pair)
    return await _cut(target, pair[0], pair[1], rng.random() < 0.3, span_s, wait)


async def _stop(target: FaultTarget, machine: str, span_s: float, wait: Wait) -> str:
    with target.fault_history.trouble(machine):
        target.sim.freezer.freeze(machine)
        await wait(span_s)
        target.sim.freezer.thaw(machine)
    return machine


async def stop_machine(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Stop all processes of one machine (SIGSTOP), then continue them."""
    machines = _machines(target)
    return await _stop(target, rng.choice(machines).name, span_s, wait) if machines else ""


async def stop_driver(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Stop a driver (SIGSTOP), then continue it."""
    drivers = target.drivers()
    return await _stop(target, rng.choice(drivers).name, span_s, wait) if drivers else ""


async def stop_controller(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Stop the controller (SIGSTOP), then continue it."""
    return await _stop(target, CONTROLLER, span_s, wait)


async def break_connections(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Break all connections between two places, once; messages in flight are lost."""
    places = [*target.sim.machines, *(driver.name for driver in target.drivers()), CONTROLLER, CONTROLLER]
    a, b = rng.choice(places), rng.choice(places)
    with target.fault_history.trouble(a, b):
        count = target.sim.network.drop_machines(a, b)
    return f"{count} between {a} and {b}" if count else ""


async def crash_controller(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Kill the controller, and start another one on its store after a while."""
    controller = target.sim.controller
    if controller.running is None:
        return ""
    with target.fault_history.trouble(CONTROLLER):
        await controller.crash()
        await wait(min(span_s, 60.0))
        await controller.start()
    return f"start {controller.starts - 1}"


async def crash_at_save(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Kill the controller right before or right after a transaction, before its effects are sent."""
    controller = target.sim.controller
    if controller.running is None:
        return ""
    when = rng.choice(("before", "after"))
    with target.fault_history.trouble(CONTROLLER):
        controller.crash_at_save(when)
        with trio.move_on_after(30):
            await controller.wait_down()
        if controller.running is not None:
            controller.crash_at_save("")
            return ""
        await wait(min(span_s, 5.0))
        await controller.start()
    return f"{when} a save of start {controller.starts - 1}"


async def driver_vanishes(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Kill a driver."""
    drivers = target.drivers()
    if not drivers:
        return ""
    driver = rng.choice(drivers)
    with target.fault_history.trouble():
        driver.kill()
    return driver.name


async def driver_leaves(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """End a driver in order, or by an error of its own."""
    drivers = target.drivers()
    if not drivers:
        return ""
    driver, how = rng.choice(drivers), rng.choice(("leaves", "fails"))
    with target.fault_history.trouble():
        target.ask_to_leave(driver, how)
    return f"{driver.name} {how}"


async def slow_link(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Delay messages between the controller and one machine by seconds."""
    machine, delay_s = rng.choice(list(target.sim.machines)), rng.uniform(0.2, 4.0)
    slow = target.sim.network.slow
    with target.fault_history.trouble(machine):
        slow[machine] = delay_s
        await wait(span_s)
        slow.pop(machine, None)
    return f"{machine} by {delay_s:.1f} s"


async def bad_machine(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Kill every attempt that starts on one machine, until the end of the fault or a restart of the machine."""
    machines = _machines(target)
    if not machines:
        return ""
    machine = rng.choice(machines)
    launcher = machine.launcher
    assert launcher is not None
    with target.fault_history.trouble():
        launcher.bad = True
        await wait(span_s)
        launcher.bad = False
    return machine.name


async def out_of_service(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Cordon or drain a machine, and return it to service after a while."""
    name = rng.choice(list(target.sim.machines))
    drain, finish_s = rng.random() < 0.7, rng.choice((0.0, 0.0, span_s / 2))
    cordon = CordonRequested(session="", ref=0, nodes=(name,), reason="a fan is loud", drain=drain, finish_s=finish_s)
    if not await _send(target, cordon, 0.0):
        return ""
    with target.fault_history.trouble():
        await wait(span_s)
        await _send(target, UncordonRequested(session="", ref=0, nodes=(name,)), ORDERED_WITHIN_S)
    return f"{name} {'drained' if drain else 'cordoned'}"


async def _send(target: FaultTarget, event: CordonRequested | UncordonRequested, timeout_s: float) -> bool:
    """Send an event to the controller until it is applied; return False if that takes too long."""
    with trio.move_on_after(timeout_s):
        while not _post_until_applied(target, event):  # noqa: ASYNC110
            await trio.sleep(1)
        return True
    return _post_until_applied(target, event)


def _post_until_applied(target: FaultTarget, event: CordonRequested | UncordonRequested) -> bool:
    """Return whether the controller knows the machine, and the event has been applied or just sent."""
    running = target.sim.controller.running
    node = running.state.nodes.get(event.nodes[0]) if running is not None else None
    if running is None or node is None:
        return False
    is_so = (node.operator_cordon is not None) is isinstance(event, CordonRequested)
    # The controller may be stopped, with the order to cordon still unread: then the node only seems to be in service.
    if not is_so or isinstance(event, UncordonRequested):
        running.loop.post(event)
    return is_so or isinstance(event, CordonRequested)


async def cloud_trouble(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Make a cloud fail for a while: stock-out, quota, calls that hang, no lists."""
    cloud = target.sim.cloud
    if cloud is None:
        return ""
    what = rng.choice(("stockout", "quota", "hangs", "mute"))
    zone = rng.choice(("z1", "z2", ""))
    with target.fault_history.trouble():
        if what in ("hangs", "mute"):
            setattr(cloud, what, True)
            await wait(span_s)
            setattr(cloud, what, False)
        else:
            cloud.stocked_out[zone] = ErrorKind(what)
            await wait(span_s)
            cloud.stocked_out.pop(zone, None)
    return f"{what} {zone}"


async def machine_taken_away(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Preempt a machine of the cloud."""
    cloud = target.sim.cloud
    name = cloud.preempt(rng) if cloud is not None else ""
    if cloud is not None and name:
        with target.fault_history.trouble(*cloud.hosts(name)):
            await wait(span_s)
    return name


# Orders of operators -------------------------------------------------------------------------------------------------


def _is_fine(target: FaultTarget, since: float, *places: str) -> bool:
    """Return whether these places, and the controller, have had no fault since a time."""
    fine = target.fault_history.fine_since(*places)
    return fine is not None and fine <= since and target.sim.controller.running is not None


def _state(target: FaultTarget) -> State | None:
    running = target.sim.controller.running
    return running.state if running is not None else None


async def node_leaves(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Ask a node to shut down in order, and start it again after a while."""
    machines = _machines(target)
    if not machines:
        return ""
    machine = rng.choice(machines)
    # Operators close a machine before they shut it down; the cordon outlives the process.
    cordon = CordonRequested(session="", ref=0, nodes=(machine.name,), reason="a repair")
    is_cordoned = rng.random() < 0.3 and await _send(target, cordon, 0.0)
    launcher, asked = machine.launcher, trio.current_time()
    state, held = _state(target), list(target.sim.truth.on(machine.name))
    node = state.nodes.get(machine.name) if state is not None else None
    was_member = node is not None and node.phase is NodePhase.ALIVE
    with target.fault_history.trouble():
        machine.leave()
        with trio.move_on_after(machine.drain_s + LEFT_WITHIN_S):
            while machine.launcher is launcher:  # noqa: ASYNC110
                await trio.sleep(0.5)
        await trio.sleep(HEARD_WITHIN_S)
        # Removed: its provider has deleted it meanwhile.
        if was_member and node is not None and not machine.removed and _is_fine(target, asked, machine.name):
            _check_left(target, machine, asked, node.incarnation, [run.attempt_id for run in held])
        if machine.launcher is launcher:
            machine.kill()  # it could not reach its controller
    with target.fault_history.trouble(machine.name):
        await wait(span_s)
        if not machine.up:
            machine.boot()
    if is_cordoned:
        await _send(target, UncordonRequested(session="", ref=0, nodes=(machine.name,)), ORDERED_WITHIN_S)
    return f"{machine.name}, with {machine.drain_s:g} s for {len(held)} attempts"


def _check_left(target: FaultTarget, machine: SimMachine, asked: float, incarnation: str, held: list[str]) -> None:
    """Check that a node that was asked to leave got no more work, lost none, and is gone for its controller."""
    truth, name, state = target.sim.truth, machine.name, _state(target)
    assert state is not None
    if machine.up:
        truth.breach("P1", f"the node {name} was asked to leave at {asked:.1f}, and has not ended")
    for attempt in state.attempts.values():
        began = truth.processes.get(attempt.attempt_id)
        if attempt.node == name and attempt.incarnation == incarnation and began is not None:
            if attempt.placed_at - EPOCH_S > asked + HEARD_WITHIN_S:
                truth.breach(
                    "P6", f"{attempt.attempt_id} was placed on {name}, which was asked to leave at {asked:.1f}"
                )
            lost = attempt.outcome is not None and attempt.outcome.cause is EndReason.MACHINE_LOST
            if lost and attempt.attempt_id in held:
                truth.breach("P7", f"{attempt.attempt_id} counts as lost, and its node {name} has left in order")
    node = state.nodes.get(name)
    if node is not None and node.incarnation == incarnation and node.phase is not NodePhase.LOST:
        truth.breach("P3", f"the node {name} has left, and is {node.phase.value} for its controller")


async def policy_changed(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Write another policy for a while: quotas, machine groups, a limit of costs, and rules for preemption."""
    sim = target.sim
    before = sim.first_policy
    changed = _draw_policy(rng, before)
    with target.fault_history.trouble():
        await _use_policy(target, changed)
        await wait(span_s)
        await _use_policy(target, before)
    return f"{len(changed.groups)} groups, {changed.spend_limit_per_hour} an hour"


def _draw_policy(rng: random.Random, before: Policy) -> Policy:
    users = {
        user: TenantPolicy(
            weight=rng.choice((1.0, 3.0)),
            quota=rng.choice((None, Amounts(cpu_milli=rng.choice((1000, 4000))))),
            borrow=rng.choice((True, Amounts(cpu_milli=6000))),
        )
        for user in before.users
    }
    groups = (evolve(group, min=min(group.min, 1), max=rng.choice((1, group.max))) for group in before.groups)
    return evolve(
        before,
        users=users,
        groups=tuple(group for group in groups if rng.random() < 0.8),
        spend_limit_per_hour=rng.choice((before.spend_limit_per_hour, 5.0)),
        preemption=rng.choice((before.preemption, Preemption(shield_s=10.0, limit=1, period_s=60.0, patience_s=1.0))),
    )


async def _use_policy(target: FaultTarget, policy: Policy) -> None:
    """Write the policy, and order the controller to read it, until it has."""
    target.sim.policy = policy
    asked = trio.current_time()
    # Without end only if the controller ignores the order, which is recorded below.
    while target.sim.policy is policy and trio.current_time() < asked + ORDERED_WITHIN_S:
        running = target.sim.controller.running
        if running is not None and running.state.policy == policy:
            break
        if running is not None:
            target.sim.limits_ordered_at = trio.current_time()
            running.loop.post(PolicyChanged(policy=policy))
        await trio.sleep(HEARD_WITHIN_S)
        state = _state(target)
        if state is not None and state.policy != target.sim.policy and _is_fine(target, asked):
            target.sim.truth.breach("P7", f"the policy of {asked:.1f} is not the controller's")
    await trio.sleep(HEARD_WITHIN_S)
    for group in GROUPS if _is_fine(target, asked) and _has_followed(target) else ():
        _check_group(target, group.name)


def _has_followed(target: FaultTarget) -> bool:
    """Return whether the controller has had the time to follow the last order about machine groups, of any fault."""
    return trio.current_time() - target.sim.limits_ordered_at >= HEARD_WITHIN_S


def _check_group(target: FaultTarget, name: str) -> None:
    """Check that a group has no units beyond its maximum, which may have been lowered."""
    state = _state(target)
    assert state is not None
    config = next((group for group in target.sim.policy.groups if group.name == name), None)
    units, row = state.fleet.live_units(name), state.fleet.row(name)
    most = 0 if config is None else config.max if row.max is None else row.max
    if len(units) > most:
        target.sim.truth.breach("cloud", f"{len(units)} units of {name} are in service, its maximum is {most}")


async def group_scaled(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Set other limits of a machine group for a while."""
    state = _state(target)
    if target.sim.cloud is None or state is None:
        return ""
    # To lower a maximum matters where something runs.
    used = [group for group in GROUPS if any(unit.group == group.name for unit in _units_in_use(state))]
    group, (low, high) = rng.choice(used or GROUPS).name, rng.choice(((2, 3), (0, 0), (0, 0), (None, 1), (2, 2)))
    asked = trio.current_time()
    with target.fault_history.trouble():
        if not await _scale(target, group, low, high, HEARD_WITHIN_S):
            # It may still be read, or be saved already, by a controller that was stopped or has crashed.
            await _scale(target, group, None, None, ORDERED_WITHIN_S)
            return ""
        await trio.sleep(HEARD_WITHIN_S)
        if _is_fine(target, asked) and _has_followed(target):
            _check_group(target, group)
            _check_floor(target, group)
        await wait(span_s)
        await _scale(target, group, None, None, ORDERED_WITHIN_S)
    return f"{group} from {low} to {high}"


def _units_in_use(state: State) -> list[CloudUnit]:
    return [unit for unit in state.fleet.units.values() if is_unit_in_use(state, unit)]


async def _scale(target: FaultTarget, group: str, low: int | None, high: int | None, timeout_s: float) -> bool:
    """Set the limits, again until they are in the controller's state; return False if that takes too long."""
    is_sent = False
    with trio.move_on_after(timeout_s):
        while True:
            running = target.sim.controller.running
            row = running.state.fleet.groups.get(group) if running is not None else None
            # Sent in any case: a stopped controller may have an earlier order still to read.
            if is_sent and row is not None and (row.min, row.max) == (low, high):
                return True
            if running is not None:
                is_sent = True
                target.sim.limits_ordered_at = trio.current_time()
                running.loop.post(GroupScaled(session="", ref=0, group=group, min=low, max=high))
            await trio.sleep(1)
    return False


def _check_floor(target: FaultTarget, group: str) -> None:
    """Check that at least the minimum of a group's units is there or on its way, where nothing forbids it."""
    state, cloud = _state(target), target.sim.cloud
    assert state is not None
    assert cloud is not None
    fleet, config = state.fleet, state.fleet.group(group)
    hindered = cloud.stocked_out or cloud.hangs or cloud.mute or fleet.row(group).backoffs
    if config is None or hindered or config.provider not in fleet.listed_providers:
        return
    # What has just left frees a place below the minimum, and what it cost: the next plan uses both.
    if any(not unit.is_live and state.now - unit.since < HEARD_WITHIN_S for unit in fleet.units.values()):
        return
    limit = fleet.policy.spend_limit_per_hour
    dearest = max(config.price(zone) for zone in config.zones_in_order())
    if len(fleet.live_units(group)) < config.min and (limit is None or fleet.spent_per_hour() + dearest <= limit):
        count = len(fleet.live_units(group))
        target.sim.truth.breach(
            "cloud", f"{count} units of {group} are in service or requested, its min is {config.min}"
        )


FAULTS: Mapping[str, Fault] = {
    "node leaves": node_leaves,
    "policy changed": policy_changed,
    "group scaled": group_scaled,
    "cloud trouble": cloud_trouble,
    "machine taken away": machine_taken_away,
    "bad machine": bad_machine,
    "out of service": out_of_service,
    "kill machine": kill_machine,
    "power cut": power_cut,
    "restart node": restart_node,
    "kill process": kill_process,
    "partition": partition,
    "cut off": cut_off,
    "stop machine": stop_machine,
    "stop driver": stop_driver,
    "stop controller": stop_controller,
    "break connections": break_connections,
    "crash controller": crash_controller,
    "crash at save": crash_at_save,
    "driver vanishes": driver_vanishes,
    "driver leaves": driver_leaves,
    "slow link": slow_link,
}
