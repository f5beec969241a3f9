"""Reconciling desired and observed attempts into actions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fray.model.specs import DesiredAttempt, EndReason, EntryKind, JobSpec, ObservedAttempt, Outcome, Phase
from fray.node.reconcile import Decline, Forget, Kill, Start, Stop, decide

SPEC = JobSpec(job_id="j", name="j", namespace="n", entry=EntryKind.CALLABLE)


def desired(attempt_id: str = "a", *, stop: bool = False) -> DesiredAttempt:
    return DesiredAttempt(attempt_id=attempt_id, spec=SPEC, stop=stop)


def held(phase: Phase, attempt_id: str = "a") -> ObservedAttempt:
    outcome = Outcome(cause=EndReason.SUCCEEDED) if phase is Phase.ENDED else None
    return ObservedAttempt(attempt_id=attempt_id, phase=phase, outcome=outcome)


def test_what_is_wanted_and_not_held_is_started() -> None:
    assert decide({"a": desired()}, {}) == [Start(desired())]


def test_what_is_wanted_and_held_is_left_alone_in_every_phase() -> None:
    assert all(decide({"a": desired()}, {"a": held(phase)}) == [] for phase in Phase)


def test_what_shall_stop_before_it_was_started_is_declined() -> None:
    assert decide({"a": desired(stop=True)}, {}) == [Decline(desired(stop=True))]


def test_what_shall_stop_is_stopped_once() -> None:
    assert decide({"a": desired(stop=True)}, {"a": held(Phase.STARTING)}) == [Stop("a")]
    assert decide({"a": desired(stop=True)}, {"a": held(Phase.RUNNING)}) == [Stop("a")]
    assert decide({"a": desired(stop=True)}, {"a": held(Phase.STOPPING)}) == []
    assert decide({"a": desired(stop=True)}, {"a": held(Phase.ENDED)}) == []


def test_what_is_no_longer_wanted_is_killed_and_forgotten_once_it_has_ended() -> None:
    for phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING):
        assert decide({}, {"a": held(phase)}) == [Kill("a")]
    assert decide({}, {"a": held(Phase.ENDED)}) == [Forget("a")]


def test_endings_come_before_starts() -> None:
    assert decide({"b": desired("b")}, {"a": held(Phase.RUNNING)}) == [Kill("a"), Start(desired("b"))]


IDS = st.sampled_from("abcd")


@given(
    st.dictionaries(IDS, st.booleans()),
    st.dictionaries(IDS, st.sampled_from(list(Phase))),
)
def test_a_launcher_that_obeys_ends_up_holding_exactly_what_is_wanted(
    wanted_stop: dict[str, bool], phases: dict[str, Phase]
) -> None:
    """Every action is carried out by a launcher whose attempts end as soon as they are stopped."""
    wanted = {name: desired(name, stop=stop) for name, stop in wanted_stop.items()}
    now = {name: held(phase, name) for name, phase in phases.items()}
    for _ in range(3):
        for action in decide(wanted, now):
            match action:
                case Start(asked):
                    now[asked.attempt_id] = held(Phase.RUNNING, asked.attempt_id)
                case Decline(asked):
                    now[asked.attempt_id] = held(Phase.ENDED, asked.attempt_id)
                case Stop(name) | Kill(name):
                    now[name] = held(Phase.ENDED, name)
                case Forget(name):
                    del now[name]
    assert decide(wanted, now) == []
    assert now.keys() == wanted.keys()
    assert all(now[name].phase in (Phase.ENDED, Phase.STOPPING) for name, stop in wanted_stop.items() if stop)
