"""Everything that goes wrong, by name: each fault is begun, lasts for its span (or until all is calmed), and is mended.

A fault chooses what it hits when it begins; one that finds nothing to hit says so and counts for nothing.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import trio

from fray.model.policy.machine_groups import ErrorKind
from fray.scheduler.effects import CordonRequested, UncordonRequested
from fray.testing.sim_cluster import (
    CONTROLLER,
    DriverProcess,
    SimCluster,
    SimMachine,
)

Rest = Callable[[float], Awaitable[None]]
"""Wait for so many seconds, or until everything shall be mended."""


EVERYWHERE = "everywhere"


class FaultHistory:
    """Which places are in trouble, and since when they are not: promises about reachable machines are judged by it."""

    def __init__(self) -> None:
        self._active: dict[str, int] = {}
        self._ended: dict[str, float] = {}
        self._log: list[tuple[tuple[str, ...], float, float]] = []

    @contextmanager
    def trouble(self, *places: str) -> Iterator[None]:
        """These places may not be reached (`CONTROLLER`: none may). Always part of `EVERYWHERE`."""
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
        """Whether there was any at a place within a span of time, one that lasted long enough."""
        return any(
            place in places and began <= until and ended >= since and ended - began >= at_least_s
            for places, began, ended in self._log
        )

    def fine_since(self, *places: str) -> float | None:
        """Since when all of them can be reached; None: not now."""
        asked = dict.fromkeys((*places, CONTROLLER))
        if any(self._active.get(place) for place in asked):
            return None
        return max(self._ended.get(place, 0.0) for place in asked)


class FaultTarget(Protocol):
    """What faults need of a story."""

    house: SimCluster
    weather: FaultHistory

    def drivers(self) -> list[DriverProcess]:
        """Those that live."""
        ...

    def ask_to_leave(self, driver: DriverProcess, how: str) -> None:
        """Have the driver end itself: ``leaves`` or ``fails``."""
        ...


Fault = Callable[[FaultTarget, random.Random, float, Rest], Awaitable[str]]
"""Begin, rest, mend; returns what it was, or an empty string if there was nothing to hit."""


def _machines(scene: FaultTarget) -> list[SimMachine]:
    return [machine for machine in scene.house.machines.values() if machine.up]


async def kill_machine(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest, silent: bool = False) -> str:
    """Node and jobs are gone at once; after a while the machine is started again."""
    machines = _machines(scene)
    if not machines:
        return ""
    machine = rng.choice(machines)
    with scene.weather.trouble(machine.name):
        machine.kill(silent=silent)
        await rest(span_s)
        if not machine.up:
            machine.boot()
    return machine.name


async def power_cut(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """The same, and nobody is told: connections stay half open."""
    return await kill_machine(scene, rng, span_s, rest, silent=True)


async def restart_node(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """The node's process ends, and its attempts with it; another incarnation starts."""
    return await kill_machine(scene, rng, min(span_s, 2.0), rest)


