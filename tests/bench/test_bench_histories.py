"""The checks of a history: contradictions are found and named, and nothing else; compared with slow references."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.histories.checks import attempts, effects, violations
from bench.histories.files import Recorder, read_history, sign
from bench.histories.orders import CounterModel, Model, NameModel, first_impossible
from bench.histories.records import Kind, Operation, Outcome, table

VALUE, ERROR, UNKNOWN = Outcome.VALUE, Outcome.ERROR, Outcome.UNKNOWN


def done(process: str, kind: Kind, key: str, begin: float, end: float, value: object = None) -> Operation:
    return Operation(process, kind, key, begin, end, VALUE, value)


def run(attempt: str, begin: float, end: float, outcome: Outcome = VALUE, **of: str) -> Operation:
    return Operation(attempt, Kind.RUN, attempt.split(":")[0], begin, end, outcome, 7, **of)


def test_a_history_of_what_fray_promises_has_no_violation() -> None:
    assert violations(GOOD) == []


GOOD = [
    # A name passes from one actor to the next; one of a lost owner is free after its deadline.
    done("a", Kind.CLAIM, "name", 0, 1, "actor-1"),
    done("b", Kind.CLAIM, "name", 0, 2, ""),
    done("b", Kind.LOOKUP, "name", 2, 3, "actor-1"),
    done("a", Kind.RELEASE, "name", 4, 6, "actor-1"),
    done("b", Kind.CLAIM, "name", 5, 7, "actor-2"),
    done("a", Kind.LOOKUP, "name", 8, 9, "actor-2"),
    Operation("b", Kind.LOST_OWNER, "", 10, 20, VALUE),
    done("a", Kind.LOOKUP, "name", 11, 12, "actor-2"),
    done("a", Kind.LOOKUP, "name", 21, 22, ""),
    # A claim of unknown outcome may have an actor.
    Operation("c", Kind.CLAIM, "name", 22),
    done("a", Kind.LOOKUP, "name", 23, 24, "actor-3"),
    # Increments at the same time, and one of unknown outcome that took effect long after it was lost.
    done("a", Kind.INCREMENT, "counter", 0, 5, 2),
    done("b", Kind.INCREMENT, "counter", 1, 5, 1),
    Operation("c", Kind.INCREMENT, "counter", 5, 6),
    done("a", Kind.READ, "counter", 7, 8, 2),
    done("a", Kind.READ, "counter", 9, 10, 3),
    # Calls.
    done("a", Kind.CALL, "k1", 0, 2),
    done("actor-1:1:0", Kind.EFFECT, "k1", 1, 1),
    Operation("a", Kind.CALL, "k2", 0, 2),
    Operation("a", Kind.CALL, "k3", 0, 2, ERROR),
    done("a", Kind.REPEATABLE_CALL, "k4", 0, 2),
    done("actor-1:1:0", Kind.EFFECT, "k4", 1, 1),
    done("actor-1:2:0", Kind.EFFECT, "k4", 1.5, 1.5),
    # A gang whose first generation was killed.
    done("a", Kind.LAUNCH, "gang", 0, 9, 2),
    run("gang:1:0", 1, 2, UNKNOWN),
    run("gang:2:0", 2, 4),
    run("gang:2:1", 3, 5),
    # What was lost ends in time, and what begins on the machine later is not concerned.
    Operation("m", Kind.LOST_MACHINE, "", 1, 2, VALUE),
    run("job:1:0", 0, 2, UNKNOWN, machine="m"),
    run("job:2:0", 3, 4, machine="m"),
]


@pytest.mark.parametrize(
    ("history", "sentence"),
    [
        (
            [done("a", Kind.CLAIM, "n", 0, 1, "x"), done("b", Kind.CLAIM, "n", 2, 3, "y")],
            "name n: no order explains b: claim n from 2.000 to 3.000 = 'y'; "
            "after a: claim n from 0.000 to 1.000 = 'x'",
        ),
        (
            [done("b", Kind.CLAIM, "n", 2, 3, "")],
            "name n: no order explains b: claim n from 2.000 to 3.000 = ''; the first one",
        ),
        (
            [done("a", Kind.CLAIM, "n", 0, 1, "x"), done("b", Kind.LOOKUP, "n", 2, 3, "")],
            "name n: no order explains b: lookup n from 2.000 to 3.000 = ''; "
            "after a: claim n from 0.000 to 1.000 = 'x'",
        ),
        (
            [
                done("a", Kind.CLAIM, "n", 0, 1, "x"),
                done("a", Kind.RELEASE, "n", 2, 3, "x"),
                done("b", Kind.LOOKUP, "n", 4, 5, "x"),
            ],
            "name n: no order explains b: lookup n from 4.000 to 5.000 = 'x'; "
            "after a: release n from 2.000 to 3.000 = 'x'",
        ),
        (
            [
                done("a", Kind.CLAIM, "n", 0, 1, "x"),
                Operation("a", Kind.LOST_OWNER, "", 2, 4, VALUE),
                done("b", Kind.CLAIM, "n", 5, 6, ""),
            ],
            "name n: no order explains b: claim n from 5.000 to 6.000 = ''; "
            "after a: release n from 2.000 to 4.000 = 'x'",
        ),
        (
            [done("a", Kind.INCREMENT, "c", 0, 1, 1), done("b", Kind.INCREMENT, "c", 2, 3, 1)],
            "counter c: no order explains b: increment c from 2.000 to 3.000 = 1; "
            "after a: increment c from 0.000 to 1.000 = 1",
        ),
        (
            [done("a", Kind.INCREMENT, "c", 0, 1, 1), done("b", Kind.READ, "c", 2, 3, 2)],
            "counter c: no order explains b: read c from 2.000 to 3.000 = 2; "
            "after a: increment c from 0.000 to 1.000 = 1",
        ),
        (
            [done("a", Kind.CALL, "k", 0, 3), done("i", Kind.EFFECT, "k", 1, 1), done("j", Kind.EFFECT, "k", 2, 2)],
            "a call took effect 2 times: i: effect k from 1.000 to 1.000 = None; "
            "j: effect k from 2.000 to 2.000 = None",
        ),
        (
            [Operation("a", Kind.CALL, "k", 0, 3, ERROR), done("i", Kind.EFFECT, "k", 1, 1)],
            "a call failed as one without an effect, and has one: a: call k from 0.000 to 3.000 = error; "
            "i: effect k from 1.000 to 1.000 = None",
        ),
        (
            [done("a", Kind.REPEATABLE_CALL, "k", 0, 3)],
            "a call was answered without an effect: a: repeatable call k from 0.000 to 3.000 = None",
        ),
        (
            [done("a", Kind.CALL, "k", 2, 3), done("i", Kind.EFFECT, "k", 1, 1)],
            "an effect comes before its call: i: effect k from 1.000 to 1.000 = None; "
            "a: call k from 2.000 to 3.000 = None",
        ),
        (
            [done("a", Kind.CALL, "k", 2, 3), done("i", Kind.EFFECT, "k", 4, 4)],
            "an effect comes after the answer to its call: a: call k from 2.000 to 3.000 = None; "
            "i: effect k from 4.000 to 4.000 = None",
        ),
        (
            [done("i", Kind.EFFECT, "k", 4, 4)],
            "an effect without a call: i: effect k from 4.000 to 4.000 = None",
        ),
        (
            [run("g:1:0", 0, 5), run("g:1:0", 6, 7)],
            "an attempt of g began twice: g:1:0: run g from 0.000 to 5.000 = 7; g:1:0: run g from 6.000 to 7.000 = 7",
        ),
        (
            [run("g:1:1", 0, 5, UNKNOWN), run("g:2:0", 4, 6)],
            "two generations of g ran at once: g:1:1: run g from 0.000 to 5.000 = unknown; "
            "g:2:0: run g from 4.000 to 6.000 = 7",
        ),
        (
            [done("a", Kind.LAUNCH, "g", 0, 9, 2), run("g:1:0", 1, 2), run("g:2:1", 3, 4)],
            "a job succeeded of which no generation has 2 members that were done: a: launch g from 0.000 to 9.000 = 2",
        ),
        (
            [done("a", Kind.LAUNCH, "g", 0, 9, 2), run("g:1:0", 1, 2), run("g:1:1", 3, 4)],
            "members of a gang did not run together: g:1:0: run g from 1.000 to 2.000 = 7; "
            "g:1:1: run g from 3.000 to 4.000 = 7",
        ),
        (
            [Operation("d", Kind.LOST_OWNER, "", 1, 2, VALUE, "grace"), run("g:2:0", 3, 4, owner="d")],
            "a run outlived what was lost: d: lost owner  from 1.000 to 2.000 = 'grace'; "
            "g:2:0: run g from 3.000 to 4.000 = 7",
        ),
        (
            [Operation("o", Kind.LOST_MACHINE, "", 1, 2, VALUE, 1), run("g:1:0", 0, 3, machine="o")],
            "a run outlived what was lost: o: lost machine  from 1.000 to 2.000 = 1; "
            "g:1:0: run g from 0.000 to 3.000 = 7",
        ),
    ],
)
def test_a_contradiction_reads_as_a_sentence_with_its_two_records(history: list[Operation], sentence: str) -> None:
    assert violations(history) == [sentence]
    assert violations([*GOOD, *history]) == [sentence], "whatever else has happened"


# Against slow references ---------------------------------------------------------------------------------------------


def is_explained(operations: list[Operation], model: Model) -> bool:
    """Try every order of all operations that ended, with any of those that may have taken effect."""
    ended = [one for one in operations if one.outcome is VALUE]
    perhaps = [one for one in operations if one.outcome is UNKNOWN]
    for bits in range(2 ** len(perhaps)):
        chosen = [*ended, *(one for at, one in enumerate(perhaps) if bits >> at & 1)]
        for order in permutations(chosen):
            in_time = all(
                after.outcome is UNKNOWN or after.end is None or after.end >= before.begin
                for at, before in enumerate(order)
                for after in order[at + 1 :]
            )
            states = {model.initial}
            for operation in order if in_time else ():
                states = {after for state in states for after in model.step(state, operation)}
            if in_time and states:
                return True
    return False


TIMES = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)
OUTCOMES = st.sampled_from([VALUE, VALUE, VALUE, UNKNOWN])


@st.composite
def counting(draw: st.DrawFn) -> Operation:
    (begin, end), outcome = draw(TIMES), draw(OUTCOMES)
    kind = draw(st.sampled_from([Kind.INCREMENT, Kind.INCREMENT, Kind.READ]))
    value = draw(st.integers(0, 4)) if outcome is VALUE else None
    return Operation("p", kind, "c", begin, end if outcome is VALUE else None, outcome, value)


@st.composite
def naming(draw: st.DrawFn) -> Operation:
    (begin, end), outcome = draw(TIMES), draw(OUTCOMES)
    kind = draw(st.sampled_from([Kind.CLAIM, Kind.CLAIM, Kind.RELEASE, Kind.LOOKUP]))
    value = draw(st.sampled_from(["", "x", "y"])) if kind is not Kind.RELEASE else draw(st.sampled_from(["x", "y"]))
    return Operation("p", kind, "n", begin, end if outcome is VALUE else None, outcome, value)


@settings(max_examples=200)
@given(st.lists(counting(), max_size=5))
def test_orders_of_a_counter_are_found_as_by_trying_all(history: list[Operation]) -> None:
    model = CounterModel()
    assert (first_impossible(history, model) is None) is is_explained(history, model)


@settings(max_examples=200)
@given(st.lists(naming(), max_size=5))
def test_orders_of_a_name_are_found_as_by_trying_all(history: list[Operation]) -> None:
    model = NameModel(one.value for one in history if one.kind is Kind.CLAIM and one.value and one.outcome is VALUE)
    assert (first_impossible(history, model) is None) is is_explained(history, model)


@st.composite
def running(draw: st.DrawFn) -> Operation:
    (begin, end), generation, member = draw(TIMES), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    return run(f"g:{generation}:{member}", begin, end + 1)


@settings(max_examples=100)
@given(st.lists(running(), max_size=5, unique_by=lambda one: one.process))
def test_generations_that_run_at_once_are_found_as_by_looking_at_each_moment(history: list[Operation]) -> None:
    moments = [at + 0.5 for at in range(10)]
    living = [{one.process.split(":")[1] for one in history if one.begin < at < (one.end or 0)} for at in moments]
    assert bool([one for one in attempts(history) if "at once" in one]) is any(len(each) > 1 for each in living)


@settings(max_examples=100)
@given(st.sampled_from([Kind.CALL, Kind.REPEATABLE_CALL]), st.sampled_from(list(Outcome)), st.integers(0, 3))
def test_numbers_of_effects_are_judged_as_by_a_table(kind: Kind, outcome: Outcome, times: int) -> None:
    history = [Operation("p", kind, "k", 0, 2, outcome)] + [done("i", Kind.EFFECT, "k", 1, 1)] * times
    allowed = {
        VALUE: {1} if kind is Kind.CALL else {1, 2, 3},
        ERROR: {0},
        UNKNOWN: {0, 1} if kind is Kind.CALL else {0, 1, 2, 3},
    }
    assert (not list(effects(history))) is (times in allowed[outcome])


# Files ---------------------------------------------------------------------------------------------------------------


def test_what_processes_record_is_read_back_also_if_the_last_line_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAY_NODE", "n1")
    recorder = Recorder(tmp_path, "driver-1")
    recorder.begin(Kind.CLAIM, "name")
    increment = recorder.begin(Kind.INCREMENT, "counter", token="counter 1")
    launch = recorder.begin(Kind.LAUNCH, "gang")
    for attempt in ("counter-y:1:0", "gang-x:1:0", "gang-x:1:1"):
        monkeypatch.setenv("FRAY_ATTEMPT_ID", attempt)
        sign(str(tmp_path), "begun", "driver-1")
    for attempt in ("gang-x:1:0", "gang-x:1:1"):
        monkeypatch.setenv("FRAY_ATTEMPT_ID", attempt)
        sign(str(tmp_path), "alive", "driver-1")
        sign(str(tmp_path), "done", "driver-1")
    monkeypatch.setenv("FRAY_ATTEMPT_ID", "counter-y:1:0")
    sign(str(tmp_path), "effect", call="counter 1")
    recorder.end(launch, VALUE, 2, key="gang-x")
    recorder.end(increment, VALUE, 1)
    with (tmp_path / "gang-x.history").open("a") as file:
        file.write('{"word": "ali')
    history = read_history(tmp_path)
    assert table(history) == {
        "call, value": 1,
        "claim, unknown": 1,
        "effect, value": 1,
        "increment, value": 1,
        "launch, value": 1,
        "run, unknown": 1,
        "run, value": 2,
    }
    gang = [one for one in history if one.key == "gang-x" and one.kind is Kind.RUN]
    assert [(one.process, one.machine, one.owner) for one in gang] == [
        ("gang-x:1:0", "n1", "driver-1"),
        ("gang-x:1:1", "n1", "driver-1"),
    ]
    assert violations(history) == []
