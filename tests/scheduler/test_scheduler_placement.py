"""Placement: first in, first tried; small jobs may pass; no job starves; and `explain` gives the reasons."""

from __future__ import annotations

import pytest

from fray.errors import NoSuchJob
from fray.model.resources import Demand
from fray.model.specs import EndReason, JobState
from fray.scheduler.explain.explain import explain
from fray.scheduler.views import job_info
from tests.support.scheduler import GB, Cluster, demand, ended, job, placed


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=4)
    return scheduler


def test_first_in_first_placed(scheduler: Cluster) -> None:
    scheduler.launch(*(job(name, demand(4)) for name in "abc"))
    for name in "abc":
        assert placed(scheduler) == [name]
        scheduler.see(f"{name}:0:0", ended())


def test_a_small_job_passes_a_large_one_that_does_not_fit(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)), job("small", demand(1)))
    assert placed(scheduler) == ["long", "small"]


def test_after_a_minute_nothing_passes_the_starving_any_more(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)))
    scheduler.now = 59.0
    scheduler.launch(job("small", demand(1)))
    scheduler.now = 60.0
    scheduler.launch(job("late", demand(1)))
    assert placed(scheduler) == ["long", "small"]
    reason = "held back for large, which came first and has waited for 60 s or more"
    assert scheduler.info("late").reason.startswith(reason)
    scheduler.see("small:0:0", ended())
    scheduler.see("long:0:0", ended())
    assert placed(scheduler) == ["large"]
    scheduler.see("large:0:0", ended())
    assert placed(scheduler) == ["late"]


def test_the_end_of_a_starving_job_lets_the_others_go(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)))
    scheduler.now = 60.0
    scheduler.launch(job("late", demand(1)))
    scheduler.terminate("large")
    assert placed(scheduler) == ["long", "late"]


def test_machines_the_starving_job_cannot_use_stay_open_to_others(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)))
    scheduler.node("n2", cpu=2)
    scheduler.now = 60.0
    scheduler.launch(job("late", demand(2)))
    assert placed(scheduler) == ["long", "late"]


def test_a_job_too_large_for_all_machines_starves_without_holding_others_back(scheduler: Cluster) -> None:
    scheduler.launch(job("giant", demand(99)))
    scheduler.now = 1000.0
    scheduler.launch(job("small", demand(1)))
    assert placed(scheduler) == ["small"]


def test_hosts_that_make_no_slice_are_not_held_for_a_starving_slice_job(scheduler: Cluster) -> None:
    for worker, more in enumerate(({}, {"gpu": "h100"})):  # hosts that differ make no slice
        scheduler.node(f"t{worker}", cpu=4, tpu="v4-16*4", slice="pod", tpu_worker=str(worker), **more)
    chips = Demand(1000, 0, device_kind="tpu", device_variant="v4-16", device_count=4)
    scheduler.launch(job("long", demand(4)), job("train", chips, members=2))
    scheduler.now = 1000.0
    scheduler.launch(job("other", demand(2)))
    assert "other" in placed(scheduler)


def test_the_actors_that_take_nothing_are_not_held_back(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)))
    scheduler.now = 60.0
    scheduler.launch(job("actor", demand(0)))
    assert placed(scheduler) == ["long", "actor"]


def test_the_children_of_a_running_job_are_not_held_back(scheduler: Cluster) -> None:
    """The starving job may be waiting for the parent, and the parent for its child."""
    scheduler.launch(job("parent", demand(1)), job("large", demand(4)))
    scheduler.run("parent:0:0")
    scheduler.process("parent:0:0")
    scheduler.now = 60.0
    scheduler.launch(job("child", demand(1)), session="s-parent:0:0")
    assert placed(scheduler) == ["parent", "child"]


def test_a_machine_that_leaves_frees_those_held_back_for_what_only_it_could_hold(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=2)
    scheduler.launch(job("long", demand(3)), job("other", demand(1)), job("large", demand(2), members=3))
    scheduler.now = 60.0
    scheduler.launch(job("late", demand(1)))
    assert "late" not in placed(scheduler)
    scheduler.silence("n1")
    assert "late" in placed(scheduler)


def test_devices_are_given_to_one_attempt_at_a_time(scheduler: Cluster) -> None:
    scheduler.node("n2", gpu="h100*2")
    scheduler.launch(*(job(name, demand(0, gpu=1)) for name in "abc"))
    assert [scheduler.state.desired_attempt(f"{name}:0:0").devices for name in "ab"] == [("gpu-0",), ("gpu-1",)]  # type: ignore[union-attr]
    scheduler.see("a:0:0", ended())
    assert scheduler.state.desired_attempt("c:0:0").devices == ("gpu-0",)  # type: ignore[union-attr]