async def kill_process(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """SIGKILL to the process of one job."""
    for machine in rng.sample(_machines(scene), len(_machines(scene))):
        assert machine.launcher is not None
        living = [life.attempt_id for life in scene.house.truth.on(machine.name)]
        if living:
            attempt_id = rng.choice(living)
            with scene.weather.trouble():
                machine.launcher.crash(attempt_id)
            return attempt_id
    return ""


async def _cut(scene: FaultTarget, a: str, b: str, one_way: bool, span_s: float, rest: Rest) -> str:
    network = scene.house.network
    with scene.weather.trouble(*(place for place in (a, b) if CONTROLLER in (a, b) and place != CONTROLLER)):
        network.cut(a, b, both=not one_way)
        await rest(span_s)
        network.heal(a, b)
    return f"{a} {'to' if one_way else 'and'} {b}"


async def partition(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """Two machines (or a driver and a machine) cannot reach each other; both reach the controller."""
    places = [*scene.house.machines, *(driver.name for driver in scene.drivers())]
    a, b = rng.sample(places, 2)
    return await _cut(scene, a, b, rng.random() < 0.3, span_s, rest)


async def cut_off(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """A machine or a driver cannot reach the controller, or is not reached by it."""
    places = [*scene.house.machines, *(driver.name for driver in scene.drivers())]
    pair = [rng.choice(places), CONTROLLER]
    rng.shuffle(pair)
    return await _cut(scene, pair[0], pair[1], rng.random() < 0.3, span_s, rest)


async def _stop(scene: FaultTarget, machine: str, span_s: float, rest: Rest) -> str:
    with scene.weather.trouble(machine):
        scene.house.freezer.freeze(machine)
        await rest(span_s)
        scene.house.freezer.thaw(machine)
    return machine


async def stop_machine(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """SIGSTOP to everything on one machine, then SIGCONT."""
    machines = _machines(scene)
    return await _stop(scene, rng.choice(machines).name, span_s, rest) if machines else ""


async def stop_driver(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """SIGSTOP to a driver."""
    drivers = scene.drivers()
    return await _stop(scene, rng.choice(drivers).name, span_s, rest) if drivers else ""


async def stop_controller(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """SIGSTOP to the controller."""
    return await _stop(scene, CONTROLLER, span_s, rest)


async def break_connections(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """All connections between two places break, once; what was on its way is lost."""
    places = [*scene.house.machines, *(driver.name for driver in scene.drivers()), CONTROLLER, CONTROLLER]
    a, b = rng.choice(places), rng.choice(places)
    with scene.weather.trouble(a, b):
        count = scene.house.network.drop_machines(a, b)
    return f"{count} between {a} and {b}" if count else ""


async def crash_controller(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """SIGKILL to the controller; after a while another one starts on its store."""
    seat = scene.house.controller
    if seat.running is None:
        return ""
    with scene.weather.trouble(CONTROLLER):
        await seat.crash()
        await rest(min(span_s, 60.0))
        await seat.start()
    return f"life {seat.lives - 1}"


async def crash_at_save(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """The controller dies right before or right after a transaction, before anybody was told."""
    seat = scene.house.controller
    if seat.running is None:
        return ""
    when = rng.choice(("before", "after"))
    with scene.weather.trouble(CONTROLLER):
        seat.crash_at_save(when)
        with trio.move_on_after(30):
            await seat.wait_down()
        if seat.running is not None:
            seat.crash_at_save("")
            return ""
        await rest(min(span_s, 5.0))
        await seat.start()
    return f"{when} a save of life {seat.lives - 1}"


async def driver_vanishes(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """SIGKILL to a driver."""
    drivers = scene.drivers()
    if not drivers:
        return ""
    driver = rng.choice(drivers)
    with scene.weather.trouble():
        driver.kill()
    return driver.name


async def driver_leaves(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """A driver ends in order, or by an error of its own."""
    drivers = scene.drivers()
    if not drivers:
        return ""
    driver, how = rng.choice(drivers), rng.choice(("leaves", "fails"))
    with scene.weather.trouble():
        scene.ask_to_leave(driver, how)
    return f"{driver.name} {how}"


async def slow_link(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """Messages between the controller and one machine take seconds."""
    machine, delay_s = rng.choice(list(scene.house.machines)), rng.uniform(0.2, 4.0)
    slow = scene.house.network.slow
    with scene.weather.trouble(machine):
        slow[machine] = delay_s
        await rest(span_s)
        slow.pop(machine, None)
    return f"{machine} by {delay_s:.1f} s"


async def bad_machine(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """Whatever starts on one machine is killed at once, until it is mended or started anew."""
    machines = _machines(scene)
    if not machines:
        return ""
    machine = rng.choice(machines)
    launcher = machine.launcher
    assert launcher is not None
    with scene.weather.trouble():
        launcher.bad = True
        await rest(span_s)
        launcher.bad = False
    return machine.name


async def out_of_service(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """An operator cordons or drains a machine, and has it back after a while."""
    name = rng.choice(list(scene.house.machines))
    drain, finish_s = rng.random() < 0.7, rng.choice((0.0, 0.0, span_s / 2))
    mark = CordonRequested(session="", ref=0, nodes=(name,), reason="a fan is loud", drain=drain, finish_s=finish_s)
    if not await _ask(scene, mark, 0.0):
        return ""
    with scene.weather.trouble():
        await rest(span_s)
        await _ask(scene, UncordonRequested(session="", ref=0, nodes=(name,)), 600.0)
    return f"{name} {'drained' if drain else 'cordoned'}"


async def _ask(scene: FaultTarget, event: CordonRequested | UncordonRequested, patience_s: float) -> bool:
    """Tell the controller, once there is one and it has taken it; False: not in time."""
    with trio.move_on_after(patience_s):
        while not _obeys(scene, event):  # noqa: ASYNC110
            await trio.sleep(1)
        return True
    return _obeys(scene, event)


def _obeys(scene: FaultTarget, event: CordonRequested | UncordonRequested) -> bool:
    """It knows the machine, and the machine is as it was asked for."""
    running = scene.house.controller.running
    node = running.state.nodes.get(event.nodes[0]) if running is not None else None
    if running is None or node is None:
        return False
    is_so = (node.cordon is not None) is isinstance(event, CordonRequested)
    if not is_so:
        running.loop.post(event)
    return is_so or isinstance(event, CordonRequested)


async def cloud_trouble(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """Machines that can be had cannot be had for a while: stock-out, quota, calls that hang, no lists."""
    cloud = scene.house.cloud
    if cloud is None:
        return ""
    what = rng.choice(("stockout", "quota", "hangs", "mute"))
    zone = rng.choice(("z1", "z2", ""))
    with scene.weather.trouble():
        if what in ("hangs", "mute"):
            setattr(cloud, what, True)
            await rest(span_s)
            setattr(cloud, what, False)
        else:
            cloud.stocked_out[zone] = ErrorKind(what)
            await rest(span_s)
            cloud.stocked_out.pop(zone, None)
    return f"{what} {zone}"


async def machine_taken_away(scene: FaultTarget, rng: random.Random, span_s: float, rest: Rest) -> str:
    """The cloud takes a machine back."""
    cloud = scene.house.cloud
    name = cloud.preempt(rng) if cloud is not None else ""
    if name:
        with scene.weather.trouble(name):
            await rest(span_s)
    return name


FAULTS: Mapping[str, Fault] = {
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
