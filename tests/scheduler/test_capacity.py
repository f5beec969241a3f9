"""Capacity by kind and zone, compared with what the scheduler counts of users, machines and devices."""

from __future__ import annotations

import pytest

from fray.model.messages.history import CapacitySample
from fray.scheduler.explain import capacity as module
from fray.scheduler.explain.capacity import capacity_samples
from fray.scheduler.explain.queue_view import usage_info
from fray.scheduler.state.rows import Quarantine
from tests.support.scheduler import GB, Cluster, demand, ended, job

AMOUNTS = ("used", "reserved", "idle", "quarantined", "closed")


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=8, memory=64 * GB, gpu="h100*4", zone="a")
    scheduler.node("n2", cpu=4, memory=32 * GB, gpu="h100*2,a100*2", zone="b")
    scheduler.node("n3", cpu=2, memory=16 * GB)
    return scheduler


def samples(scheduler: Cluster) -> dict[tuple[str, str], CapacitySample]:
    """The samples of now, which agree with the totals that shares are made of."""
    found = {(each.kind, each.zone): each for each in capacity_samples(scheduler.state, scheduler.now)}
    for each in found.values():
        assert sum(getattr(each, amount) for amount in AMOUNTS) == pytest.approx(each.total)
        assert all(getattr(each, amount) >= 0 for amount in AMOUNTS)
    counted = usage_info(scheduler.state, scheduler.now)
    for resource in ("cpu", "memory", "gpu"):
        mine = [each for each in found.values() if each.kind.partition(":")[0] == resource]
        assert sum(each.total for each in mine) == counted.capacity.get(resource, 0)
        # A user is charged for the whole of a reservation, so what is out of service and reserved makes the difference.
        taken = sum(each.used + each.reserved for each in mine)
        out = sum(each.quarantined + each.closed for each in mine)
        assert taken <= counted.used.get(resource, 0) <= taken + out
    return found


def amounts(sample: CapacitySample) -> dict[str, float]:
    return {amount: value for amount in AMOUNTS if (value := getattr(sample, amount))}


def test_kinds_and_zones_are_counted_each_for_itself(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(3, 8 * GB, gpu=1, variant="a100")), job("b", demand(1, gpu=3, variant="h100")))
    found = samples(scheduler)
    assert list(found) == [
        *(("cpu", ""), ("cpu", "a"), ("cpu", "b"), ("gpu:a100", "b"), ("gpu:h100", "a"), ("gpu:h100", "b")),
        *(("memory", ""), ("memory", "a"), ("memory", "b")),
    ]
    assert amounts(found["gpu:a100", "b"]) == {"used": 1, "idle": 1}
    assert amounts(found["gpu:h100", "a"]) == {"used": 3, "idle": 1}
    assert amounts(found["gpu:h100", "b"]) == {"idle": 2}
    assert amounts(found["cpu", "b"]) == {"used": 3, "idle": 1}
    assert amounts(found["memory", "b"]) == {"used": 8 * GB, "idle": 24 * GB}
    scheduler.see("a:0:0", ended())
    assert amounts(samples(scheduler)["gpu:a100", "b"]) == {"idle": 2}


def test_what_a_reservation_holds_is_reserved_until_a_job_in_it_uses_it(scheduler: Cluster) -> None:
    scheduler.reserve(need=demand(2, gpu=2, variant="h100"), min_units=2)
    found = samples(scheduler)
    assert sum(found["gpu:h100", zone].reserved for zone in "ab") == 4
    assert sum(found["cpu", zone].reserved for zone in ("", "a", "b")) == 4
    scheduler.launch(job("in", demand(1, gpu=1, variant="h100"), reservation_id="r"))
    found = samples(scheduler)
    h100 = [found["gpu:h100", zone] for zone in "ab"]
    assert (sum(one.used for one in h100), sum(one.reserved for one in h100)) == (1, 3)
    assert (sum(one.used for one in found.values() if one.kind == "cpu")) == 1
    scheduler.release()
    scheduler.see("in:0:0", ended())
    assert sum(each.reserved + each.used for each in samples(scheduler).values()) == 0


def test_machines_out_of_service_are_closed_or_quarantined_but_for_what_runs_there(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(3, gpu=1, variant="a100")))
    scheduler.reserve(need=demand(0, gpu=1, variant="a100"))
    scheduler.cordon("n2")
    found = samples(scheduler)
    assert amounts(found["gpu:a100", "b"]) == {"used": 1, "closed": 1}
    assert amounts(found["cpu", "b"]) == {"used": 3, "closed": 1}
    scheduler.uncordon("n2")
    node = scheduler.state.nodes["n1"]
    node.quarantine = Quarantine(reason="its jobs fail", since=0.0)
    scheduler.state.node_changed(node)
    found = samples(scheduler)
    assert amounts(found["gpu:h100", "a"]) == {"quarantined": 4}
    assert amounts(found["gpu:a100", "b"]) == {"used": 1, "reserved": 1}
    node.quarantine = None
    scheduler.state.node_changed(node)
    scheduler.silence("n1")
    assert amounts(samples(scheduler)["gpu:h100", "a"]) == {"closed": 4}
    scheduler.die("n1")
    assert ("gpu:h100", "a") not in samples(scheduler)


def test_devices_that_their_node_withholds_are_closed_one_by_one(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(1, gpu=1, variant="h100")))
    (used,) = scheduler.state.attempts["a:0:0"].devices
    scheduler.reserve(need=demand(0, gpu=1, variant="h100"))
    node = scheduler.state.attempts["a:0:0"].node
    others = [device.id for device in scheduler.state.nodes[node].capacity.devices if device.variant == "h100"]
    scheduler.report(node, [], busy=dict.fromkeys(others, "a foreign process"))
    zone = scheduler.state.nodes[node].capacity.attributes["zone"]
    assert used in others
    assert amounts(samples(scheduler)["gpu:h100", zone]) == {"used": 1, "closed": len(others) - 1}
    scheduler.cordon(node)
    assert amounts(samples(scheduler)["gpu:h100", zone]) == {"used": 1, "closed": len(others) - 1}
    scheduler.uncordon(node)
    scheduler.report(node, [])
    found = amounts(samples(scheduler)["gpu:h100", zone])
    assert found["used"] == 1
    assert "closed" not in found


def test_pairs_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Cluster()
    for number in range(3):
        scheduler.node(f"n{number}", cpu=1, memory=GB, gpu="h100", zone=f"z{number}")
    monkeypatch.setattr(module, "PAIRS_LIMIT", 9)
    assert len(samples(scheduler)) == 9
    monkeypatch.setattr(module, "PAIRS_LIMIT", 8)
    found = samples(scheduler)
    assert [each for each in found if each[1] == "other"] == [("gpu:other", "other")]
    monkeypatch.setattr(module, "PAIRS_LIMIT", 3)
    found = samples(scheduler)
    assert [found[kind, "other"].total for kind in ("cpu", "gpu:other", "memory")] == [2, 2, 2 * GB]
