"""The estimate of what to ask for: nothing is placed twice, nothing is asked for that a dumb twin would not ask for."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.model.resources import Capacity, Demand, Device
from fray.scheduler.autoscaler.bin_packing import (
    HostRoom,
    PackingEstimate,
    UnitOffer,
    members_that_fit,
    with_members,
)
from fray.scheduler.pool.pool import admits_demand, members_held
from fray.scheduler.pool.requests import MemberGroup, PlacementRequest
from tests.support.scheduler import capacity, demand

CPUS = st.sampled_from([0.5, 1, 2, 3, 5])
DEMANDS = st.builds(demand, CPUS, gpu=st.integers(0, 2))
SHAPES = st.lists(st.tuples(DEMANDS, st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=6)


def offer(group: str, cpu: float, gpus: int, price: float, hosts: int = 1) -> UnitOffer:
    return UnitOffer(group, "z", capacity(cpu, gpu=f"h100*{gpus}" if gpus else "", zone="z"), hosts, price)


OFFERS = st.lists(
    st.builds(offer, st.just(""), st.sampled_from([1, 4, 8]), st.integers(0, 4), st.sampled_from([0.0, 1.0, 2.5])),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(evolve(one, group=f"g{n}") for n, one in enumerate(found)))


def sizes(packing: PackingEstimate) -> tuple[int, int]:
    """CPUs and devices that are left on all units."""
    rooms = [(room, count) for unit, count in packing.stock.items() for room in unit.rooms]
    devices = sum(have * count for room, count in rooms for _, have in room.devices)
    return sum(room.cpu_milli * count for room, count in rooms), devices


@given(OFFERS, SHAPES, st.integers(0, 6), st.one_of(st.none(), st.floats(0, 10)))
@settings(max_examples=150, deadline=None)
def test_what_is_held_is_taken_from_what_is_there(
    offers: tuple[UnitOffer, ...], shapes: list[tuple[Demand, int, int]], room: int, money: float | None
) -> None:
    packing = PackingEstimate(offers, {one.group: room for one in offers}, money)
    packing.add_stock(offers[0].group_zone, 1, 2)
    wanted_cpus = wanted_devices = 0
    for need, count, members in shapes:
        if members == 1:
            held_now = packing.pack_some(MemberGroup((need,)), count)
        else:
            held_now = sum(packing.pack_whole(PlacementRequest((MemberGroup((need,), members),))) for _ in range(count))
        wanted_cpus += held_now * members * need.cpu_milli
        wanted_devices += held_now * members * need.device_count
    units = dict(packing.requested)
    units[offers[0].group_zone] = units.get(offers[0].group_zone, 0) + 2
    by_spot = {one.group_zone: one for one in offers}
    whole_cpus = sum(by_spot[at].capacity.cpu_milli * count for at, count in units.items())
    whole_devices = sum(len(by_spot[at].capacity.devices) * count for at, count in units.items())
    left_cpus, left_devices = sizes(packing)
    assert (whole_cpus - left_cpus, whole_devices - left_devices) == (wanted_cpus, wanted_devices)
    assert all(min(r.cpu_milli, *(n for _, n in r.devices), 0) == 0 for u in packing.stock for r in u.rooms)
    assert all(packing.requested.get(one.group_zone, 0) <= room for one in offers)
    cost = sum(by_spot[at].price_per_hour * count for at, count in packing.requested.items())
    assert money is None or cost <= money + 1e-9


def twin(offers: tuple[UnitOffer, ...], need: Demand, members: int, room: int) -> dict[str, int]:
    """One member after the other onto the first machine that takes it; a machine more when none does."""
    asked: dict[str, int] = {}
    machines: list[HostRoom] = []
    for left in range(members, 0, -1):
        at = next((n for n, free in enumerate(machines) if members_that_fit(need, free)), None)
        if at is None:
            choices = [
                (
                    bool(one.capacity.devices) and not need.device_count,
                    one.price_per_hour * -(-left // members_that_fit(need, HostRoom.empty(one.capacity))),
                    len(one.capacity.devices),
                    n,
                )
                for n, one in enumerate(offers)
                if admits_demand(need, one.capacity)
                and members_that_fit(need, HostRoom.empty(one.capacity))
                and asked.get(one.group, 0) < room
            ]
            if not choices:
                break
            best = offers[min(choices)[3]]
            # as many of it as are needed for the rest: the choice is made for all that is left
            for _ in range(
                min(room - asked.get(best.group, 0), -(-left // members_that_fit(need, HostRoom.empty(best.capacity))))
            ):
                asked[best.group] = asked.get(best.group, 0) + 1
                machines.append(HostRoom.empty(best.capacity))
            at = next(n for n, free in enumerate(machines) if members_that_fit(need, free))
        machines[at] = with_members(need, machines[at], 1)
    return asked


@given(OFFERS, DEMANDS, st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_of_one_kind_it_asks_for_what_the_dumb_twin_asks_for(
    offers: tuple[UnitOffer, ...], need: Demand, members: int, room: int
) -> None:
    packing = PackingEstimate(offers, {one.group: room for one in offers})
    packing.pack_some(MemberGroup((need,)), members)
    assert {group: count for (group, _), count in packing.requested.items()} == twin(offers, need, members, room)


def test_a_thousand_machines_alike_are_one_line() -> None:
    packing = PackingEstimate((offer("g", 4, 0, 1.0),), {"g": 2000})
    assert packing.pack_some(MemberGroup((demand(1),)), 4000) == 4000
    assert packing.requested == {("g", "z"): 1000}
    assert len(packing.stock) == 1


def test_slices_are_taken_whole() -> None:
    packing = PackingEstimate(
        (offer("slice", 4, 4, 1.0, hosts=4), offer("single", 4, 4, 0.1)), {"slice": 3, "single": 9}
    )
    need = demand(1, gpu=4)
    assert packing.pack_whole(PlacementRequest((MemberGroup((need,), 8, 4),)))
    assert packing.requested == {("slice", "z"): 2}
    assert not packing.pack_whole(PlacementRequest((MemberGroup((need,), 8, 4),)))
    assert packing.requested == {("slice", "z"): 2}
    assert "group slice is at its max" in map(str, packing.limits)


def test_a_tpu_type_in_another_spelling_holds_what_the_pool_places_there() -> None:
    need = Demand(1000, device_kind="tpu", device_variant="v5litepod-16", device_count=4)
    hosts = Capacity(4000, 1 << 30, 0, devices=tuple(Device(f"tpu-{n}", "tpu", "v5e-16") for n in range(4)))
    assert members_that_fit(need, HostRoom.empty(hosts)) == members_held(need, hosts) == 1


def test_parts_that_share_a_region_are_asked_for_where_all_can_be() -> None:
    here = UnitOffer("a", "r1-a", capacity(4, zone="r1-a", region="r1"), 1, 1.0)
    there = UnitOffer("a", "r2-a", capacity(4, zone="r2-a", region="r2"), 1, 1.0)
    gpus = UnitOffer("b", "r2-b", capacity(4, gpu="h100*4", zone="r2-b", region="r2"), 1, 5.0)
    packing = PackingEstimate((here, there, gpus), {"a": 2, "b": 1})
    assert packing.pack_whole(
        PlacementRequest((MemberGroup((demand(2),), 2), MemberGroup((demand(1, gpu=4),))), same="region")
    )
    assert "r1-a" not in {zone for _, zone in packing.requested}


def test_of_any_of_devices_the_first_that_can_be_had() -> None:
    packing = PackingEstimate((offer("cpus", 4, 0, 0.0), offer("gpus", 4, 2, 1.0)), {"cpus": 1, "gpus": 1})
    tpu = Demand(1000, device_kind="tpu", device_count=4)
    assert packing.pack_some(MemberGroup((tpu, demand(1, gpu=1))), 2) == 2
    assert packing.requested == {("gpus", "z"): 1}
