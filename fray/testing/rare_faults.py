"""Faults of directed scenarios: rare ones, and those that need a plan made for them. As `fray.testing.faults`.

What a restored backup has lost, or an hour without time, breaks promises of many operations with good reason; so these
happen in scenarios whose operations allow for them (`tests.simulation.directed_plans`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio

from fray.controller.accepted_tokens import CHECK_S, drop_previous_token, rotate_token
from fray.scheduler.state.unit_rows import UnitPhase
from fray.testing.faults import Fault, FaultTarget, Wait
from fray.testing.sim_cluster import CONTROLLER, RESTART_S

TOKEN_READ_S = 2 * CHECK_S
"""Seconds in which a controller has read its token file."""
DISK_TRIES_S = 3.0
"""Seconds between starts of a controller whose disk is full."""
DRIFT = 0.01
"""Largest drift of a clock, in seconds a second: 20 times that of a bad quartz."""
GONE_FOR_S = 65.0
"""Seconds after its deletion from which on a machine in a list is really there again: lists lag behind by less."""


async def machine_deleted_outside(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Delete a machine of the cloud by hand, one that Fray is draining if there is one: no list has it any more."""
    cloud, running = target.sim.cloud, target.sim.controller.running
    if cloud is None or running is None:
        return ""
    units = running.state.fleet.units.values()
    draining = [unit.name for unit in units if unit.phase is UnitPhase.DRAINING]
    on_their_way = [unit.name for unit in units if unit.phase is UnitPhase.SEEN]
    name = cloud.delete_outside(rng, draining or (on_their_way if rng.random() < 0.5 else ()))
    if name:
        with target.fault_history.trouble(*cloud.hosts(name)):
            await wait(span_s)
    return name


