"""Asks with slices, any-of devices, localities and constraints: the pool against a twin that looks at everything."""

from __future__ import annotations

from copy import copy
from typing import Any

from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.model.constraints import Constraint
from fray.model.resources import Capacity, Demand, Device
from fray.scheduler.pool.machine import (
    MANY,
    Machine,
    fit,
    preference,
)
from fray.scheduler.pool.pool import MachinePool
from fray.scheduler.pool.requests import (
    MemberGroup,
    MemberPlacement,
    Placement,
    PlacementRequest,
    is_weightless,
)
from tests.support.scheduler import capacity

# The twin ------------------------------------------------------------------------------------------------------------

Machines = dict[str, Machine]


@frozen
class Given:
    """One member that was placed."""

    demand: Demand
    grant: MemberPlacement


def reference_machines(pool: MachinePool, held: list[Given]) -> Machines:
    machines = {m.name: Machine.empty(m.name, m.capacity, m.is_open) for m in pool.machines.values()}
    for machine in pool.machines.values():
        machines[machine.name].withhold(list(machine.withheld))
    for one in held:
        machines[one.grant.node].shift(one.demand, one.grant.devices, -1)
    return machines


def clone(machines: Machines) -> Machines:
    found = {name: copy(machine) for name, machine in machines.items()}
    for machine in found.values():
        machine.devices = {variant: list(ids) for variant, ids in machine.devices.items()}
        machine.withheld = dict(machine.withheld)
    return found


def is_there(machine: Machine, place: tuple[str, str] | None) -> bool:
    return place is None or machine.capacity.attributes.get(place[0], "") == place[1]


def reference_members(
    machines: Machines, need: Demand, members: int, closed: list[str], place: tuple[str, str] | None
) -> list[MemberPlacement] | None:
    """Member by member the best of all machines."""
    grants = []
    for _ in range(members):
        fitting = [m for m in machines.values() if m.name not in closed and is_there(m, place) and fit(need, m)]
        if not fitting:
            return None
        best = min(fitting, key=lambda machine: preference(need, machine))
        grant = fit(need, best)
        assert grant is not None
        best.shift(need, grant.devices, -1)
        grants.append(grant)
    return grants


def reference_slices(
    machines: Machines, need: Demand, hosts: int, closed: list[str], place: tuple[str, str] | None
) -> dict[tuple[str, str, str], list[Machine]]:
    """Whole slices that could be given now."""
    named: dict[tuple[str, str, str], list[Machine]] = {}
    for machine in machines.values():
        if machine.slice is not None and machine.is_open:
            named.setdefault(machine.slice, []).append(machine)
    found = {}
    for name, group in named.items():
        variants = {tuple(sorted(m.device_counts.items())) for m in group}
        if (
            len(group) == hosts
            and len({m.worker for m in group}) == hosts
            and all(fit(need, m) and m.name not in closed and is_there(m, place) for m in group)
            and len(variants) == 1
            and all(len(ids) == m.device_counts[v] for m in group for v, ids in m.devices.items())
        ):
            found[name] = sorted(group, key=lambda m: m.worker)
    return found


def reference_choice(usable: list[tuple[str, str, str]], wanted: int) -> list[tuple[str, str, str]] | None:
    """Choose from one zone, else from one region, else from anywhere: the place with the fewest, large zones first."""
    for width in (2, 1, 0):
        groups = [
            [one for one in usable if one[:width] == prefix] for prefix in sorted({one[:width] for one in usable})
        ]
        groups = [group for group in groups if len(group) >= wanted]
        if groups:
            best = min(groups, key=lambda group: (len(group), group[0]))
            sizes = {one[:2]: sum(other[:2] == one[:2] for other in best) for one in best}
            return sorted(sorted(best, key=lambda one: (-sizes[one[:2]], one))[:wanted])
    return None


