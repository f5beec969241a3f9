"""The outcome of an attempt: the first cause counts."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from fray.errors import InvalidRequest
from fray.model.specs import EndReason, EntryKind, Outcome, TerminationPolicy
from fray.node.shim.exit_status import (
    ExitStatus,
    TerminationSchedule,
    TerminationStep,
    classify_exit,
)

DONE = Outcome(cause=EndReason.SUCCEEDED, value="hash")
FAILED = Outcome(cause=EndReason.FAILURE, message="ValueError: no")
TERMINATION = TerminationPolicy(cancel_s=3, term_s=2)


def classified(entry: EntryKind = EntryKind.CALLABLE, **seen: Any) -> Outcome:
    return classify_exit(ExitStatus(entry=entry, **seen))


def test_what_the_job_recorded_is_its_outcome() -> None:
    assert classified(record=DONE, exit_code=0).value == "hash"
    assert classified(record=FAILED, exit_code=1).message == "ValueError: no"


def test_a_record_counts_even_if_the_process_was_killed_afterwards() -> None:
    assert classified(record=DONE, signal=9).cause is EndReason.SUCCEEDED


def test_an_exit_without_a_record_is_a_failure_with_the_last_words() -> None:
    outcome = classified(exit_code=3, last_lines="oh no")
    assert (outcome.cause, outcome.exit_code) == (EndReason.FAILURE, 3)
    assert outcome.message == "ended with exit code 3; last lines of stderr:\noh no"


def test_exit_code_0_without_a_record_is_success_for_programs_only() -> None:
    assert classified(EntryKind.BINARY, exit_code=0).cause is EndReason.SUCCEEDED
    assert classified(exit_code=0).cause is EndReason.FAILURE


def test_a_signal_that_fray_did_not_send_is_named() -> None:
    outcome = classified(signal=9)
    assert (outcome.cause, outcome.signal) == (EndReason.KILLED, 9)
    assert outcome.message == "killed by SIGKILL (not sent by Fray)"
    assert "SIGSEGV" in classified(signal=11).message


def test_out_of_memory_is_reported_only_for_the_signal_the_kernel_sends() -> None:
    assert classified(signal=9, out_of_memory=True).cause is EndReason.OUT_OF_MEMORY
    assert classified(signal=11, out_of_memory=True).cause is EndReason.KILLED
    assert classified(exit_code=1, out_of_memory=True).cause is EndReason.FAILURE


def test_the_reason_of_the_shim_is_the_cause_unless_a_record_came_first() -> None:
    hog = Outcome(cause=EndReason.OUT_OF_MEMORY, message="too much")
    outcome = classified(forced_outcome=hog, reached=TerminationStep.KILL, signal=9)
    assert (outcome.cause, outcome.message, outcome.signal) == (EndReason.OUT_OF_MEMORY, "too much", 9)
    assert classified(forced_outcome=hog, reached=TerminationStep.KILL, record=FAILED).cause is EndReason.OUT_OF_MEMORY
    assert classified(forced_outcome=hog, reached=TerminationStep.CANCEL, record=DONE).cause is EndReason.SUCCEEDED


@pytest.mark.parametrize("amounts", [{"cancel_s": -1}, {"term_s": float("inf")}, {"term_s": float("nan")}])
def test_a_ladder_that_never_ends_is_refused_at_the_door(amounts: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=f"TerminationPolicy\\({next(iter(amounts))}=.*from 0 to 86400"):
        TerminationPolicy(**amounts)


@pytest.mark.parametrize("step", TerminationStep)
def test_the_ladder_says_how_far_it_went(step: TerminationStep) -> None:
    outcome = classified(reached=step, termination=TERMINATION, signal=15)
    assert outcome.cause is EndReason.STOPPED
    assert {
        TerminationStep.CANCEL: "cancelled",
        TerminationStep.TERM: "SIGTERM, sent 3 s",
        TerminationStep.KILL: "killed",
    }[step] in outcome.message


def test_a_success_in_spite_of_the_ladder_is_a_success() -> None:
    assert classified(reached=TerminationStep.TERM, record=DONE).cause is EndReason.SUCCEEDED


def test_an_error_after_the_request_to_stop_is_the_stop() -> None:
    assert classified(reached=TerminationStep.CANCEL, record=FAILED).cause is EndReason.STOPPED


def test_an_error_recorded_before_the_request_to_stop_is_the_error() -> None:
    assert classified(reached=TerminationStep.CANCEL, record=FAILED, record_before_stop=True).cause is EndReason.FAILURE


def test_an_unknown_signal_has_a_number() -> None:
    assert "signal 77" in classified(signal=77).message


# The termination policy ----------------------------------------------------------------------------------------------


def rungs(schedule: TerminationSchedule, times: list[float]) -> list[TerminationStep | None]:
    return [schedule.next_step(now) for now in times]


def test_the_ladder_goes_down_one_rung_at_a_time_and_each_once() -> None:
    schedule = TerminationSchedule(TERMINATION, can_cancel=True)
    assert schedule.next_step(0) is None
    schedule.begin(10)
    schedule.begin(11)
    assert rungs(schedule, [10, 12.9, 13, 14, 15, 99]) == [
        TerminationStep.CANCEL,
        None,
        TerminationStep.TERM,
        None,
        TerminationStep.KILL,
        None,
    ]


def test_the_ladder_says_when_it_is_due_again() -> None:
    schedule = TerminationSchedule(TERMINATION, can_cancel=True)
    assert schedule.next_due_at() is None
    schedule.begin(10)
    seen = []
    while (at := schedule.next_due_at()) is not None:
        seen.append((at, schedule.next_step(at)))
    assert seen == [(10, TerminationStep.CANCEL), (13, TerminationStep.TERM), (15, TerminationStep.KILL)]


def test_a_program_starts_at_sigterm() -> None:
    schedule = TerminationSchedule(TERMINATION, can_cancel=False)
    schedule.begin(10)
    assert rungs(schedule, [10, 11.9, 12]) == [TerminationStep.TERM, None, TerminationStep.KILL]


def test_a_late_turn_skips_rungs() -> None:
    schedule = TerminationSchedule(TERMINATION, can_cancel=True)
    schedule.begin(0)
    assert rungs(schedule, [60, 61]) == [TerminationStep.KILL, None]


def test_kill_jumps_to_the_bottom_from_anywhere() -> None:
    fresh, started = (
        TerminationSchedule(TERMINATION, can_cancel=True),
        TerminationSchedule(TERMINATION, can_cancel=True),
    )
    started.begin(0)
    started.next_step(0)
    for schedule in (fresh, started):
        schedule.skip_to_kill(1)
        assert schedule.next_step(1) is TerminationStep.KILL
        assert schedule.next_due_at() is None


def test_signals_have_names() -> None:
    assert classified(signal=signal.SIGTERM).message.startswith("killed by SIGTERM")
