"""Job groups in the scheduler, beyond what the transcripts tell; and the invariants that watch over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from fray.errors import InvalidRequest, NameInUse, NeverSchedulable
from fray.model.job_groups import JobGroupConfig, JobRole
from fray.model.messages.client import Jobs
from fray.model.messages.node import NodeHello
from fray.model.policy.priority import Band
from fray.model.specs import EndReason, JobState, Phase
from fray.scheduler.effects import LaunchRequested, Reply, TerminateRequested
from fray.scheduler.explain.explain import explain
from fray.scheduler.jobs.groups import group_result
from fray.scheduler.lifecycle import AttemptPhase, JobPhase
from fray.scheduler.state.rows import JobGroupRow, SchedulerConfig
from fray.testing.invariants.check import check
from tests.support.scheduler import Cluster, demand, ended, job, member


def make_cluster(**node: object) -> Cluster:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(**{"cpu": 4, **node})  # type: ignore[arg-type]
    return scheduler


# Rules


def a_group(primaries: int, auxiliaries: int, **more: object) -> JobGroupRow:
    scores = {
        key: more.pop(key) for key in list(more) if "_" in key and key.partition("_")[0] in ("won", "lost", "failed")
    }
    return JobGroupRow(
        group_id="g",
        config=JobGroupConfig(name="g", **more),  # type: ignore[arg-type]
        namespace="ns",
        order=1,
        primaries=primaries,
        auxiliaries=auxiliaries,
        primaries_succeeded=scores.get("won_p", 0),  # type: ignore[arg-type]
        auxiliaries_succeeded=scores.get("won_a", 0),  # type: ignore[arg-type]
        primaries_unsuccessful=scores.get("lost_p", 0),  # type: ignore[arg-type]
        auxiliaries_unsuccessful=scores.get("lost_a", 0),  # type: ignore[arg-type]
        auxiliaries_failed=scores.get("failed_a", 0),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (a_group(2, 1), None),
        (a_group(2, 1, won_p=1, won_a=1), None),
        (a_group(2, 1, won_p=2), True),
        (a_group(2, 1, lost_p=1), False),
        (a_group(2, 1, lost_a=1), None),  # it was ended on request: it may be missing
        (a_group(2, 1, lost_a=1, failed_a=1), False),
        (a_group(2, 1, lost_a=1, failed_a=1, auxiliary_failure="absorb"), None),
        (a_group(2, 1, won_p=2, success="all"), None),
        (a_group(2, 1, won_p=2, won_a=1, success="all"), True),
        (a_group(2, 1, lost_a=1, success="all"), False),
        (a_group(2, 1, won_p=1, success="any"), True),
        (a_group(2, 1, lost_p=1, success="any"), None),
        (a_group(2, 1, lost_p=2, success="any"), False),
        (a_group(2, 1, lost_p=1, lost_a=1, failed_a=1, success="any"), False),
    ],
)
def test_a_group_ends_by_its_rules(group: JobGroupRow, said: bool | None) -> None:
    assert group_result(group) is said


# Waiting


def test_a_member_that_has_waited_as_long_as_it_may_ends_its_group_by_the_groups_rules() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a", wait_limit_s=60.0), member("b", need=demand(1000)))
    assert scheduler.state.timers.at == {("wait", "a"): 60.0}
    scheduler.restart()
    assert scheduler.state.timers.at == {("wait", "a"): 60.0}
    scheduler.driver()
    scheduler.tick(60.0)
    assert scheduler.info("a").cause is EndReason.UNSCHEDULABLE
    assert "it waited 60 s for machines, its limit" in (scheduler.info("a").error_message or "")
    assert scheduler.state.timers.at == {}


# The door


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: JobGroupConfig(success="most"), r"success='most'\) must be one of 'primary', 'all', 'any'"),
        (lambda: JobGroupConfig(restart="all"), r"restart='all'\) must be one of 'member', 'group'"),
        (lambda: JobGroupConfig(success="all", auxiliary_failure="absorb"), "needs every member"),
        (lambda: JobGroupConfig("a b"), "cannot be the name of a job group"),
        (lambda: JobRole("trainer", stage=-1), "must be a number from 0 to 100"),
    ],
)
def test_invalid_values_are_refused_where_they_are_written(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        make()


def test_all_members_are_placed_and_owned_alike() -> None:
    scheduler = make_cluster()
    for other, text in [
        (member("b", band=Band.BATCH), "the same priority; found None and 'batch'"),
        (member("b", detached=True), "the same detached"),
        (member("b", namespace="other"), "the same namespace"),
        (member("b", adopt_existing=True), "must be a plain job"),
    ]:
        with pytest.raises(InvalidRequest, match=text):
            scheduler.launch_group("g", member("a"), other)
    with pytest.raises(InvalidRequest, match="launched by itself; use launch_group"):
        scheduler.launch(member("a"))
    with pytest.raises(InvalidRequest, match="launched by itself; use launch_group"):
        scheduler.launch(job("a", job_group="g"))
    assert not scheduler.state.job_groups
    assert not scheduler.state.jobs


def test_a_name_of_a_group_is_taken_as_long_as_it_is_undecided() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("rl", member("a"))
    event = scheduler.ask_group("rl2", member("b"))
    assert any(isinstance(effect, Reply) for effect in event)
    twin = LaunchRequested(session="d", ref=9, launch=_renamed(scheduler, "rl3", "rl", member("c")))
    (refusal,) = scheduler.tell(twin)
    assert isinstance(refusal.error, NameInUse)
    assert "group rl has it" in str(refusal.error)
    scheduler.terminate("a")
    scheduler.see("a:0:0", ended(EndReason.STOPPED))
    scheduler.tell(evolve(twin, ref=10))
    assert scheduler.group("rl3").state == "running"


def _renamed(scheduler: Cluster, group_id: str, name: str, *specs: object):  # type: ignore[no-untyped-def]
    from fray.model.job_groups import JobGroupSpec
    from fray.model.messages.client import Launch

    jobs = tuple(evolve(spec, job_group=group_id) for spec in specs)  # type: ignore[type-var]
    return Launch(jobs=jobs, group=JobGroupSpec(group_id=group_id, config=JobGroupConfig(name=name)))


def test_a_group_larger_than_any_region_is_never_schedulable() -> None:
    scheduler = Cluster()
    hello = [
        NodeHello(node=f"{at}{n}", incarnation="i1", boot_id="b", capacity=_capacity(region=at))
        for at in ("eu", "us")
        for n in range(2)
    ]
    scheduler.restart(declares_all_nodes=True, declared=tuple(hello))
    scheduler.driver()
    text = "no region has room for all of its 2 jobs, even when empty: in eu b .3 members. has no place beside 1 other"
    with pytest.raises(NeverSchedulable, match=text):
        scheduler.launch_group("g", member("a", members=2), member("b", members=3))
    scheduler.launch_group("g", member("a", members=2), member("b", members=3), same_region=False)
    assert scheduler.states("a", "b") == [JobState.PENDING, JobState.PENDING]


def _capacity(**attributes: str):  # type: ignore[no-untyped-def]
    from tests.support.scheduler import capacity

    return capacity(2, **attributes)


def test_a_waiting_group_ends_when_the_machines_known_after_a_restart_cannot_hold_it() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.launch_group("g", member("a", members=2), member("b"))
    hello = NodeHello(node="n1", incarnation="i1", boot_id="b", capacity=_capacity())
    scheduler.restart(declares_all_nodes=True, declared=(hello,))
    assert scheduler.info("a").cause is EndReason.UNSCHEDULABLE
    assert "b (1 members) has no place" in str(scheduler.info("a").error_message)
    assert scheduler.info("b").cause is EndReason.GROUP
    assert scheduler.group("g").state == "failed"


def test_a_launch_takes_effect_once() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b"))
    again = scheduler.ask_group("g", member("a"), member("b"))
    assert [info.job_id for effect in again if isinstance(effect, Reply) for info in _jobs(effect)] == ["a", "b"]
    assert len(scheduler.state.jobs) == 2
    assert len(scheduler.state.job_groups) == 1


def _jobs(reply: Reply) -> tuple[object, ...]:
    assert isinstance(reply.message, Jobs)
    return reply.message.jobs


# Owners


def test_a_group_ends_with_its_driver_and_owes_nothing() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b", stage=1, auxiliary=True))
    scheduler.run("a:0:0")
    scheduler.close()
    scheduler.see("a:0:0", ended(EndReason.OWNER_ENDED))
    scheduler.see("b:0:0", ended(EndReason.OWNER_ENDED))
    assert scheduler.group("g").state == "stopped"
    assert scheduler.info("b").cause is EndReason.OWNER_ENDED


def test_what_is_kept_for_a_later_stage_ends_at_once_and_its_node_is_never_asked() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b", stage=1))
    scheduler.terminate("b")
    assert scheduler.info("b").state is JobState.STOPPED
    assert list(scheduler.desired()) == ["a:0:0"]
    assert scheduler.group("g").state == "running"  # its other member is being ended
    assert scheduler.info("a").reason.startswith("ending 1 of 1 members")


def test_a_node_that_speaks_of_what_it_was_not_asked_for_changes_nothing() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b", stage=1))
    for seen in (Phase.STARTING, Phase.RUNNING, ended(EndReason.SUCCEEDED)):
        scheduler.see("b:0:0", seen)
        assert scheduler.state.attempts["b:0:0"].phase is AttemptPhase.RESERVED


def test_an_auxiliary_member_that_is_ended_on_request_is_simply_missing() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b", auxiliary=True))
    scheduler.run("a:0:0", "b:0:0")
    scheduler.terminate("b")
    scheduler.see("b:0:0", ended(EndReason.STOPPED))
    scheduler.see("a:0:0", ended())
    assert scheduler.group("g").state == "succeeded"
    assert not scheduler.info("b").absorbed


def test_with_any_the_first_success_ends_the_others_and_failures_count_only_at_the_end() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b"), member("c"), success="any")
    scheduler.run("a:0:0", "b:0:0", "c:0:0")
    scheduler.see("a:0:0", ended(EndReason.FAILURE, "boom"))
    assert scheduler.info("a").absorbed
    assert scheduler.group("g").state == "running"
    scheduler.see("b:0:0", ended())
    assert scheduler.desired() == {"c:0:0": True}
    scheduler.see("c:0:0", ended(EndReason.GROUP))
    assert scheduler.group("g").state == "succeeded"


def test_a_group_is_forgotten_with_the_last_of_its_jobs() -> None:
    scheduler = Cluster(SchedulerConfig(finished_limit=2))
    scheduler.driver()
    scheduler.node(cpu=4)
    scheduler.launch_group("g", member("a"), member("b"))
    scheduler.run("a:0:0", "b:0:0")
    scheduler.see("a:0:0", ended())
    scheduler.see("b:0:0", ended())
    assert scheduler.group("g").state == "succeeded"
    for name in ("c", "d"):
        scheduler.launch(job(name))
        scheduler.see(f"{name}:0:0", ended())
    assert not scheduler.state.job_groups
    assert not scheduler.state.group_members
    assert ("job_group", "g") not in scheduler.store


def test_members_get_the_addresses_of_those_with_ports() -> None:
    scheduler = make_cluster(ports=8)
    head = member("head", need=demand(ports=1), ports=("http",))
    scheduler.launch_group("g", head, member("r1", "rollout"), member("r2", "rollout"))
    (desired,) = [desired for desired in scheduler.state.desired_attempts("n1") if desired.attempt_id == "r1:0:0"]
    (peer,) = desired.group_members["head"].members()
    assert peer.address("http") == f"host-n1:{scheduler.state.attempts['head:0:0'].ports['http']}"
    assert list(desired.group_members) == ["head"]


def test_a_group_is_ended_by_its_name() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b"))
    scheduler.launch(job("c"))
    scheduler.tell(TerminateRequested(session="d", ref=1, jobs=(), reason="enough", group="g"))
    assert [scheduler.state.jobs[name].stop_cause for name in ("a", "b", "c")] == [
        EndReason.STOPPED,
        EndReason.STOPPED,
        None,
    ]


def test_explain_says_where_there_is_room_for_whom() -> None:
    scheduler = make_cluster(region="eu")
    scheduler.launch_group("g", member("a", members=3), member("b", members=3))
    text = explain(scheduler.state, "a", scheduler.now)
    assert "waits with its group g, which needs room for all of its 2 jobs at once, in one region" in text
    assert "region eu: of 1 machines with room for a member now: 1 for a, 1 for b" in text


@pytest.mark.parametrize(("session", "is_ended"), [("d", True), ("s-p:0:0", False)])
def test_a_group_takes_the_places_of_others_but_not_of_the_job_that_launched_it(session: str, is_ended: bool) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(cpu=2)
    scheduler.launch(job("p", demand(2), band=Band.BATCH))
    scheduler.run("p:0:0")
    scheduler.process("p:0:0")
    scheduler.now = 1000.0
    scheduler.launch_group("g", *(member(name, band=Band.PRODUCTION) for name in "ab"), session=session)
    assert (scheduler.state.jobs["p"].phase is JobPhase.CLOSING) is is_ended


# What the invariants see


def broken(scheduler: Cluster) -> str:
    return "; ".join(check(scheduler.state))


def test_a_group_that_has_half_of_its_machines_is_seen() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b"))
    b = scheduler.state.jobs["b"]
    b.phase, b.is_gathered = JobPhase.HELD, True
    assert "['b'] wait with group g, and ['a'] of it have machines" in broken(scheduler)


def test_a_member_that_waits_by_itself_while_none_is_placed_is_seen() -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.launch_group("g", member("a"), member("b"))
    scheduler.state.jobs["a"].phase = JobPhase.QUEUED
    assert "['a'] wait by themselves, and none of group g has machines" in broken(scheduler)


def test_a_member_in_another_region_is_seen() -> None:
    scheduler = make_cluster(region="eu")
    scheduler.launch_group("g", member("a"))
    scheduler.state.job_groups["g"].place = "us"
    assert "a:0:0 is in region 'eu', and its group in 'us'" in broken(scheduler)


def test_a_stage_that_begins_too_early_or_too_late_is_seen() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b", stage=1))
    attempt = scheduler.state.attempts["b:0:0"]
    attempt.phase = AttemptPhase.DESIRED
    assert "b of stage 1 has started, and ['a'] have never run" in broken(scheduler)
    attempt.phase = AttemptPhase.RESERVED
    assert broken(scheduler) == ""
    scheduler.run("a:0:0")
    attempt.phase = AttemptPhase.RESERVED
    assert "are reserved, and their stage 1 has started" in broken(scheduler)


def test_a_group_that_ends_against_its_rules_is_seen() -> None:
    scheduler = make_cluster()
    scheduler.launch_group("g", member("a"), member("b"))
    scheduler.run("a:0:0", "b:0:0")
    row = scheduler.state.job_groups["g"]
    row.primaries_succeeded = 2
    text = broken(scheduler)
    assert "True by its rules, and its outcome is None" in text
    assert "its jobs say 0" in text
    row.primaries_succeeded = 0
    scheduler.see("a:0:0", ended(EndReason.FAILURE))
    scheduler.state.jobs["b"].stop_cause = None
    assert "it is decided, and ['b'] still run" in broken(scheduler)
    scheduler.state.jobs["b"].stop_cause = EndReason.GROUP
    scheduler.state.jobs["a"].is_absorbed = True
    assert "a failed, absorbed: True, and a decided" in broken(scheduler)


def test_members_that_shall_be_together_and_name_places_apart_are_refused() -> None:
    specs = [member("a", need=demand(1, zones=("eu-a",))), member("b", need=demand(1, zones=("eu-b", "eu-c")))]
    with pytest.raises(InvalidRequest, match="in one zone, but 'a' asks for eu-a, 'b' for eu-b or eu-c"):
        make_cluster().launch_group("rl", *specs, same_zone=True)
