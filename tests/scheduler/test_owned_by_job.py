"""Actors that a job owns as a whole: they stay while it restarts, and end with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fray.controller.connections.client_logs import ancestors
from fray.errors import InvalidRequest, NameInUse
from fray.model.messages.client import Done
from fray.model.policy.priority import Band
from fray.model.specs import EndReason, EntryKind, JobInfo, JobSpec, JobState, Outcome, Phase
from fray.scheduler.backfill.start_plan import is_ending
from fray.scheduler.effects import TerminateRequested, WaitReported
from fray.scheduler.explain.explain import explain
from fray.scheduler.preemption.cost import unit_of
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.scheduler import GB, Cluster, demand, ended, job, placed

FAILED = ended(EndReason.FAILURE, "boom")


@pytest.fixture
def scheduler() -> Cluster:
    """A driver, two machines, and a running job of one retry."""
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1")
    scheduler.node("n2")
    start(scheduler)
    return scheduler


def start(scheduler: Cluster, name: str = "run", **more: object) -> None:
    scheduler.launch(job(name, **({"max_retries_failure": 1, "max_retries_preemption": 1} | more)))  # type: ignore[arg-type]
    begin(scheduler, f"{name}:0:0")


def begin(scheduler: Cluster, attempt: str) -> None:
    scheduler.run(attempt)
    scheduler.process(attempt)


def actor(name: str = "store", **more: object) -> JobSpec:
    more = {"entry": EntryKind.ACTOR, "get_if_exists": True, "owned_by_job": True, **more}
    return job(name, **more)  # type: ignore[arg-type]


def launch(scheduler: Cluster, spec: JobSpec, attempt: str = "run:0:0") -> JobInfo:
    (info,) = scheduler.launch(spec, session=f"s-{attempt}")
    return info


def launch_running(scheduler: Cluster, spec: JobSpec | None = None, attempt: str = "run:0:0") -> None:
    spec = spec or actor()
    launch(scheduler, spec, attempt)
    begin(scheduler, f"{spec.job_id}:0:0")


def retry(scheduler: Cluster, outcome: Outcome = FAILED) -> None:
    scheduler.see("run:0:0", outcome)
    begin(scheduler, "run:1:0")


# Restarts of the owner ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", [EndReason.FAILURE, EndReason.OUT_OF_MEMORY, EndReason.PREEMPTED])
def test_it_stays_while_its_job_restarts_and_the_next_attempt_finds_it(scheduler: Cluster, cause: EndReason) -> None:
    launch_running(scheduler)
    retry(scheduler, ended(cause))
    assert (scheduler.info("store").state, scheduler.info("store").owner) == (JobState.RUNNING, "run")
    assert launch(scheduler, actor(job_id="another"), "run:1:0").job_id == "store"
    assert "another" not in scheduler.state.jobs


def test_it_stays_when_the_machine_of_its_job_dies(scheduler: Cluster) -> None:
    launch_running(scheduler, actor(need=demand(4)))
    home = scheduler.state.attempts["run:0:0"].node
    assert scheduler.state.attempts["store:0:0"].node != home
    scheduler.die(home)
    assert scheduler.info("run").state is JobState.PENDING
    assert scheduler.state.jobs["run"].generation == 1
    assert scheduler.info("store").state is JobState.RUNNING


def test_it_stays_when_the_session_of_its_job_is_closed(scheduler: Cluster) -> None:
    launch_running(scheduler)
    scheduler.close("s-run:0:0")
    assert scheduler.state.jobs["store"].stop_cause is None


def test_what_the_attempt_owns_still_ends_with_the_attempt(scheduler: Cluster) -> None:
    launch_running(scheduler)
    launch_running(scheduler, job("child"))
    scheduler.see("run:0:0", FAILED)
    assert scheduler.desired("n1") | scheduler.desired("n2") == {
        "run:1:0": False,
        "store:0:0": False,
        "child:0:0": True,
    }


# The end of the owner -------------------------------------------------------------------------------------------------


def succeed(scheduler: Cluster) -> None:
    scheduler.see("run:0:0", ended())


def fail_twice(scheduler: Cluster) -> None:
    retry(scheduler)
    assert scheduler.state.jobs["store"].stop_cause is None
    scheduler.see("run:1:0", FAILED)


def stop(scheduler: Cluster) -> None:
    scheduler.terminate("run")
    scheduler.see("run:0:0", ended(EndReason.STOPPED))


def end_the_driver(scheduler: Cluster) -> None:
    scheduler.close("d")
    scheduler.see("run:0:0", ended(EndReason.OWNER_ENDED))


def stop_while_it_waits_for_its_retry(scheduler: Cluster) -> None:
    scheduler.see("run:0:0", FAILED)
    scheduler.terminate("run")
    scheduler.see("run:1:0", ended(EndReason.STOPPED))


def stop_on_a_silent_machine(scheduler: Cluster) -> None:
    scheduler.silence(scheduler.state.attempts["run:0:0"].node)
    scheduler.tick(scheduler.now + scheduler.state.config.suspect_s + 1)
    scheduler.terminate("run")


@pytest.mark.parametrize(
    "end",
    [succeed, fail_twice, stop, end_the_driver, stop_while_it_waits_for_its_retry, stop_on_a_silent_machine],
    ids=lambda end: end.__name__,
)
def test_it_ends_with_its_job_however_that_ends(scheduler: Cluster, end: object) -> None:
    launch_running(scheduler)
    end(scheduler)  # type: ignore[operator]
    assert scheduler.state.jobs["run"].ended
    assert (scheduler.desired("n1") | scheduler.desired("n2"))["store:0:0"] is True
    scheduler.see("store:0:0", ended(EndReason.OWNER_ENDED))
    assert (scheduler.info("store").state, scheduler.info("store").cause) == (JobState.STOPPED, EndReason.OWNER_ENDED)
    assert "its owner run ended" in (scheduler.info("store").error_message or "")


def test_it_ends_with_the_owner_of_its_job(scheduler: Cluster) -> None:
    launch_running(scheduler, job("middle"))
    launch_running(scheduler, actor(), "middle:0:0")
    launch_running(scheduler, job("below"), "store:0:0")
    scheduler.see("run:0:0", FAILED)
    scheduler.see("middle:0:0", ended(EndReason.OWNER_ENDED))
    scheduler.see("store:0:0", ended(EndReason.OWNER_ENDED))
    scheduler.see("below:0:0", ended(EndReason.OWNER_ENDED))
    assert scheduler.states("middle", "store", "below") == [JobState.STOPPED] * 3


def test_a_driver_that_leaves_waits_for_it(scheduler: Cluster) -> None:
    launch_running(scheduler)
    scheduler.close("d", ref=7)
    assert not replies(scheduler.see("run:0:0", ended(EndReason.OWNER_ENDED)))
    assert replies(scheduler.see("store:0:0", ended(EndReason.OWNER_ENDED))) == [7]


def replies(effects: Sequence[object]) -> list[int]:
    return [effect.ref for effect in effects if isinstance(getattr(effect, "message", None), Done)]  # type: ignore[attr-defined]


def test_what_it_launches_belongs_to_its_own_attempt(scheduler: Cluster) -> None:
    launch_running(scheduler, actor(max_retries_failure=1))
    launch_running(scheduler, job("child"), "store:0:0")
    retry(scheduler)
    assert scheduler.state.jobs["child"].stop_cause is None
    scheduler.see("store:0:0", FAILED)
    assert scheduler.state.jobs["child"].stop_cause is EndReason.OWNER_ENDED


# The controller restarts ----------------------------------------------------------------------------------------------


def come_back(scheduler: Cluster) -> None:
    """The controller restarts, and the machines report what runs."""
    scheduler.restart()
    for node in ("n1", "n2"):
        scheduler.node(node)
        scheduler.report(node, [(attempt, Phase.RUNNING) for attempt in scheduler.state.on_node[node]], full=True)


def test_after_a_restart_of_the_controller_it_still_has_its_owner(scheduler: Cluster) -> None:
    launch_running(scheduler)
    come_back(scheduler)
    scheduler.process("run:0:0")
    retry(scheduler)
    assert launch(scheduler, actor(job_id="another"), "run:1:0").job_id == "store"
    come_back(scheduler)
    scheduler.see("run:1:0", ended())
    assert scheduler.state.jobs["store"].stop_cause is EndReason.OWNER_ENDED


def test_it_ends_if_its_job_ended_while_the_controller_was_away(scheduler: Cluster) -> None:
    launch_running(scheduler)
    scheduler.restart()
    home = scheduler.state.attempts["run:0:0"].node
    assert scheduler.state.attempts["store:0:0"].node == home
    scheduler.node(home)
    scheduler.report(home, [("run:0:0", ended()), ("store:0:0", Phase.RUNNING)], full=True)
    assert scheduler.state.jobs["store"].stop_cause is EndReason.OWNER_ENDED


def test_one_that_is_terminated_is_replaced_by_the_next_call(scheduler: Cluster) -> None:
    launch_running(scheduler)
    scheduler.terminate("store")
    assert launch(scheduler, actor(job_id="next")).job_id == "next"
    scheduler.see("store:0:0", ended(EndReason.STOPPED))
    assert scheduler.state.jobs["next"].phase.value == "starting"


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["another job", "the attempt", "a driver", "the cluster"])
def test_a_name_that_another_owner_holds_is_refused(scheduler: Cluster, of: str) -> None:
    if of == "another job":
        start(scheduler, "other")
        launch_running(scheduler, actor(), "other:0:0")
    elif of == "the attempt":
        launch_running(scheduler, actor(owned_by_job=False))
    else:
        scheduler.launch(actor(owned_by_job=False, detached=of == "the cluster"))
    with pytest.raises(NameInUse, match="not by job run, as lifetime='job' requires"):
        launch(scheduler, actor(job_id="mine"))
    assert launch(scheduler, actor(job_id="mine", owned_by_job=False)).job_id == "store"


def test_without_get_if_exists_the_name_is_in_use(scheduler: Cluster) -> None:
    launch_running(scheduler, actor(get_if_exists=False))
    retry(scheduler)
    with pytest.raises(NameInUse, match="store"):
        launch(scheduler, actor(job_id="second", get_if_exists=False), "run:1:0")


def test_a_driver_and_a_job_that_is_no_actor_are_refused(scheduler: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="lifetime='job' needs a job"):
        scheduler.launch(actor())
    for spec in (job("plain", owned_by_job=True), actor(detached=True)):
        with pytest.raises(InvalidRequest, match="neither detached nor supervised"):
            launch(scheduler, spec)


def test_a_driver_whose_session_is_named_like_the_job_ends_nothing_of_it(scheduler: Cluster) -> None:
    launch_running(scheduler)
    launch_running(scheduler, job("child"))
    for session in ("run", "run:0:0"):
        scheduler.driver(session)
        scheduler.close(session)
    assert scheduler.state.jobs["store"].stop_cause is scheduler.state.jobs["child"].stop_cause is None


# Chains of owners -----------------------------------------------------------------------------------------------------


def test_the_limit_of_depth_counts_it() -> None:
    scheduler = Cluster(SchedulerConfig(depth_limit=3))
    scheduler.driver()
    scheduler.node()
    start(scheduler, need=demand(0))
    launch_running(scheduler, actor("one", need=demand(0)))
    launch_running(scheduler, actor("two", need=demand(0)), "one:0:0")
    with pytest.raises(InvalidRequest, match="would be number 4"):
        launch(scheduler, actor("three", need=demand(0)), "two:0:0")


def test_it_is_below_its_job_for_termination_of_a_tree_and_for_its_driver(scheduler: Cluster) -> None:
    launch_running(scheduler)
    retry(scheduler)
    assert scheduler.state.owned_jobs("d") == ("run", "store")
    assert explain(scheduler.state, "store", scheduler.now)
    scheduler.tell(TerminateRequested(session="d", ref=scheduler.ref(), jobs=("run",), tree=True, reason="all"))
    assert scheduler.state.jobs["store"].stop_cause is EndReason.STOPPED


def test_it_is_below_all_jobs_above_its_own_also_for_readers_of_logs(scheduler: Cluster) -> None:
    launch_running(scheduler, job("middle"))
    launch_running(scheduler, actor(), "middle:0:0")
    launch_running(scheduler, job("below"), "store:0:0")
    assert scheduler.state.owned_jobs("s-run:0:0") == ("middle", "store", "below")
    assert list(ancestors(scheduler.state, "below")) == ["below", "store", "middle", "run"]


def test_it_is_lent_nothing_and_neither_is_what_it_launches() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=2, memory=8 * GB)
    start(scheduler, need=demand(1))
    launch_running(scheduler, actor(need=demand(1)))
    launch(scheduler, actor("more", need=demand(1)))
    launch(scheduler, job("below", demand(1)), "store:0:0")
    launch(scheduler, job("child", demand(1)))
    scheduler.tell(WaitReported(session="s-run:0:0", ref=scheduler.ref(), waiting=True))
    assert placed(scheduler) == ["run", "store", "child"]


def test_one_that_fits_only_without_the_cpus_of_its_job_fails_soon() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=2, memory=8 * GB)
    start(scheduler, need=demand(1))
    launch(scheduler, actor(need=demand(2)))
    scheduler.tick(scheduler.now + 4.9)
    assert scheduler.info("store").cause is EndReason.UNSCHEDULABLE
    assert "run:0:0 (1 CPU of n1); request less" in (scheduler.info("store").error_message or "")


def test_it_counts_as_part_of_its_job_only_where_that_would_end_for_good(scheduler: Cluster) -> None:
    launch_running(scheduler)
    state = scheduler.state
    assert [one.job_id for one in unit_of(state, state.jobs["run"]).jobs] == ["run"]
    start(scheduler, "last", max_retries_preemption=0)
    launch_running(scheduler, actor("its"), "last:0:0")
    assert [one.job_id for one in unit_of(state, state.jobs["last"]).jobs] == ["last", "its"]


def test_its_job_is_never_its_victim_and_one_of_others_is() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=2)
    scheduler.launch(job("run", demand(1), band=Band.BATCH, max_retries_preemption=9))
    begin(scheduler, "run:0:0")
    scheduler.launch(job("other", demand(1), band=Band.BATCH, max_retries_preemption=9))
    scheduler.now = 60.0
    launch(scheduler, actor(need=demand(1), band=Band.PRODUCTION))
    assert scheduler.desired() == {"run:0:0": False, "other:0:0": True}
    launch(scheduler, actor("more", need=demand(1), band=Band.PRODUCTION))
    assert scheduler.desired() == {"run:0:0": False, "other:0:0": True}


def test_it_is_preempted_by_itself_and_not_with_its_job(scheduler: Cluster) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node("n1", cpu=2)
    scheduler.launch(job("run", demand(1), band=Band.BATCH, max_retries_preemption=9))
    begin(scheduler, "run:0:0")
    scheduler.now = 10.0
    launch_running(scheduler, actor(need=demand(1), band=Band.BATCH, max_retries_preemption=9))
    scheduler.now = 60.0
    scheduler.launch(job("urgent", demand(1), band=Band.PRODUCTION))
    assert sorted(scheduler.desired().values()) == [False, True]


def test_its_machine_is_expected_to_be_free_only_if_its_job_ends_for_good(scheduler: Cluster) -> None:
    launch_running(scheduler)
    launch_running(scheduler, job("gang", members=2, max_retries_failure=1))
    state = scheduler.state
    scheduler.terminate("run")
    assert is_ending(state, state.jobs["store"])
    start(scheduler, "pair", members=2)
    begin(scheduler, "pair:0:1")
    launch_running(scheduler, actor("its"), "pair:0:0")
    scheduler.see("pair:0:1", FAILED)
    assert state.jobs["pair"].phase.value == "closing"
    assert not is_ending(state, state.jobs["its"])
