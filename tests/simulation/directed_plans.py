"""Plans of directed scenarios: what happens too seldom, or fits too badly, in random ones (`scenario_plans`).

A directed scenario is drawn from its seed, too, with kinds of acts and faults, and times, that belong to it. A campaign
runs one for every few random scenarios.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from fray.model.resources import Device
from fray.testing.seed import Seed
from tests.simulation.scenario_plans import PlannedAct, PlannedFault, ScenarioPlan, draw_plan, draw_span_s

HOUR_S = 3600.0
LATEST_S = HOUR_S + 150.0
"""Latest begin of an act after an hour of suspend: later ones meet actors that were lost, which no fault explains."""
Draw = Callable[[random.Random], ScenarioPlan]


def _plan(
    rng: random.Random,
    acts: Sequence[tuple[float, str]],
    faults: Sequence[tuple[float, str, float]],
    *,
    cloud: bool = False,
    slices: bool = False,
    drivers: int = 1,
) -> ScenarioPlan:
    """Return a plan on random machines: acts as (time, kind), faults as (time, kind, seconds)."""
    planned = tuple(
        PlannedAct(round(at_s, 3), rng.randrange(drivers), kind, number)
        for number, (at_s, kind) in enumerate(sorted(acts))
    )
    return evolve(
        draw_plan(rng, acts=0, faults=0),
        drivers=drivers,
        cloud=cloud,
        declares=cloud,
        slices=slices,
        on_disk=False,
        terms={},
        acts=planned,
        faults=tuple(
            PlannedFault(round(at_s, 3), kind, round(span_s, 3), number)
            for number, (at_s, kind, span_s) in enumerate(sorted(faults))
        ),
    )


def _times(rng: random.Random, count: int, until_s: float, since_s: float = 0.0) -> list[float]:
    return [rng.uniform(since_s, until_s) for _ in range(count)]


def _changing_cloud(rng: random.Random) -> ScenarioPlan:
    """Machines come and go in each way that a cloud has, while jobs need them."""
    # More crowds fill the queue of a driver, up to its quota, for longer than the scenario waits for its end.
    jobs = ("crowd", "long batch", "background job", "value job", "value job", "gang", "kept units")
    kinds = (
        *("machine deleted outside", "machine deleted outside", "deleted machine is back", "unclear answers"),
        *("cloud trouble", "machine taken away", "group scaled", "crash controller"),
    )
    acts = [(at_s, rng.choice(jobs)) for at_s in _times(rng, 40, 300.0)]
    faults = [(at_s, rng.choice(kinds), draw_span_s(rng) / 4) for at_s in _times(rng, 24, 300.0, 15.0)]
    return _plan(rng, acts, faults, cloud=True, drivers=2)


def _half_slices(rng: random.Random) -> ScenarioPlan:
    """Slices are wanted, of which some hosts never come up; jobs without chips run on the others."""
    begins_s = (10.0, 140.0, 270.0)
    # As few crowds as above.
    others = ("background job", "background job", "long batch", "long batch", "long batch", "crowd")
    acts = [(at_s, rng.choice(others)) for at_s in _times(rng, 30, 350.0)]
    acts += [(at_s, "slice gang") for begin_s in begins_s for at_s in _times(rng, 10, begin_s + 25.0, begin_s)]
    faults = [(begin_s, "half slices", rng.uniform(80.0, 110.0)) for begin_s in begins_s]
    return _plan(rng, acts, faults, cloud=True, slices=True, drivers=2)


def _moving_machines(rng: random.Random) -> ScenarioPlan:
    """Machines get other addresses while their actors are called."""
    kinds = ("make an actor", "calls", "both ways", "pipelined calls", "relayed call", "gang", "background job")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 60, 120.0)]
    faults = [
        (at_s, rng.choice(("machine moves", "machine moves", "partition", "break connections")), rng.uniform(0.0, 20.0))
        for at_s in _times(rng, 16, 120.0, 5.0)
    ]
    return _plan(rng, acts, faults, drivers=2)


def _restored_store(rng: random.Random) -> ScenarioPlan:
    """A backup takes the place of the store; attempts of all phases end meanwhile, and nothing is launched."""
    jobs = ("packaged job", "packaged job", "background job", "cancelled scope", "cancelled scope", "value job", "gang")
    acts, faults = [], []
    for number in range(3):
        begin_s = 120.0 * number
        acts += [(at_s, rng.choice(jobs)) for at_s in _times(rng, 12, begin_s + 10.0, begin_s)]
        faults.append((begin_s + 10.0 + rng.uniform(0.0, 0.2), "store restored", rng.uniform(2.0, 30.0)))
    return _plan(rng, acts, faults)


def _hour_of_suspend(rng: random.Random) -> ScenarioPlan:
    """A machine, the driver or the controller stands still for an hour."""
    kinds = ("make an actor", "calls", "repeatable call", "background job", "value job", "gang", "detached job")
    acts = [(at_s, rng.choice(kinds)) for at_s in (*_times(rng, 25, 60.0), *_times(rng, 25, LATEST_S, HOUR_S))]
    who = rng.choice(("stop machine", "stop driver", "stop controller"))
    return _plan(rng, acts, [(rng.uniform(20.0, 60.0), who, HOUR_S)], drivers=2)


def _mixed_releases(rng: random.Random) -> ScenarioPlan:
    """Machines, or the controller, run an earlier release for a while."""
    kinds = (
        *("make an actor", "calls", "both ways", "relayed call", "background job", "value job", "gang", "device gang"),
        *("followed job", "forwarded port", "stateful actor", "open reservation", "job group", "machine let in"),
    )
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 70, 150.0)]
    faults = [(at_s, "older release", rng.uniform(5.0, 40.0)) for at_s in _times(rng, 6, 150.0, 5.0)]
    faults += [(at_s, "machine moves", 1.0) for at_s in _times(rng, 3, 150.0, 5.0)]
    return _plan(rng, acts, faults, drivers=2)


def _full_disk(rng: random.Random) -> ScenarioPlan:
    """The disk of the controller is full, again and again."""
    kinds = ("calls", "background job", "value job", "gang", "stumbling job", "stateful actor", "detached job")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 60, 150.0)]
    faults = [(at_s, "full disk", rng.uniform(0.0, 30.0)) for at_s in (10.0, 60.0, 120.0)]
    return _plan(rng, acts, faults, drivers=2)


def _replaced_token(rng: random.Random) -> ScenarioPlan:
    """The cluster's token is replaced, with crashes in between."""
    kinds = ("make an actor", "calls", "background job", "value job", "gang", "machine let in")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 40, 150.0)]
    faults = [(at_s, "token replaced", rng.uniform(0.0, 8.0)) for at_s in (5.0, 70.0)]
    others = ("crash controller", "restart node", "driver vanishes", "break connections")
    faults += [(at_s, rng.choice(others), rng.uniform(0.1, 3.0)) for at_s in _times(rng, 5, 150.0, 5.0)]
    return _plan(rng, acts, faults, drivers=2)