def test_regions_zones_and_preemptible_machines_are_respected(scheduler: Cluster) -> None:
    scheduler.node("n2", region="us", zone="us-a", preemptible="true")
    scheduler.launch(
        job("anywhere-else", demand(0, regions=("eu",))),
        job("there", demand(0, regions=("us", "eu"), zones=("us-a",))),
        job("safe", demand(0, preemptible=False)),
    )
    assert list(scheduler.desired("n2")) == ["there:0:0"]
    assert list(scheduler.desired("n1")) == ["safe:0:0"]
    scheduler.node("n1", incarnation="i2", region="asia")
    assert scheduler.info("anywhere-else").reason.startswith(
        "needs region eu; of the machines 2 are in another region; number 1 of 1"
    )


# Explaining


def test_a_waiting_job_is_explained_constraint_by_constraint(scheduler: Cluster) -> None:
    scheduler.node("n2", cpu=8, memory=GB, region="us")
    scheduler.launch(job("x", demand(3)))
    scheduler.launch(
        job("train", demand(4, memory=2 * GB, gpu=2, variant="h100", regions=("eu",)), max_retries_failure=2)
    )
    scheduler.launch(job("y", demand(99)))
    scheduler.now = 12.0
    assert explain(scheduler.state, "train", scheduler.now).splitlines() == [
        "train is pending",
        "needs 4 CPUs, 2 GB memory, 2 gpu h100, region eu",
        "number 1 of 2 in the queue; waiting for 12 s",
        "  n1 has no region and has 1 of 4 CPUs free and has no gpu h100",
        "  n2 is in region us and has 1 GB memory in all and has no gpu h100",
        "no change of load will help, more machines would: it needs 4 CPUs, 2 GB memory, 2 gpu h100, region eu; "
        "no machine is in region eu; there is us",
        "retries: 0 of 2 after failure, 0 of 0 after preemption",
    ]
    assert scheduler.info("y").reason.endswith("number 2 of 2 in the queue")


def test_a_starving_job_and_a_job_held_back_for_it_are_explained(scheduler: Cluster) -> None:
    scheduler.launch(job("long", demand(1)), job("large", demand(4)))
    scheduler.now = 75.0
    scheduler.launch(job("late", demand(1)))
    assert "the machines it could use are held for it" in explain(scheduler.state, "large", scheduler.now)
    assert "held back for large, which came first" in explain(scheduler.state, "late", scheduler.now)


def test_a_running_and_an_ended_job_tell_their_attempts(scheduler: Cluster) -> None:
    scheduler.launch(job("a", max_retries_failure=1))
    scheduler.see("a:0:0", ended(EndReason.FAILURE, "boom"))
    assert explain(scheduler.state, "a", 0.0).splitlines() == [
        "a is pending: starting on n1",
        "retries: 1 of 1 after failure, 0 of 0 after preemption",
        "  a:0:0 on n1: failure: boom",
        "  a:1:0 on n1: desired",
    ]
    scheduler.see("a:1:0", ended(EndReason.OUT_OF_MEMORY, "3 GB of 2 GB"))
    assert explain(scheduler.state, "a", 0.0).startswith("a is failed (out of memory): 3 GB of 2 GB")


def test_a_closing_gang_says_what_it_waits_for(scheduler: Cluster) -> None:
    scheduler.launch(job("gang", members=3))
    scheduler.see("gang:0:0", ended(EndReason.FAILURE, "boom"))
    assert scheduler.info("gang").reason == "ending 2 of 3 members (boom)"


def test_one_page_is_enough_for_a_thousand_machines(scheduler: Cluster) -> None:
    for index in range(30):
        scheduler.node(f"m{index:02}", cpu=1)
    scheduler.launch(job("a", demand(64)))
    page = explain(scheduler.state, "a", 0.0)
    assert "and 11 more; of the machines 31 have too few CPUs" in page
    assert scheduler.info("a").state is JobState.PENDING


def test_an_unknown_job_cannot_be_explained(scheduler: Cluster) -> None:
    with pytest.raises(NoSuchJob):
        explain(scheduler.state, "unknown", 0.0)
    with pytest.raises(NoSuchJob):
        job_info(scheduler.state, "unknown")


def test_the_kind_of_a_reason_is_for_programs(scheduler: Cluster) -> None:
    scheduler.launch(job("first", demand(4)), job("second", demand(4)))
    assert scheduler.info("first").reason_kind == "starting"
    assert scheduler.info("second").reason_kind == "needs_capacity"
    assert scheduler.info("second").reason.startswith("needs 4 CPUs; n1 has 0 of 4 CPUs free (held by first)")
