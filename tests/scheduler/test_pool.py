"""Placement: the pool against a twin that looks at every machine."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fray.model.resources import Capacity, Demand, Device
from fray.scheduler.pool.machine_index import MAX_LOG, MAX_PARTS
from fray.scheduler.pool.pool import (
    Machine,
    MachinePool,
    fit,
    fits_when_empty,
    members_held,
    preference,
)
from fray.scheduler.pool.requests import MemberGroup, MemberPlacement, PlacementRequest
from tests.support.scheduler import GB, capacity, demand


def place_members(
    pool: MachinePool, need: Demand, members: int, closed: Collection[str] = ()
) -> list[MemberPlacement] | None:
    placed = pool.place(PlacementRequest((MemberGroup((need,), members),)), closed)
    return None if placed is None else list(placed[0].grants)


def reference_place(
    machines: dict[str, Machine], need: Demand, members: int, closed: list[str]
) -> list[MemberPlacement] | None:
    """Member by member the best of all machines, on copies of them; nothing is sorted or remembered."""
    grants: list[MemberPlacement] = []
    for _ in range(members):
        fitting = [m for m in machines.values() if m.name not in closed and fit(need, m)]
        if not fitting:
            return None
        best = min(fitting, key=lambda machine: preference(need, machine))
        grant = fit(need, best)
        assert grant is not None
        reference_take(best, need, grant)
        grants.append(grant)
    return grants


def reference_take(machine: Machine, need: Demand, grant: MemberPlacement) -> None:
    machine.cpu_milli -= need.cpu_milli
    machine.memory_bytes -= need.memory_bytes
    machine.disk_bytes -= need.disk_bytes
    machine.attempts += 1
    for ids in machine.devices.values():
        ids[:] = [device for device in ids if device not in grant.devices]
    machine.free_devices -= len(grant.devices)


def reference_machines(pool: MachinePool, grants: list[tuple[Demand, MemberPlacement]]) -> dict[str, Machine]:
    machines = {m.name: Machine.empty(m.name, m.capacity, m.is_open) for m in pool.machines.values()}
    for need, grant in grants:
        reference_take(machines[grant.node], need, grant)
    return machines


def gpus(count: int) -> tuple[Device, ...]:
    return tuple(Device(f"gpu-{index}", "gpu", "h100") for index in range(count))


variants = st.sampled_from(["h100", "a100"])
devices = st.lists(st.tuples(st.sampled_from(["gpu", "tpu"]), variants), max_size=5).map(
    lambda kinds: tuple(Device(f"dev-{index}", kind, variant) for index, (kind, variant) in enumerate(kinds))
)
attributes = st.fixed_dictionaries(
    {},
    optional={
        "region": st.sampled_from(["r1", "r2"]),
        "zone": st.sampled_from(["z1", "z2"]),
        "preemptible": st.sampled_from(["true", "false"]),
    },
)
capacities = st.builds(
    Capacity,
    cpu_milli=st.integers(0, 6),
    memory_bytes=st.integers(0, 6),
    disk_bytes=st.integers(0, 6),
    devices=devices,
    attributes=attributes,
)
demands = st.builds(
    Demand,
    cpu_milli=st.integers(0, 3),
    memory_bytes=st.integers(0, 2),
    disk_bytes=st.integers(0, 1),
    device_kind=st.just("gpu"),
    device_variant=st.sampled_from(["auto", "h100", "H100", "a100"]),
    device_count=st.integers(0, 2),
    preemptible=st.booleans(),
    regions=st.sampled_from([(), (), ("r1",), ("r1", "r2")]),
    zones=st.sampled_from([(), (), ("z1",)]),
) | st.just(Demand())


@example(  # two machines with as many idle devices, once one of them has handed out a device
    sizes=[Capacity(0, 0, 1, gpus(3), {"zone": "z1"}), Capacity(0, 0, 1, gpus(2), {})],
    wants=[(Demand(device_kind="gpu", device_count=1, zones=("z1",)), 1, 9, 9), (Demand(disk_bytes=1), 1, 9, 9)],
)
@given(
    st.lists(capacities, min_size=1, max_size=6),
    st.lists(st.tuples(demands, st.integers(1, 4), st.integers(0, 9), st.integers(0, 9)), max_size=12),
)
def test_the_pool_places_like_the_reference_implementation(
    sizes: list[Capacity], wants: list[tuple[Demand, int, int, int]]
) -> None:
    pool = MachinePool()
    for index, size in enumerate(sizes):
        pool.add(f"n{index}", size)
    held: list[tuple[Demand, MemberPlacement]] = []
    for need, members, closed_index, turn in wants:
        closed = [f"n{closed_index}"]
        expected = reference_place(reference_machines(pool, held), need, members, closed)
        grants = place_members(pool, need, members, closed)
        assert grants == expected
        held += [(need, grant) for grant in grants or ()]
        if turn < 3 and held:
            back_need, back = held.pop(turn % len(held))
            pool.release(back.node, back_need, back.devices)
        elif turn < 5:
            name = f"n{turn % len(sizes)}"
            pool.set_open(name, not pool.machines[name].is_open)


@given(st.lists(capacities, min_size=1, max_size=5), demands, st.integers(1, 6))
def test_fits_when_empty_says_what_an_empty_pool_places(sizes: list[Capacity], need: Demand, members: int) -> None:
    pool = MachinePool()
    for index, size in enumerate(sizes):
        pool.add(f"n{index}", size)
    assert (place_members(pool, need, members) is not None) == fits_when_empty(need, members, sizes)


def test_a_small_job_goes_to_the_tightest_machine_without_accelerators() -> None:
    pool = MachinePool()
    pool.add("gpus", capacity(cpu=4, gpu="h100*8"))
    pool.add("large", capacity(cpu=64))
    pool.add("small", capacity(cpu=2))
    assert place_members(pool, demand(cpu=2), 1) == [MemberPlacement("small")]
    assert place_members(pool, demand(cpu=2), 1) == [MemberPlacement("large")]


def test_an_actor_that_takes_nothing_goes_where_the_fewest_attempts_are() -> None:
    pool = MachinePool()
    for name in ("a", "b"):
        pool.add(name, capacity(cpu=1))
    placed = place_members(pool, demand(cpu=0), 4)
    assert [grant.node for grant in placed or ()] == ["a", "b", "a", "b"]


def test_all_devices_of_a_member_are_of_one_variant() -> None:
    pool = MachinePool()
    pool.add("n", capacity(gpu="h100*1,a100*2"))
    assert place_members(pool, demand(gpu=2), 1) == [MemberPlacement("n", ("gpu-1", "gpu-2"))]
    assert place_members(pool, demand(gpu=2), 1) is None


def test_a_gang_that_does_not_fit_whole_takes_nothing() -> None:
    pool = MachinePool()
    pool.add("n", capacity(cpu=3, gpu="h100*4"))
    assert place_members(pool, demand(cpu=1, gpu=1), 4) is None
    assert place_members(pool, demand(cpu=1, gpu=1), 3) is not None


@pytest.mark.parametrize("changes", range(MAX_LOG - 4, MAX_LOG + 5))
def test_an_index_that_was_empty_at_first_sees_every_change(changes: int) -> None:
    """The log of changes is truncated from time to time, and no index may miss an entry."""
    pool = MachinePool()
    pool.add("n1", capacity(4), open=False)
    for cpu in (1, 2):  # two demands that look into one list, when nothing is open
        assert place_members(pool, demand(cpu), 1) is None
    pool.set_open("n1", True)
    assert place_members(pool, demand(2), 1) is not None
    for _ in range(changes):
        pool.take("n1", demand(0.001), ())
    assert place_members(pool, demand(2), 1) is None


def test_an_index_that_was_not_used_for_long_sees_every_change() -> None:
    pool = MachinePool()
    for name in ("n1", "n2"):
        pool.add(name, capacity(4), open=False)
    assert (pool.held_now(demand(2)), pool.usable(demand(2))) == (0, {})
    pool.set_open("n1", True)
    for _ in range((MAX_PARTS + 3) * MAX_LOG):  # meanwhile the oldest parts of the log are joined
        pool.take("n2", demand(0), ())
    pool.set_open("n2", True)
    assert (pool.held_now(demand(2)), pool.usable(demand(2))) == (4, {"n1": 2, "n2": 2})


def test_what_empty_machines_would_hold_is_known_whenever_they_come_leave_open_or_close() -> None:
    pool, rng = MachinePool(), random.Random(1)
    needs = [demand(2), demand(1, zones=("z1",)), demand(cpu=1, gpu=2), demand(1, preemptible=False)]
    sizes = [capacity(4, zone="z1"), capacity(8, zone="z2", gpu="h100*4"), capacity(3, preemptible="true")]
    for number in range(3 * MAX_LOG):  # the log of openings is truncated twice
        name = f"n{rng.randrange(12)}"
        if name not in pool.machines or rng.random() < 0.1:
            pool.add(name, rng.choice(sizes), open=rng.random() < 0.5)
        elif rng.random() < 0.1:
            pool.remove(name)
        else:
            pool.set_open(name, rng.random() < 0.5)
        # The first is asked all the time, the others now and then.
        for need in needs if number % 700 == 0 else needs[:1]:
            opened = [one for one in pool.machines.values() if one.is_open]
            held = {one.name: members_held(need, one.capacity) for one in opened}
            assert pool.usable(need) == {name: count for name, count in held.items() if count}
            assert pool.could_hold(MemberGroup((need,), 5)) is (sum(held.values()) >= 5)


def test_devices_given_back_are_given_out_in_the_machines_order_again() -> None:
    pool = MachinePool()
    pool.add("n", capacity(gpu="h100*3"))
    one = demand(cpu=0, gpu=1)
    first = place_members(pool, one, 3) or []
    pool.release("n", one, first[2].devices)
    pool.release("n", one, first[0].devices)
    assert place_members(pool, one, 2) == [MemberPlacement("n", ("gpu-0",)), MemberPlacement("n", ("gpu-2",))]


@pytest.mark.parametrize(
    ("need", "size", "held"),
    [
        (demand(cpu=2), capacity(cpu=5), 2),
        (demand(cpu=1, memory=GB), capacity(cpu=5, memory=3 * GB), 3),
        (demand(cpu=0, gpu=2), capacity(gpu="h100*3,a100*4"), 3),
        (demand(cpu=0, gpu=2, variant="A100"), capacity(gpu="h100*3,a100*4"), 2),
        (demand(regions=("r1",)), capacity(region="r2"), 0),
        (demand(preemptible=False), capacity(preemptible="true"), 0),
        (demand(zones=("z",)), capacity(), 0),
    ],
)
def test_members_an_empty_machine_holds(need: Demand, size: Capacity, held: int) -> None:
    assert members_held(need, size) == held


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "hold"]), st.sets(st.integers(0, 3))), max_size=12))
def test_a_device_that_is_withheld_is_never_given_and_comes_back_once(steps: list[tuple[str, set[int]]]) -> None:
    pool = MachinePool()
    ids = [f"gpu-{index}" for index in range(4)]
    pool.add("m", Capacity(9000, 0, 0, tuple(Device(name, "gpu", "h100") for name in ids)))
    need = Demand(device_kind="gpu", device_count=1)
    given_out: list[MemberPlacement] = []
    held: set[str] = set()
    for what, numbers in steps:
        if what == "hold":
            held = {ids[number] for number in numbers}
            pool.withhold("m", held)
        elif what == "take" and (grants := place_members(pool, need, 1)):
            assert not set(grants[0].devices) & held
            given_out += grants
        elif what == "give" and given_out:
            grant = given_out.pop()
            pool.release("m", need, grant.devices)
        taken = {device for grant in given_out for device in grant.devices}
        assert pool.machines["m"].devices["gpu", "h100"] == [name for name in ids if name not in taken | held]
