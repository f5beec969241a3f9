"""Infeasible jobs are refused with the reason and the available choices; and incomplete slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fray.errors import InvalidRequest, NeverSchedulable
from fray.model.constraints import parse_constraints
from fray.model.messages.client import Jobs
from fray.model.messages.node import NodeHello
from fray.model.resources import Capacity, Demand, ResourceConfig
from fray.model.specs import JobSpec
from fray.scheduler.effects import Reply
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, capacity, demand, job


def declared(**machines: Capacity) -> dict[str, Any]:
    hellos = (NodeHello(node=name, incarnation="", boot_id="", capacity=size) for name, size in machines.items())
    return {"declares_all_nodes": True, "declared": tuple(hellos)}


def tpu(kind: str, slices: int = 1, **more: Any) -> JobSpec:
    asked = ResourceConfig.with_tpu(kind, memory=0, **more)
    return job("train", asked.demand(), members=slices * asked.hosts_per_replica())


def host(slice_: str, worker: str, kind: str = "v4-16", **more: str) -> Capacity:
    return capacity(tpu=f"{kind}*4", slice=slice_, tpu_worker=worker, **more)


FLEET = {
    "a": capacity(cpu=4, gpu="h100*2", region="us-east1", zone="us-east1-b", pool="train"),
    "b": capacity(cpu=8, gpu="a100*8", region="us-west4", zone="us-west4-a", pool="serve"),
    "s0": host("s", "0", region="us-west4", zone="us-west4-a"),
    "s1": host("s", "1", region="us-west4", zone="us-west4-a"),
    "half": host("t", "0", kind="v4-32"),
    "bare": capacity(tpu="v5litepod-16*4"),
}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job("j", demand(regions=("us-east2",))), "no machine is in region us-east2; there is us-east1, us-west4"),
        (job("j", demand(zones=("us-west4-b",))), "no machine is in zone us-west4-b; there is us-west4-a, us-east1-b"),
        (job("j", demand(gpu=1, variant="h10")), "no machine has gpu h10; there is h100, a100"),
        (
            job("j", demand(constraints=parse_constraints("pool == trian"))),
            "no machine meets pool == trian; there is train, serve",
        ),
        (
            job("j", demand(constraints=parse_constraints("pol exists"))),
            "no machine meets pol exists; attributes are pool",
        ),
        (job("j", demand(gpu=4, variant="h100")), "the largest machine is a: 4 CPUs, 64 GB memory, 2 gpu h100"),
        (job("j", demand(gpu=2, variant="h100"), members=2), "all machines together hold 1"),
        (tpu("v4-16", 2), r"it needs 2 whole slices of .* of the 1 slices of v4-16 \(of 2 hosts\) 1 is free"),
        (tpu("v4-32"), "1 is without 3 of its hosts"),
        (
            tpu("v5e-16"),
            "there is no slice of v5litepod-16 .*; bare has no slice attribute: give each host the attributes slice",
        ),
        (tpu("v6e-8"), "no machine has tpu v6e-8; there is v4-16, v4-32, v5litepod-16"),
    ],
)
def test_an_infeasible_job_is_refused_with_the_available_choices(spec: JobSpec, words: str) -> None:
    scheduler = Cluster(**declared(**FLEET))
    scheduler.driver()
    with pytest.raises(NeverSchedulable, match=words):
        scheduler.launch(spec)


def test_alternative_devices_are_possible_if_any_of_them_is() -> None:
    scheduler = Cluster(**declared(**FLEET))
    scheduler.driver()
    h100, a100 = demand(gpu=8, variant="h100"), demand(gpu=8, variant="a100")
    scheduler.launch(job("j", h100, alternatives=(a100,)))
    with pytest.raises(NeverSchedulable, match=r"largest machine is a.*; and it needs .*largest machine is b"):
        scheduler.launch(job("k", demand(gpu=9, variant="h100"), alternatives=(demand(gpu=9, variant="a100"),)))


def test_zones_outside_of_the_named_regions_are_a_contradiction_also_where_not_all_machines_are_known() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("a", zone="us-east1-b", region="us-east1")
    need = demand(zones=("us-east1-b",), regions=("us-west4",))
    with pytest.raises(InvalidRequest, match=r"zone us-east1-b is in region us-east1, and regions=\['us-west4'\]"):
        scheduler.launch(job("j", need))
    scheduler.launch(job("k", demand(zones=("us-east1-b", "unknown-zone"), regions=("us-west4",))))


def test_feasibility_is_cached_until_machines_change() -> None:
    scheduler = Cluster(**declared(**FLEET))
    scheduler.driver()
    scheduler.launch(tpu("v4-16"))
    assert list(scheduler.state.feasible_at.values()) == [scheduler.state.pool.machines_version]


# Slices -----------------------------------------------------------------------------------------------------------


def running() -> Cluster:
    """Two slices, given to one gang."""
    scheduler = Cluster()
    scheduler.driver()
    for name in ("s", "t"):
        for worker in ("0", "1"):
            scheduler.node(f"{name}{worker}", tpu="v4-16*4", slice=name, tpu_worker=worker)
    scheduler.launch(tpu("v4-16", 2))
    assert [attempt.node for attempt in scheduler.state.attempts.values()] == ["s0", "s1", "t0", "t1"]
    return scheduler


def swap(scheduler: Cluster) -> None:
    first, _, third, _ = scheduler.state.attempts.values()
    first.node, third.node = third.node, first.node


def crowd(scheduler: Cluster) -> None:
    first, second, *_ = scheduler.state.attempts.values()
    second.node = first.node


def rename(scheduler: Cluster) -> None:
    for name in ("t0", "t1"):
        scheduler.state.nodes[name].capacity.attributes["slice"] = "s"


def give_twice(scheduler: Cluster) -> None:
    first, second, *_ = scheduler.state.attempts.values()
    second.node = first.node


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (swap, "run 0 of its members is on hosts of the slices"),
        (crowd, "two members of one slice are on one host"),
        (rename, "slice s is allocated to two runs of its members"),
        (give_twice, "device tpu-0 of s0 is allocated 2 times"),
    ],
)
def test_a_slice_that_is_mixed_shared_or_crowded_is_noticed(break_it: Callable[[Cluster], None], sentence: str) -> None:
    scheduler = running()
    assert check(scheduler.state) == []
    break_it(scheduler)
    assert any(sentence in broken for broken in check(scheduler.state, thorough=False))


def test_a_restarted_gang_gets_the_slices_it_had() -> None:
    scheduler = running()
    for name in ("a", "u"):
        for worker in ("0", "1"):
            scheduler.node(f"{name}{worker}", tpu="v4-16*4", slice=name, tpu_worker=worker)
    row = scheduler.state.jobs["train"]
    assert row.spec.demand == Demand(1000, device_kind="tpu", device_variant="v4-16", device_count=4)
    pool = scheduler.state.pool
    for attempt in scheduler.state.attempts.values():
        pool.release(attempt.node, row.spec.demand, attempt.devices)
    (placed,) = pool.place(scheduler.state.request_of(row), (), [("t0", "t1", "s0", "s1")]) or ()
    assert placed.nodes == ("s0", "s1", "t0", "t1")


def test_the_desired_attempt_has_the_chosen_type_also_after_a_restart() -> None:
    scheduler = Cluster()
    scheduler.driver()
    for worker in ("0", "1"):
        scheduler.node(f"s{worker}", tpu="v4-16*4", slice="s", tpu_worker=worker)
    asked = ResourceConfig.with_tpu(["v5p-16", "v4-16"], memory=0)
    scheduler.launch(job("train", asked.demand(), alternatives=asked.alternatives(), members=2))
    scheduler.restart()
    desired_attempts = [scheduler.state.desired_attempt(attempt) for attempt in scheduler.state.attempts]
    assert [desired.spec.demand.device_variant for desired in desired_attempts if desired is not None] == [
        "v4-16",
        "v4-16",
    ]


# Where other machines may still join


def warnings_of(scheduler: Cluster, *specs: JobSpec) -> tuple[str, ...]:
    effects = scheduler.ask_launch(*specs)
    return next(e.message.warnings for e in effects if isinstance(e, Reply) and isinstance(e.message, Jobs))


def test_a_job_that_fits_no_machine_is_accepted_with_a_warning_that_has_its_wait_limit() -> None:
    scheduler = Cluster()
    scheduler.driver()
    need = demand(gpu=1)
    assert warnings_of(scheduler, job("early", need)) == (), "no machine has joined: it is too early to say"
    scheduler.node("a", cpu=4)
    assert warnings_of(scheduler, job("plain", demand(cpu=4)), job("plain-2", demand(cpu=4))) == ()
    assert warnings_of(scheduler, job("train", need)) == (
        "job 'train' fits no machine of this cluster: it needs 1 CPU, 1 gpu; no machine has a gpu; "
        "it waits until such a machine joins, without a limit: wait_limit_s sets one",
    )
    limited = [job(f"limited-{number}", need, wait_limit_s=600.0) for number in range(3)]
    (text,) = warnings_of(scheduler, *limited)
    assert text.endswith("it waits until such a machine joins, for 600 s (wait_limit_s)")
    assert warnings_of(scheduler, *limited) == (), "a repetition: its author has been warned"
    scheduler.node("b", cpu=4, gpu="h100*2")
    assert warnings_of(scheduler, job("train-2", need)) == ()