def reference_part(
    machines: Machines, part: MemberGroup, closed: list[str], place: tuple[str, str] | None
) -> Placement | None:
    for choice, need in enumerate(part.choices):
        trial = clone(machines)
        if part.slice_hosts:
            usable = reference_slices(trial, need, part.slice_hosts, closed, place)
            chosen = reference_choice(sorted(usable), part.members // part.slice_hosts)
            grants = None if chosen is None else [fit(need, host) for name in chosen for host in usable[name]]
        else:
            grants = reference_members(trial, need, part.members, closed, place)
        if grants is not None:
            done = [grant for grant in grants if grant is not None]
            for grant in done:
                machines[grant.node].shift(need, grant.devices, -1)
            return Placement(tuple(done), choice)
    return None


def reference_room(machines: Machines, part: MemberGroup, place: tuple[str, str] | None) -> int:
    """Members of its choices that fit there now, each counted as if the others were not asked for."""
    count = 0
    for need in part.choices:
        trial = clone(machines)
        if part.slice_hosts:
            count += part.slice_hosts * len(reference_slices(trial, need, part.slice_hosts, [], place))
        elif is_weightless(need):
            count += MANY * sum(fit(need, m) is not None and is_there(m, place) for m in trial.values())
        else:
            while reference_members(trial, need, 1, [], place):
                count += 1
    return count


def hard(part: MemberGroup) -> tuple[int, int, int]:
    devices, cpus = (max(getattr(one, what) for one in part.choices) for what in ("device_count", "cpu_milli"))
    return (0 if part.slice_hosts else 1), -devices, -cpus


def reference_request(machines: Machines, ask: PlacementRequest, closed: list[str]) -> tuple[Placement, ...] | None:
    values = sorted({m.capacity.attributes.get(ask.same, "") for m in machines.values() if m.is_open})
    places: list[tuple[str, str] | None] = [(ask.same, value) for value in values] if ask.same else [None]
    found = []
    for place in places:
        trial, placed = clone(machines), {}
        for index in sorted(range(len(ask.parts)), key=lambda index: hard(ask.parts[index])):
            placed[index] = reference_part(trial, ask.parts[index], closed, place)
        if all(placed.values()):
            whole = tuple(one for index in range(len(ask.parts)) if (one := placed[index]) is not None)
            room = sum(reference_room(machines, part, place) for part in ask.parts) if ask.same else 0
            found.append((tuple(one.choice for one in whole), room, place or ("", ""), whole))
    return min(found, key=lambda one: one[:3])[3] if found else None


# What is asked of whom -----------------------------------------------------------------------------------------------

names = {"region": st.sampled_from(["r1", "r2"]), "zone": st.sampled_from(["z1", "z2"])}
rest = {"pool": st.sampled_from(["a", "b"]), "preemptible": st.sampled_from(["true", "false"])}
gpus = st.lists(st.sampled_from(["h100", "a100"]), max_size=4)
singles = st.builds(
    lambda cpu, memory, kinds, attributes: [
        Capacity(cpu, memory, 9, tuple(Device(f"gpu-{i}", "gpu", kind) for i, kind in enumerate(kinds)), attributes)
    ],
    st.integers(0, 4),
    st.integers(0, 4),
    gpus,
    st.fixed_dictionaries({}, optional=names | rest),
)
TYPES = {"v4-16": 2, "v5litepod-16": 4}


def hosts_of_slice(name: str, kind: str, there: int, workers: int, attributes: dict[str, str]) -> list[Capacity]:
    """Some of them may be missing, and two may have the same number."""
    chips = tuple(Device(f"tpu-{i}", "tpu", kind) for i in range(2))
    hosts = min(there, TYPES[kind])
    return [
        Capacity(4, 4, 9, chips, attributes | {"slice": name, "tpu_worker": str(min(host, workers))})
        for host in range(hosts)
    ]


slices = st.builds(
    hosts_of_slice,
    st.sampled_from(["s1", "s2", "s3", "s4", "s5"]),
    st.sampled_from(["v4-16", "v4-16", "v5litepod-16"]),
    st.sampled_from([4, 4, 4, 1, 3]),
    st.sampled_from([9, 9, 9, 1]),
    st.fixed_dictionaries(names),
)
fleets = st.lists(singles | slices | slices, min_size=1, max_size=8).map(
    lambda groups: [one for group in groups for one in group]
)
no_limits: st.SearchStrategy[dict[str, Any]] = st.just({})
limits = no_limits | st.fixed_dictionaries(
    {},
    optional={
        "regions": st.just(("r1",)),
        "preemptible": st.booleans(),
        "constraints": st.sampled_from(
            [(Constraint("pool", "==", "a"),), (Constraint("pool", "!=", "a"),), (Constraint("pool"),)]
        ),
    },
)
sizes = st.builds(lambda cpu, memory: Demand(cpu, memory), st.integers(0, 2), st.integers(0, 1))
plain = st.builds(
    lambda size, more, choices, members: MemberGroup(
        tuple(evolve(size, **more, **dict(one)) for one in choices), members
    ),
    sizes,
    limits,
    st.lists(
        st.sampled_from(
            [
                (("device_kind", None),),
                (("device_kind", "gpu"), ("device_count", 1)),
                (("device_kind", "gpu"), ("device_count", 2), ("device_variant", "H100")),
                (("device_kind", "gpu"), ("device_count", 1), ("device_variant", "a100")),
            ]
        ),
        min_size=1,
        max_size=2,
        unique=True,
    ),
    st.integers(1, 3),
)
sliced = st.builds(
    lambda size, more, kind, count: MemberGroup(
        (evolve(size, **more, device_kind="tpu", device_variant=kind, device_count=2),),
        TYPES[kind] * count,
        TYPES[kind],
    ),
    sizes,
    limits.map(lambda more: {key: value for key, value in more.items() if key != "constraints"}),
    st.sampled_from(["v4-16", "v4-16", "v5litepod-16"]),
    st.integers(1, 2),
)
asks = st.builds(
    lambda parts, same: PlacementRequest(tuple(parts), same),
    st.lists(plain | sliced, min_size=1, max_size=2),
    st.sampled_from(["", "", "region", "zone"]),
)


@settings(max_examples=150)
@given(fleets, st.lists(st.tuples(asks, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_pool_places_requests_like_the_reference_implementation(
    sizes: list[Capacity], wants: list[tuple[PlacementRequest, int, int]]
) -> None:
    pool = MachinePool()
    for index, size in enumerate(sizes):
        pool.add(f"n{index}", size)
    held: list[Given] = []
    for ask, closed_index, turn in wants:
        closed = [f"n{closed_index}"]
        expected = reference_request(reference_machines(pool, held), ask, closed)
        placed = pool.place(ask, closed)
        assert placed == expected
        for part, one in zip(ask.parts, placed or (), strict=False):
            held += [Given(part.choices[one.choice], grant) for grant in one.grants]
        name = f"n{turn % len(sizes)}"
        if turn < 3 and held:
            back = held.pop(turn % len(held))
            pool.release(back.grant.node, back.demand, back.grant.devices)
        elif turn < 5:
            pool.set_open(name, not pool.machines[name].is_open)
        elif turn < 6:
            pool.withhold(name, ["tpu-0", "gpu-1"])
        elif turn < 7 and not any(one.grant.node == name for one in held):
            pool.add(name, sizes[0])


# By name -------------------------------------------------------------------------------------------------------------


def slice_pool(**slices: tuple[str, str]) -> MachinePool:
    """Slices of v4-16 (two hosts), ``name=(zone, what)``: ``""``, ``half``, ``twice``."""
    pool = MachinePool()
    for name, (zone, what) in slices.items():
        for worker in range(1 if what == "half" else 2):
            number = "0" if what == "twice" else str(1 - worker)
            attributes = {"slice": name, "tpu_worker": number, "zone": zone, "region": zone[:-1]}
            pool.add(f"{name}-{worker}", capacity(tpu="v4-16*4", **attributes))
    return pool


V4 = Demand(1000, device_kind="tpu", device_variant="v4-16", device_count=4)


def nodes(pool: MachinePool, members: int = 2, closed: list[str] | None = None, **more: str) -> list[str] | None:
    placed = pool.place(PlacementRequest((MemberGroup((V4,), members, 2),), **more), closed or [])
    return None if placed is None else [grant.node for grant in placed[0].grants]


def test_the_hosts_of_a_slice_come_in_the_order_of_their_numbers() -> None:
    assert nodes(slice_pool(s=("z", ""))) == ["s-1", "s-0"]


def test_half_a_slice_and_two_slices_under_one_name_are_not_given() -> None:
    assert nodes(slice_pool(half=("z", "half"), twice=("z", "twice"))) is None


def test_two_halves_are_not_a_slice() -> None:
    assert nodes(slice_pool(a=("z", "half"), b=("z", "half"))) is None


def test_a_slice_with_a_silent_a_closed_or_a_busy_host_is_not_given() -> None:
    pool = slice_pool(s=("z", ""))
    assert nodes(pool, closed=["s-1"]) is None
    pool.set_open("s-0", False)
    assert nodes(pool) is None
    pool.set_open("s-0", True)
    pool.withhold("s-1", ["tpu-3"])
    assert nodes(pool) is None
    pool.withhold("s-1", [])
    assert nodes(pool) == ["s-1", "s-0"]


def test_a_recreated_slice_is_not_blocked_by_the_silent_hosts_of_the_old_one() -> None:
    pool = slice_pool(s=("z", ""))
    for worker in range(2):
        pool.set_open(f"s-{worker}", False)
        pool.add(f"new-{worker}", capacity(tpu="v4-16*4", slice="s", tpu_worker=str(worker), zone="z"))
    assert nodes(pool) == ["new-0", "new-1"]


def test_slices_are_of_one_zone_where_one_has_enough_and_of_the_zone_with_the_fewest_left() -> None:
    pool = slice_pool(a=("r1", ""), b=("r2", ""), c=("r2", ""), d=("r3", ""), e=("r3", ""), f=("r3", ""))
    assert nodes(pool, 4) == ["b-1", "b-0", "c-1", "c-0"]
    assert nodes(pool, 2) == ["a-1", "a-0"]
    assert nodes(pool, 8) is None
    assert nodes(pool, 6) is not None


def test_slices_of_one_name_in_two_zones_are_two_slices() -> None:
    pool = MachinePool()
    for zone in ("z1", "z2"):
        for worker in ("0", "1"):
            pool.add(f"{zone}-{worker}", capacity(tpu="v4-16*4", slice="s", tpu_worker=worker, zone=zone))
    assert nodes(pool, 4) == ["z1-0", "z1-1", "z2-0", "z2-1"]


def test_all_parts_go_into_the_region_with_the_least_room() -> None:
    pool = MachinePool()
    for name, region, cpu in (("a", "r1", 8), ("b", "r2", 4), ("c", "r3", 2)):
        pool.add(name, capacity(cpu=cpu, region=region))
    two = PlacementRequest((MemberGroup((Demand(1000),), 2), MemberGroup((Demand(500),), 3)), "region")
    assert {one.nodes for one in pool.place(two) or ()} == {("b",) * 2, ("b",) * 3}
    assert {one.nodes for one in pool.place(two) or ()} == {("a",) * 2, ("a",) * 3}
    assert {one.nodes for one in pool.place(two) or ()} == {("a",) * 2, ("a",) * 3}
    assert pool.place(two) is None


def test_a_better_liked_device_goes_before_a_fuller_region() -> None:
    pool = MachinePool()
    pool.add("a", capacity(gpu="a100*1", region="r1"))
    pool.add("h", capacity(gpu="h100*8", region="r2"))
    choices = tuple(Demand(device_kind="gpu", device_variant=kind, device_count=1) for kind in ("h100", "a100"))
    placed = pool.place(PlacementRequest((MemberGroup(choices, 1),), "region"))
    assert placed == (Placement((MemberPlacement("h", ("gpu-0",)),), 0),)


def test_all_members_get_the_same_choice() -> None:
    pool = MachinePool()
    pool.add("h", capacity(gpu="h100*2"))
    pool.add("a", capacity(gpu="a100*4"))
    choices = tuple(Demand(device_kind="gpu", device_variant=kind, device_count=1) for kind in ("h100", "a100"))
    placed = pool.place(PlacementRequest((MemberGroup(choices, 3),)))
    assert placed is not None
    assert (placed[0].choice, set(placed[0].nodes)) == (1, {"a"})


def test_what_was_only_a_question_leaves_everything_as_it_was() -> None:
    pool = slice_pool(a=("z1", ""), b=("z2", ""))
    ask = PlacementRequest((MemberGroup((V4,), 2, 2), MemberGroup((Demand(1000),), 2)), "zone")
    first = pool.place(ask)
    assert first is not None
    pool.give_back(ask, first)
    assert not pool.machines["a-0"].attempts + pool.machines["b-0"].attempts
    assert pool.place(ask) == first
