"""Violations that random scenarios have found, each as the smallest scenario that showed it.

A comment names the seed and the cause; the table of `docs/reliability.md` has them all.
"""

from __future__ import annotations

from tests.simulation.directed_plans import draw_directed
from tests.simulation.run import run_seed, summary
from tests.simulation.scenario_plans import ScenarioPlan, direct_plan


def assert_holds(plan: ScenarioPlan, seed: int = 0) -> None:
    result = run_seed(seed, plan=plan)
    assert not result.breaches, summary(result)
    assert result.faults.total() == len(plan.faults), summary(result)


def test_a_node_that_continues_right_after_its_channel_has_ended_stays_alive() -> None:
    # Seeds 20011, 20086; a defect of the controller: the handler of the ended channel reported the node silent while
    # the next channel was connected, and nothing made it alive again.
    assert_holds(direct_plan(["make an actor"], [(12.0, "stop machine", 82.5)], machines=2))


def test_a_repeatable_call_may_run_twice_in_an_incarnation_that_was_silent_for_long() -> None:
    # Seeds 20006, 20054; a defect of the simulator: it expected one execution for each incarnation.
    acts = ["make an actor", "make an actor", *["repeatable call"] * 10]
    assert_holds(direct_plan(acts, [(4.5, "stop machine", 100.0)], machines=2))


def test_lateness_after_a_deadline_does_not_include_the_time_in_which_the_driver_was_stopped() -> None:
    # Seed 20167; a defect of the simulator.
    acts = ["make an actor", "make an actor", *["call with deadline"] * 3]
    assert_holds(direct_plan(acts, [(4.5, "stop driver", 40.0)], machines=2), seed=1)


def test_a_driver_that_leaves_ends_the_jobs_of_its_cancelled_acts() -> None:
    # Seeds 5092, 20134; a defect of the simulator: nothing ended these jobs, and the driver rightly waited for them.
    assert_holds(direct_plan(["kept units"] * 12, [(8.0, "driver leaves", 0.1)], machines=2), seed=1)


def test_a_group_goes_on_when_it_absorbs_that_its_first_stage_was_killed_at_its_start() -> None:
    # Seed 30205; a defect of the simulator: it expected a process of the first stage.
    faults = [(0.4, "bad machine", 1.2), (2.6, "bad machine", 1.0)]
    assert_holds(direct_plan(["job group"] * 8, faults, machines=2, every_s=0.4), seed=22)


def test_limits_of_a_group_that_a_stopped_controller_reads_late_are_taken_back() -> None:
    # Seed 41108; a defect of the simulator: an order that was not confirmed in time was not taken back.
    faults = [(40.0, "stop controller", 9.0), (41.0, "group scaled", 1.0)]
    plan = direct_plan(["value job"] * 4, faults, machines=1, every_s=5.0, cloud=True)
    for seed in range(6):
        result = run_seed(seed, plan=plan)
        assert not result.breaches, summary(result)


def test_a_machine_that_was_drained_while_the_controller_was_stopped_is_back_in_service() -> None:
    # Seed 30159; a defect of the simulator: the stopped controller had not read the order to drain, so that the machine
    # seemed to be in service already, and no order to end that followed.
    faults = [(0.5, "stop controller", 9.0), (1.0, "out of service", 3.0)]
    assert_holds(direct_plan(["value job"] * 4, faults, machines=1, every_s=5.0))


def test_devices_that_are_busy_stay_so_when_a_connection_is_resumed() -> None:
    # Seed 180 of "mixed releases"; a defect of the controller: what it repeated of the node's last report, after the
    # connection was back, had no busy devices, and the node had no reason to report them again.
    faults = [(1.0 + 0.25 * number, "machine moves", 0.01) for number in range(60)]
    assert_holds(direct_plan(["device gang"] * 30, faults, machines=2, every_s=0.5))


def test_a_call_that_runs_when_another_one_makes_its_actor_fail_ends_with_that_error() -> None:
    # Seed 0 of "full disk" with other delays; a defect of the simulator: it expected the result of the running call.
    for seed in range(4):
        assert_holds(direct_plan(["stateful actor"] * 8, [], machines=1, every_s=0.02), seed=seed)