async def deleted_machine_is_back(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """List a deleted machine again, as a cloud whose deletion failed after it was accepted; no node runs on it.

    Only one that is deleted for the controller, too. If it never noticed that the machine was gone, it would wait for
    the silent node until its lease ends, which may be after the end of the scenario.
    """
    cloud, running = target.sim.cloud, target.sim.controller.running
    if cloud is None or running is None:
        return ""
    units = running.state.fleet.units.values()
    deleted = (UnitPhase.DELETING, UnitPhase.GONE)
    name = cloud.bring_back(rng, GONE_FOR_S, {unit.name for unit in units if unit.phase not in deleted})
    if name:
        with target.fault_history.trouble(*cloud.hosts(name)):
            await wait(span_s)
    return name


async def half_slices(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Bring up only one host of each slice, while the cloud works, has no lists, or does not even answer orders."""
    cloud = target.sim.cloud
    if cloud is None:
        return ""
    what = rng.choice(("works", "mute", "silent", "silent"))
    with target.fault_history.trouble():
        cloud.halves, cloud.mute, cloud.silent = True, what != "works", what == "silent"
        await wait(span_s)
        cloud.halves = cloud.mute = cloud.silent = False
    return what


async def unclear_answers(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Let the cloud fail to answer orders for machines, half of which it carries out."""
    cloud = target.sim.cloud
    if cloud is None:
        return ""
    with target.fault_history.trouble():
        cloud.unclear = True
        await wait(span_s)
        cloud.unclear = False
    return "half of the orders"


async def machine_moves(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Give a machine another address, with which its connections break."""
    machines = [machine for machine in target.sim.machines.values() if machine.up]
    if not machines:
        return ""
    machine = rng.choice(machines)
    with target.fault_history.trouble(machine.name):
        target.sim.addresses[machine.name] = address = f"10.0.{rng.randrange(256)}.{rng.randrange(1, 255)}"
        target.sim.network.drop_machines(machine.name, CONTROLLER)
        await wait(span_s)
    return f"{machine.name} to {address}"


async def store_restored(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Back up the store, and after a while lose it and start a controller on the backup."""
    controller = target.sim.controller
    if controller.running is None:
        return ""
    controller.back_up()
    await wait(span_s)
    # The machines, too: what ended since the backup is given up a second time.
    with target.fault_history.trouble(CONTROLLER, *target.sim.machines):
        await controller.restore()
        await trio.sleep(1.0)
    return f"{span_s:.1f} s old"


async def full_disk(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Let each save of the controller fail: it ends, and is started again until the disk has room."""
    controller = target.sim.controller
    if controller.running is None:
        return ""
    starts = controller.starts
    with target.fault_history.trouble(CONTROLLER):
        controller.is_disk_full = True
        with trio.move_on_after(60.0):
            await controller.wait_down()
        ends_at = trio.current_time() + span_s
        while trio.current_time() < ends_at:
            if await controller.try_to_start():
                target.sim.truth.breach("P7", "a controller started on a full disk")
                break
            await wait(min(DISK_TRIES_S, span_s))
        controller.is_disk_full = False
        await controller.start()
    return f"{controller.starts - starts} starts"


async def token_replaced(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Replace the cluster's token: the new one beside the old, then alone; each time all dial again."""
    file = target.sim.token_file
    if file is None:
        return ""
    for change in (partial(rotate_token, file, rng), partial(drop_previous_token, file)):
        change()
        await trio.sleep(TOKEN_READ_S)
        with target.fault_history.trouble(*target.sim.machines):
            for place in (*target.sim.machines, *(driver.name for driver in target.drivers())):
                target.sim.network.drop_machines(place, CONTROLLER)
            await wait(span_s)
    return str(Path(file).name)


async def clock_jumps(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Start the controller again, on a machine whose clock is an hour ahead of, or behind, that of the last, and
    drifts."""
    controller = target.sim.controller
    if controller.running is None:
        return ""
    jump_s, drift = rng.choice((-3600.0, 3600.0)), rng.uniform(-DRIFT, DRIFT)
    with target.fault_history.trouble(CONTROLLER):
        await controller.crash()
        target.sim.clock_jump_s += jump_s
        target.sim.clock_drift = drift
        await wait(min(span_s, 10.0))
        await controller.start()
    return f"by {jump_s:+.0f} s, and {drift:+.4f} s a second"


async def older_release(target: FaultTarget, rng: random.Random, span_s: float, wait: Wait) -> str:
    """Replace a machine's processes, or the controller, by those of an earlier release, and upgrade them after a while.

    They say of themselves what that release said; that they can do more is not used by others.
    """
    sim, machines = target.sim, [machine for machine in target.sim.machines.values() if machine.up]
    if rng.random() < 0.3 and sim.controller.running is not None:
        with target.fault_history.trouble(CONTROLLER):
            await _restart_controller(target, is_older=True)
        await wait(span_s)
        with target.fault_history.trouble(CONTROLLER):
            await _restart_controller(target, is_older=False)
        return CONTROLLER
    if not machines:
        return ""
    machine = rng.choice(machines)
    for is_older in (True, False):
        with target.fault_history.trouble(machine.name):
            machine.kill()
            (sim.older.add if is_older else sim.older.discard)(machine.name)
            await trio.sleep(RESTART_S)
            if not machine.up:
                machine.boot()
        await wait(span_s if is_older else 0.0)
    return machine.name


async def _restart_controller(target: FaultTarget, is_older: bool) -> None:
    await target.sim.controller.crash()
    (target.sim.older.add if is_older else target.sim.older.discard)(CONTROLLER)
    await target.sim.controller.start()


RARE_FAULTS: Mapping[str, Fault] = {
    "machine deleted outside": machine_deleted_outside,
    "deleted machine is back": deleted_machine_is_back,
    "unclear answers": unclear_answers,
    "half slices": half_slices,
    "machine moves": machine_moves,
    "store restored": store_restored,
    "full disk": full_disk,
    "token replaced": token_replaced,
    "clock jumps": clock_jumps,
    "older release": older_release,
}