def _other_clock(rng: random.Random) -> ScenarioPlan:
    """Controllers start on machines whose clocks differ by an hour, while jobs wait for times to come."""
    kinds = ("stumbling job", "stumbling job", "crash loop", "value job", "background job", "calls", "impatient job")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 60, 150.0)]
    faults = [(at_s, "clock jumps", rng.uniform(0.1, 10.0)) for at_s in (20.0, 60.0, 100.0)]
    faults += [(at_s, rng.choice(("kill machine", "cut off")), rng.uniform(1.0, 60.0)) for at_s in (30.0, 80.0, 110.0)]
    return _plan(rng, acts, faults, drivers=2)


def _late_machines(rng: random.Random) -> ScenarioPlan:
    """Machines are out of reach until they are suspect, and come back with actors that have started elsewhere."""
    kinds = ("stateful actor", "stateful actor", "stateful actor", "make an actor", "calls", "value job", "gang")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 50, 150.0)]
    faults = [
        (at_s, rng.choice(("cut off", "partition", "stop machine")), rng.uniform(35.0, 100.0))
        for at_s in _times(rng, 8, 150.0, 5.0)
    ]
    return _plan(rng, acts, faults, drivers=2)


def _busy_devices(rng: random.Random) -> ScenarioPlan:
    """Gangs with accelerators follow one another, while processes that were left hold some of these."""
    acts = [(at_s, rng.choice(("device gang", "device gang", "value job"))) for at_s in _times(rng, 60, 150.0)]
    kinds = ("machine moves", "break connections", "crash controller", "crash at save", "restart node")
    faults = [(at_s, rng.choice(kinds), rng.uniform(0.1, 5.0)) for at_s in _times(rng, 8, 150.0, 5.0)]
    plan = _plan(rng, acts, faults, drivers=2)
    gpus = tuple(Device(f"gpu-{number}", "gpu", "h100") for number in range(4))
    return evolve(plan, machines=tuple(evolve(machine, devices=gpus) for machine in plan.machines))


def _beyond_the_lease(rng: random.Random) -> ScenarioPlan:
    """Machines are out of reach for longer than their lease, while their actors start elsewhere."""
    acts = [(at_s, rng.choice(("stateful actor", "stateful actor", "calls"))) for at_s in _times(rng, 25, 60.0)]
    acts += [(at_s, rng.choice(("value job", "stateful actor"))) for at_s in _times(rng, 15, 400.0, 60.0)]
    faults = [(at_s, "cut off", rng.uniform(320.0, 400.0)) for at_s in _times(rng, 2, 60.0, 20.0)]
    return _plan(rng, acts, faults)


