"""The metrics of one moment: names, values, and the bound on time series."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fray.model.messages.client import NodeInfo
from fray.model.messages.machine_groups import GroupInfo
from fray.model.messages.usage import ClusterCounts, LoopDelay, TenantUsage, UsageInfo
from fray.model.specs import EndReason
from fray.monitoring.exposition import USERS_LIMIT, ClusterNumbers, exposition


def node(name: str, alive: bool = True, standing: str = "", **more: object) -> NodeInfo:
    return NodeInfo(
        name=name,
        alive=alive,
        standing=standing,
        cpu_milli=4_000,
        cpu_milli_free=1_000,
        memory_bytes=1 << 30,
        memory_bytes_free=1 << 29,
        **more,  # type: ignore[arg-type]
    )


NO_DELAY = LoopDelay()


def usage(users: tuple[TenantUsage, ...] = (), delay: LoopDelay = NO_DELAY) -> UsageInfo:
    return UsageInfo(
        now=1e9,
        half_life_s=3_600.0,
        capacity={"cpu": 8.0, "memory": 2.0**31, "gpu": 4.0},
        used={"cpu": 6.0},
        users=users,
        namespaces=(),
        loop_delay=delay,
    )


def values(found: ClusterNumbers | None) -> dict[str, float]:
    """Return the samples by their name and labels, as a Prometheus reads them."""
    families = text_string_to_metric_families(exposition(found).decode())
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_controller_that_does_not_answer_is_a_number() -> None:
    assert values(None) == {"fray_up": 0.0}


def test_every_number_of_a_moment() -> None:
    nodes = (
        node("a", devices=("gpu:0", "gpu:1"), granted={"gpu:0": "job.1"}, attempts=3),
        node("b", standing="draining", devices=("gpu:0",), busy={"gpu:0": "pid 7"}, attempts=1),
        node("c", alive=False, devices=("gpu:0",), attempts=1),
    )
    group = GroupInfo(name="spot", provider="tpu", kind="v5e", wanted=4, asked=3, seen=2, joined=1, cost_per_hour=9.6)
    users = (TenantUsage(user="ada", share=0.75, waiting=2), TenantUsage(user='b"\n', waiting=1))
    delay = LoopDelay(bounds_s=(0.001, 0.01), counts=(7, 2, 1), longest_s=0.3)
    assert values(ClusterNumbers(usage(users, delay), nodes, (group,))) == {
        "fray_up": 1.0,
        "fray_resource_capacity cpu": 8.0,
        "fray_resource_capacity memory": 2.0**31,
        "fray_resource_capacity gpu": 4.0,
        "fray_resource_used cpu": 6.0,
        "fray_resource_used memory": 0.0,
        "fray_resource_used gpu": 0.0,
        "fray_queue_entries": 3.0,
        "fray_user_share ada": 0.75,
        'fray_user_share b"\n': 0.0,
        "fray_user_waiting ada": 2.0,
        'fray_user_waiting b"\n': 1.0,
        "fray_machines ready": 1.0,
        "fray_machines cordoned": 0.0,
        "fray_machines draining": 1.0,
        "fray_machines drained": 0.0,
        "fray_machines leaving": 0.0,
        "fray_machines quarantined": 0.0,
        "fray_machines lost": 1.0,
        "fray_accelerators allocated": 1.0,
        "fray_accelerators busy": 1.0,
        "fray_accelerators free": 1.0,
        "fray_attempts": 4.0,
        "fray_machine_group_units spot wanted": 4.0,
        "fray_machine_group_units spot requested": 3.0,
        "fray_machine_group_units spot seen": 2.0,
        "fray_machine_group_units spot joined": 1.0,
        "fray_machine_group_units spot leaving": 0.0,
        "fray_machine_group_cost_per_hour spot": 9.6,
        "fray_machine_group_backoffs spot": 0.0,
        "fray_controller_loop_pass_seconds_bucket 0.001": 7.0,
        "fray_controller_loop_pass_seconds_bucket 0.01": 9.0,
        "fray_controller_loop_pass_seconds_bucket +Inf": 10.0,
        "fray_controller_loop_pass_longest_seconds": 0.3,
    }


@pytest.mark.parametrize(("count", "series"), [(USERS_LIMIT, USERS_LIMIT), (USERS_LIMIT + 2, USERS_LIMIT + 1)])
def test_users_beyond_the_limit_are_one_line(count: int, series: int) -> None:
    users = tuple(TenantUsage(user=f"u{number:03}", share=(count - number) / 100, waiting=1) for number in range(count))
    found = values(ClusterNumbers(usage(users), (), ()))
    shares = {name: value for name, value in found.items() if name.startswith("fray_user_share")}
    assert len(shares) == series
    assert sum(shares.values()) == pytest.approx(sum(user.share for user in users))
    assert found["fray_queue_entries"] == count
    if count > USERS_LIMIT:
        assert shares["fray_user_share "] == pytest.approx(0.03)


def counts(**more: object) -> ClusterCounts:
    made = {
        "users": {},
        "namespaces": {},
        "ended_jobs": {},
        "ended_attempts": {},
        "wait_bounds_s": (1.0, 60.0),
        "wait_counts": (0, 0, 0),
        "waited_s": 0.0,
        "longest_wait_s": 0.0,
        "reservations": {},
        "reserved_units": {"minimum": 0, "held": 0},
    }
    return ClusterCounts(**(made | more))  # type: ignore[arg-type]


def test_numbers_of_jobs_and_reservations() -> None:
    found = counts(
        users={"ada": {"pending": 2, "running": 1}, "": {"running": 4}},
        namespaces={"prod": {"pending": 2, "running": 5}},
        ended_jobs={"failure": 3},
        ended_attempts={"failure": 4, "preempted": 1},
        wait_counts=(5, 2, 1),
        waited_s=321.5,
        longest_wait_s=17.0,
        reservations={"held": 1, "degraded": 2},
        reserved_units={"minimum": 6, "held": 5},
    )
    got = values(ClusterNumbers(usage(), (), (), found))
    assert {name: value for name, value in got.items() if name.startswith(("fray_jobs ", "fray_namespace_jobs"))} == {
        "fray_jobs pending ada": 2.0,
        "fray_jobs running ada": 1.0,
        "fray_jobs pending ": 0.0,
        "fray_jobs running ": 4.0,
        "fray_namespace_jobs prod pending": 2.0,
        "fray_namespace_jobs prod running": 5.0,
    }
    ended = {name: value for name, value in got.items() if name.startswith("fray_jobs_ended_total")}
    # Every cause has a series from the start.
    assert ended == {f"fray_jobs_ended_total {cause}": 3.0 * (cause == "failure") for cause in EndReason}
    assert got["fray_attempts_ended_total preempted"] == 1.0
    waits = {name: value for name, value in got.items() if name.startswith("fray_job_wait_seconds")}
    assert waits == {
        "fray_job_wait_seconds_bucket 1.0": 5.0,
        "fray_job_wait_seconds_bucket 60.0": 7.0,
        "fray_job_wait_seconds_bucket +Inf": 8.0,
        "fray_job_wait_seconds_count": 8.0,
        "fray_job_wait_seconds_sum": 321.5,
    }
    assert got["fray_queue_longest_wait_seconds"] == 17.0
    assert {name: value for name, value in got.items() if name.startswith("fray_reservation")} == {
        "fray_reservations waiting": 0.0,
        "fray_reservations held": 1.0,
        "fray_reservations degraded": 2.0,
        "fray_reservations closing": 0.0,
        "fray_reservation_units minimum": 6.0,
        "fray_reservation_units held": 5.0,
    }


def test_jobs_of_users_beyond_the_limit_are_one_line_also_with_a_line_of_others() -> None:
    users = {f"u{number:03}": {"running": 100 - number} for number in range(USERS_LIMIT + 2)} | {"": {"pending": 7}}
    got = values(ClusterNumbers(usage(), (), (), counts(users=users)))
    jobs = {name: value for name, value in got.items() if name.startswith("fray_jobs ")}
    assert len(jobs) == 2 * (USERS_LIMIT + 1)
    assert (jobs["fray_jobs pending "], jobs["fray_jobs running "]) == (7.0, 50.0 + 49.0)


def test_a_controller_of_an_earlier_release_has_no_numbers_of_jobs() -> None:
    assert not any(name.startswith("fray_jobs") for name in values(ClusterNumbers(usage(), (), ())))
