"""Texts of reasons: format specs, counts, and the kinds that no other test of the scheduler renders."""

from __future__ import annotations

import pytest

from fray.model.resources import Capacity, Demand, Device
from fray.scheduler.explain.diagnosis import unmet_constraints
from fray.scheduler.nodes.view import closed_reason, out_of_service_reason
from fray.scheduler.pool.machine import Machine
from fray.scheduler.reasons import Quantity, Reason, ReasonKind, count_reasons, demand_text, reasons_text
from fray.scheduler.state.rows import Node

DEMAND = Demand(cpu_milli=1000, memory_bytes=0)
GPUS = {"used": Quantity("gpu:h100", 3), "limit": Quantity("gpu:h100", 4)}


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            Reason(ReasonKind.CAPACITY_PLANNED, "n1", applicant="a", in_s=9.6),
            "the free capacity of n1 is held for a, which starts there in 10 s at the latest",
        ),
        (Reason(ReasonKind.RELEASED), "is about to enter the queue"),
        (Reason(ReasonKind.MACHINE_SILENT, "n1"), "its machine n1 is silent"),
        (Reason(ReasonKind.PROVIDER_UNLISTED, "tpu", error=""), "provider tpu has not listed its machines yet"),
        (Reason(ReasonKind.PROVIDER_UNLISTED, "tpu", error="503"), "provider tpu has not listed its machines yet: 503"),
        (Reason(ReasonKind.CLUSTER_EMPTY, demands=(DEMAND,)), "it needs 1 CPU, and there is no machine"),
        (Reason(ReasonKind.NAME_TAKEN, names="a"), "waits for the end of a, which has its name and is being ended"),
        (
            Reason(ReasonKind.NAME_TAKEN, names="abcdef"),
            "waits for the end of a, b, c, d and 2 more, which have its name and are being ended",
        ),
        (Reason(ReasonKind.BACKOFF, wait_s=1.25, crash_loop="", end="its end"), "restarts in 1.2 s, after its end"),
        (Reason(ReasonKind.QUARANTINED, why="x", last="", next_s=0.0), "is in quarantine (x); next probe in 0 s"),
        (
            Reason(ReasonKind.QUARANTINED, why="x", last="y", next_s=None),
            "is in quarantine (x); the last probe reported: y; being probed",
        ),
        (
            Reason(ReasonKind.QUOTA_EXCEEDED, "ada", whose="user", **GPUS),
            "over the quota of user ada (3 gpu:h100 in use of 4 gpu:h100)",
        ),
    ],
)
def test_a_reason_has_a_text(reason: Reason, text: str) -> None:
    assert str(reason) == text


def test_machines_with_the_same_reason_are_counted_in_the_order_of_the_first() -> None:
    busy = [Reason(ReasonKind.IN_USE, free=Quantity("cpu", free), whole=Quantity("cpu", 4000)) for free in (0, 1000)]
    found = [busy[0], Reason(ReasonKind.SILENT, silent_s=1.0), busy[1], Reason(ReasonKind.HAS_ROOM)]
    text = str(Reason(ReasonKind.MACHINES, counts=count_reasons(found)))
    assert text == "of the machines 2 have too few CPUs free, 1 is silent, 1 has room for a member"


def test_reasons_are_values() -> None:
    one, same, other = (Reason(ReasonKind.SPEND_LIMIT, "g", price=price, left=1.0) for price in (4.0, 4.0, 5.0))
    assert len({one: None, same: None, other: None}) == 2
    assert one.kind.code == "spend_limit"
    assert reasons_text([one, other]).count("; ") == 1


@pytest.mark.parametrize("kind", [kind for kind in ReasonKind if kind.counted], ids=lambda kind: kind.code)
def test_a_reason_that_is_counted_has_a_text_for_one_and_for_several(kind: ReasonKind) -> None:
    found = Reason(kind, "gpu h100", whole=Quantity("memory", 1 << 30), missing=2)
    one, several = found.count_text(1), found.count_text(3)
    assert one.startswith(("1 is ", "1 has "))
    assert several == "3" + one[1:].replace(" is ", " are ", 1).replace(" has ", " have ", 1)


def test_everything_that_a_machine_lacks_is_listed() -> None:
    machine = Machine.empty("n1", Capacity(2000, 1 << 30, 0, attributes={"preemptible": "true"}))
    demand = Demand(
        4000, 2 << 30, ports=1, preemptible=False, containers=True, regions=("us",), device_kind="gpu", device_count=1
    )
    assert [str(reason) for reason in unmet_constraints(demand, machine)] == [
        "has no region",
        "is preemptible",
        "has neither a docker daemon that answers nor podman",
        "has 2 CPUs in all",
        "has 1 GB memory in all",
        "offers no ports",
        "has no gpu",
    ]
    assert demand_text(demand) == (
        "4 CPUs, 2 GB memory, 1 gpu, 1 port, region us, a machine that is not preemptible, "
        "docker (a daemon that answers) or podman"
    )


def test_devices_in_use_are_counted_in_any_spelling_of_a_tpu_type() -> None:
    chips = tuple(Device(f"tpu-{number}", "tpu", "v5e-16") for number in range(4))
    machine = Machine.empty("n1", Capacity(2000, 1 << 30, 0, devices=chips))
    demand = Demand(1000, device_kind="tpu", device_variant="v5litepod-16", device_count=4)
    machine.shift(demand, ("tpu-0",), -1)
    (reason,) = unmet_constraints(demand, machine)
    assert (reason.kind, reason.amounts["have"]) == (ReasonKind.DEVICES_IN_USE, ("3 of 4 tpu v5litepod-16",))


def test_a_machine_that_returns_to_its_provider_is_closed() -> None:
    node = Node(name="n1", incarnation="i1", boot_id="b", capacity=Capacity(1000, 1, 0), host="", is_leaving=True)
    assert str(out_of_service_reason(node, 0.0)) == "is being returned to its provider"
    assert closed_reason(node, 0.0).count_text(2) == "2 are leaving"