def _silent_members(rng: random.Random) -> ScenarioPlan:
    """Members of gangs are killed while others of them are on machines that are out of reach."""
    acts = [(at_s, "gang on machines") for at_s in _times(rng, 10, 100.0)]
    acts += [(at_s, "value job") for at_s in _times(rng, 10, 150.0)]
    faults = [(at_s, "cut off", rng.uniform(45.0, 90.0)) for at_s in _times(rng, 3, 110.0, 10.0)]
    faults += [(at_s, "kill process", 0.1) for at_s in _times(rng, 15, 180.0, 15.0)]
    return _plan(rng, acts, faults)


def _withdrawn_claims(rng: random.Random) -> ScenarioPlan:
    """Jobs preempt others, and are withdrawn before these have ended."""
    # More of them wait for each other for longer than the scenario waits for its end.
    acts = [(at_s, "long batch") for at_s in _times(rng, 12, 40.0)]
    acts += [(at_s, "withdrawn gang") for at_s in _times(rng, 30, 120.0, 10.0)]
    kinds = ("break connections", "crash controller", "crash at save", "driver leaves")
    faults = [(at_s, rng.choice(kinds), rng.uniform(0.1, 5.0)) for at_s in _times(rng, 6, 150.0, 5.0)]
    return _plan(rng, acts, faults, drivers=2)


def _requeued_jobs(rng: random.Random) -> ScenarioPlan:
    """Running jobs are requeued, while requests and answers are lost and machines are out of reach."""
    acts = [(at_s, rng.choice(("requeued job", "requeued job", "value job"))) for at_s in _times(rng, 40, 150.0)]
    kinds = ("break connections", "crash controller", "crash at save", "cut off", "kill process", "restart node")
    faults = [(at_s, rng.choice(kinds), rng.uniform(0.1, 20.0)) for at_s in _times(rng, 20, 150.0, 5.0)]
    return _plan(rng, acts, faults, drivers=2)


def _lost_units(rng: random.Random) -> ScenarioPlan:
    """Reservations lose machines, again and again."""
    kinds = ("kept units", "kept units", "kept units", "open reservation", "shrinking reservation")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 35, 150.0)]
    # Where there is room, a reservation grows anyway.
    crowd = ("production gang", "production gang", "long batch")
    acts += [(at_s, rng.choice(crowd)) for at_s in _times(rng, 35, 150.0)]
    others = ("restart node", "restart node", "kill machine", "power cut", "crash at save")
    faults = [(at_s, rng.choice(others), rng.uniform(0.1, 30.0)) for at_s in _times(rng, 14, 150.0, 5.0)]
    return _plan(rng, acts, faults, drivers=2)


def _sleeping_callers(rng: random.Random) -> ScenarioPlan:
    """Machines are stopped for longer than hosts keep the sessions of callers, whose actors then send calls again."""
    kinds = ("call between machines", "call between machines", "calls", "value job")
    acts = [(at_s, rng.choice(kinds)) for at_s in _times(rng, 30, 150.0)]
    faults = [(at_s, "stop machine", rng.uniform(100.0, 200.0)) for at_s in (30.0, 100.0, 170.0)]
    return _plan(rng, acts, faults)


def _devices_of_late_machines(rng: random.Random) -> ScenarioPlan:
    """Machines come back with actors that have started elsewhere, while jobs wait for the devices of these."""
    acts = [(at_s, "device actor") for at_s in _times(rng, 20, 100.0)]
    acts += [(at_s, "device gang") for at_s in _times(rng, 50, 220.0, 20.0)]
    kinds = ("cut off", "cut off", "stop machine")
    faults = [(at_s, rng.choice(kinds), rng.uniform(35.0, 60.0)) for at_s in _times(rng, 10, 170.0, 5.0)]
    plan = _plan(rng, acts, faults, drivers=2)
    gpus = tuple(Device(f"gpu-{number}", "gpu", "h100") for number in range(2))
    return evolve(plan, machines=tuple(evolve(machine, devices=gpus) for machine in plan.machines))


DIRECTED: Mapping[str, Draw] = {
    "changing cloud": _changing_cloud,
    "half slices": _half_slices,
    "restored store": _restored_store,
    "moving machines": _moving_machines,
    "hour of suspend": _hour_of_suspend,
    "mixed releases": _mixed_releases,
    "full disk": _full_disk,
    "replaced token": _replaced_token,
    "other clock": _other_clock,
    "late machines": _late_machines,
    "busy devices": _busy_devices,
    "beyond the lease": _beyond_the_lease,
    "silent members": _silent_members,
    "withdrawn claims": _withdrawn_claims,
    "requeued jobs": _requeued_jobs,
    "lost units": _lost_units,
    "sleeping callers": _sleeping_callers,
    "devices of late machines": _devices_of_late_machines,
}


def draw_directed(seed: int, name: str) -> ScenarioPlan:
    """Return the directed scenario of this name and seed."""
    return DIRECTED[name](Seed(seed).stream(f"directed/{name}"))
