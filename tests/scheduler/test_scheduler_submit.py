"""Launches: all or nothing, once however often they are asked for; and what is refused."""

from __future__ import annotations

import pytest

from fray.errors import ChannelClosed, InvalidRequest, NameInUse, NeverSchedulable
from fray.model.messages.node import NodeHello
from fray.model.resources import Capacity
from fray.model.specs import EndReason, JobState
from fray.scheduler.effects import DeleteBlobs, JobInfoChanged, Refusal
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.scheduler import Cluster, capacity, demand, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    return scheduler


def declared(**machines: Capacity) -> dict[str, object]:
    hellos = [NodeHello(node=n, incarnation="i", boot_id="b", capacity=size) for n, size in machines.items()]
    return {"declares_all_nodes": True, "declared": tuple(hellos)}


def test_a_launch_repeated_attaches_to_the_first(scheduler: Cluster) -> None:
    first = scheduler.launch(job("a"), job("b"))
    effects = scheduler.ask_launch(job("a"), job("b"))
    assert [effect for effect in effects if isinstance(effect, JobInfoChanged)] == []
    assert scheduler.launch(job("a"), job("b")) == first


def test_a_launch_repeated_after_the_end_tells_the_end(scheduler: Cluster) -> None:
    scheduler.node()
    scheduler.launch(job("a"))
    scheduler.see("a:0:0", ended(value="v"))
    (info,) = scheduler.launch(job("a"))
    assert (info.state, info.value) == (JobState.SUCCEEDED, "v")


def test_a_launch_repeated_by_an_ended_session_still_attaches(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.close()
    (info,) = scheduler.launch(job("a"))
    assert info.state is JobState.STOPPED


def test_a_launch_repeated_after_a_restart_attaches(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    scheduler.restart()
    scheduler.launch(job("a"))
    assert len(scheduler.state.jobs) == 1


def test_a_launch_that_names_only_some_known_jobs_is_refused(scheduler: Cluster) -> None:
    scheduler.launch(job("a"))
    with pytest.raises(InvalidRequest, match="the same jobs"):
        scheduler.launch(job("a"), job("b"))
    with pytest.raises(InvalidRequest, match="belongs to a different request: it differs in name"):
        scheduler.launch(job("c", job_id="a"))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (job("b", members=0), InvalidRequest),
        (job("taken", job_id="b"), NameInUse),
        (job("a", job_id="b"), NameInUse),
        (job("x", job_id="a"), InvalidRequest),
    ],
)
def test_one_bad_job_refuses_them_all_and_its_payloads_are_forgotten(
    scheduler: Cluster, bad: object, error: type[Exception]
) -> None:
    scheduler.launch(job("taken"))
    effects = scheduler.ask_launch(job("a", payload="p"), bad)  # type: ignore[arg-type]
    assert [type(effect.error) for effect in effects if isinstance(effect, Refusal)] == [error]
    assert DeleteBlobs(blobs=("p",)) in effects
    assert list(scheduler.state.jobs) == ["taken"]


def test_a_name_is_taken_only_among_the_living_of_a_namespace(scheduler: Cluster) -> None:
    scheduler.launch(job("x", job_id="x-1"))
    with pytest.raises(NameInUse, match=r"job x-1 \(pending\) has it") as caught:
        scheduler.launch(job("x", job_id="x-2"))
    assert caught.value.details["holder"] == "x-1"
    scheduler.launch(job("x", job_id="x-4", namespace="elsewhere"))
    scheduler.terminate("x-1")
    scheduler.launch(job("x", job_id="x-2"))


def test_an_unknown_or_ended_session_launches_nothing(scheduler: Cluster) -> None:
    with pytest.raises(ChannelClosed, match="unknown session"):
        scheduler.launch(job("a"), session="stranger")


def test_living_jobs_are_bounded() -> None:
    scheduler = Cluster(SchedulerConfig(living_limit=2))
    scheduler.driver()
    scheduler.launch(job("a"), job("b"))
    with pytest.raises(InvalidRequest, match="limit of 2 living jobs"):
        scheduler.launch(job("c"))
    scheduler.terminate("a")
    scheduler.launch(job("c"))


def test_what_no_declared_machine_could_hold_is_refused_naming_the_largest() -> None:
    scheduler = Cluster(**declared(small=capacity(2), large=capacity(8)))
    scheduler.driver()
    with pytest.raises(NeverSchedulable, match="the largest machine is large: 8 CPUs, 64 GB memory"):
        scheduler.launch(job("a", demand(9)))
    with pytest.raises(NeverSchedulable, match="1 gpu h100; no machine has a gpu"):
        scheduler.launch(job("a", demand(1, gpu=1, variant="h100")))
    with pytest.raises(NeverSchedulable, match="all machines together hold 10"):
        scheduler.launch(job("a", demand(1), members=11))
    scheduler.launch(job("a", demand(1), members=10))


def test_a_cluster_that_declares_nothing_waits_with_a_reason(scheduler: Cluster) -> None:
    scheduler.launch(job("a", demand(99)))
    scheduler.node()
    assert "n1 has 4 CPUs in all" in scheduler.info("a").reason


def test_waiting_jobs_that_no_longer_fit_the_declared_machines_end_at_the_restart() -> None:
    scheduler = Cluster(**declared(n1=capacity(8)))
    scheduler.driver()
    scheduler.launch(job("a", demand(8)), job("b", demand(2)))
    scheduler.restart(**declared(n1=capacity(4)))
    assert scheduler.states("a", "b") == [JobState.FAILED, JobState.PENDING]
    assert scheduler.info("a").cause is EndReason.UNSCHEDULABLE