def test_a_deleted_machine_is_not_back_before_the_controller_has_noticed_its_deletion() -> None:
    # Seed 20025 of "changing cloud"; a defect of the simulator: such a machine runs no node, so its attempts wait for
    # the lease, after which the scenario has ended.
    faults = [(40.0, "machine deleted outside", 0.1), (72.0, "crash controller", 0.5)]
    back = (106.0, "deleted machine is back", 0.1)
    for seed in range(2):
        plan = direct_plan(["long batch"] * 4, [*faults, back], machines=1, every_s=5.0, cloud=True)
        result = run_seed(seed, plan=plan)
        assert not result.breaches, summary(result)
        assert result.faults.total() == len(faults), summary(result)


def test_what_fails_before_it_is_stopped_for_its_preemption_has_been_preempted() -> None:
    # Seeds 21285, 21721; a defect of the simulator: it expected that such an attempt counts as a failure, with a
    # back-off, or as one that ran out of memory.
    faults = [(0.5, "slow link", 30.0), *((1.5 + number, "out of service", 0.5) for number in range(8))]
    for kind in ("memory hog", "stumbling job"):
        assert_holds(direct_plan([kind] * 24, faults, machines=2, every_s=0.3), seed=7)


def test_a_failing_actor_that_is_preempted_starts_elsewhere_without_a_back_off() -> None:
    # Seeds 35292, 35332; a defect of the simulator: it expected a back-off, as after a failure.
    faults = [(1.0 + 0.5 * number, "out of service", 0.3) for number in range(16)]
    for seed in (3, 7, 13):
        assert_holds(direct_plan(["crash loop"] * 24, faults, machines=3, every_s=0.2), seed=seed)


def test_an_order_that_lowers_the_maximum_of_a_group_right_before_its_check_has_time_to_be_followed() -> None:
    # Seed 21461; a defect of the simulator: the policy that one fault takes back was checked right after another fault
    # had lowered the maximum.
    faults = [(10.0, "policy changed", 5.0), (34.98, "group scaled", 1.0)]
    plan = direct_plan(["value job"] * 4 + ["long batch"] * 3, faults, machines=1, every_s=3.0, cloud=True)
    assert_holds(plan, seed=4)


def test_a_minimum_that_the_spend_limit_forbade_until_a_machine_was_gone_has_time_to_be_followed() -> None:
    # Seed 26345 of "changing cloud"; a defect of the simulator: it was checked 0.8 s after a deleted machine was gone,
    # which had used up the spend limit, and 0.4 s before the next plan.
    faults = [(15.922, "machine taken away", 4.256), (30.426, "group scaled", 0.259)]
    assert_holds(direct_plan([], faults, machines=1, cloud=True), seed=26345)


def test_a_driver_waits_for_all_jobs_of_a_full_queue_however_long_these_take_together() -> None:
    # Seed 27525 of "lost units", as 20205, 20250 and 22060; a defect of the simulator: it expected their end 250 s
    # after the last fault, though jobs of up to 120 s still began one after the other.
    assert_holds(direct_plan(["long batch"] * 12, [], machines=1, every_s=0.1))


def test_a_gang_that_is_started_again_after_the_loss_of_the_store_has_another_generation() -> None:
    # Seed 28060 of "restored store": a gang that waited at the time of the backup, and had ended since, was started
    # again in the same generation, with other peers. With seed 6 generation 0 began after generation 2.
    for seed in (2, 6):
        assert_holds(direct_plan(["gang"] * 8, [(3.0, "store restored", 28.5)], every_s=0.4), seed=seed)


def test_an_actor_that_began_while_its_machine_was_silent_keeps_its_devices_until_it_has_ended() -> None:
    # Seed 29320; a defect of the controller: when a channel was resumed, it repeated the last report of the node. An
    # actor that had begun in the silence, and was given up, was in no report yet, and its devices were allocated again.
    result = run_seed(29320, plan=draw_directed(29320, "devices of late machines"))
    assert not result.breaches, summary(result)
