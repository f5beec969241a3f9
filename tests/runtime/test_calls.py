"""The books of both ends: each call runs at most once, and each caller learns what became of it."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import ActorDied, FrayError, MachineLost, OutcomeUnknown, Unauthorized
from fray.model.messages.calls import CallMeta
from fray.runtime.calls import wire
from fray.runtime.calls.dedup import Admission, Answer, CallDeduplicator
from fray.runtime.calls.host_connection import PendingCalls
from fray.runtime.calls.host_loss import HostLoss, LossAction, on_host_lost
from fray.runtime.serialization.number_list import pack_numbers, unpack_numbers

RESULT = 33


@define(eq=False)
class Call:
    name: str = ""
    size: int = 1
    number: int = 0


# On the wire ---------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), st.binary())
def test_the_head_of_a_call_can_be_split_off(method: str, rest: bytes) -> None:
    found, pickle = wire.split_call(wire.call_head(method) + rest)
    assert (found, bytes(pickle)) == (method, rest)


@given(
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.text("abc-:0123", min_size=1), max_size=5),
    st.binary(),
)
def test_the_options_of_a_call_can_be_split_off(deadline_s: float | None, chain: list[str], rest: bytes) -> None:
    meta = CallMeta(deadline_s=deadline_s, chain=tuple(chain))
    found, body = wire.split_meta(wire.pack_meta(meta) + rest)
    assert (found, bytes(body)) == (meta, rest)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_numbers_can_be_read_back(numbers: list[int]) -> None:
    assert list(unpack_numbers(pack_numbers(numbers))) == numbers


# The dedup ----------------------------------------------------------------------------------------------------------


def answer(text: bytes = b"x") -> Answer:
    return RESULT, 0, text


def test_a_new_call_runs_and_a_repeated_one_attaches() -> None:
    dedup = CallDeduplicator()
    assert dedup.admit(1) is Admission.RUN
    assert dedup.admit(1) is Admission.ATTACH


def test_an_answered_call_is_answered_again_with_the_same_answer() -> None:
    dedup = CallDeduplicator()
    dedup.admit(1)
    assert dedup.answered(1, answer(b"first"))
    assert not dedup.answered(1, answer(b"second"))
    assert dedup.admit(1) is Admission.REPEAT
    assert dedup.answer(1) == answer(b"first")


def test_a_settled_call_is_forgotten_and_never_run_again() -> None:
    dedup = CallDeduplicator()
    dedup.admit(1)
    dedup.answered(1, answer())
    dedup.discard_answers([1])
    assert len(dedup) == 0
    assert dedup.admit(1) is Admission.FORGOTTEN
    assert dedup.admit(1) is Admission.FORGOTTEN


def test_a_running_call_cannot_be_settled() -> None:
    dedup = CallDeduplicator()
    dedup.admit(1)
    dedup.discard_answers([1, 2])
    assert dedup.admit(1) is Admission.ATTACH


def test_a_new_deduplicator_runs_no_call_that_is_sent_again() -> None:
    dedup = CallDeduplicator(is_complete=False)
    assert dedup.admit(4, again=True) is Admission.FORGOTTEN
    assert dedup.admit(4, again=True) is Admission.FORGOTTEN
    assert dedup.admit(5) is Admission.RUN


def test_an_unbroken_ledger_runs_a_call_that_was_sent_and_never_arrived() -> None:
    dedup = CallDeduplicator()
    dedup.admit(1)
    assert dedup.admit(2, again=True) is Admission.RUN


def test_a_caller_with_too_many_open_calls_is_refused_until_it_settles() -> None:
    dedup = CallDeduplicator(open_limit=2)
    assert [dedup.admit(number) for number in (1, 2, 3)] == [Admission.RUN, Admission.RUN, Admission.FULL]
    dedup.answered(1, answer())
    dedup.discard_answers([1])
    assert dedup.admit(4) is Admission.RUN


def test_stored_answers_take_room_until_they_are_settled() -> None:
    dedup = CallDeduplicator(kept_limit_bytes=10)
    for number in (1, 2):
        dedup.admit(number)
    dedup.answered(1, answer(b"x" * 10))
    assert not dedup.has_room
    dedup.discard_answers([1])
    assert dedup.has_room
    assert dedup.kept_bytes == 0


def test_after_a_reset_only_answers_the_caller_still_waits_for_are_stored() -> None:
    dedup = CallDeduplicator()
    for number in (1, 2, 3, 4):
        dedup.admit(number)
    for number in (1, 2, 3):
        dedup.answered(number, answer())
    dedup.discard_answers_except([2, 4])
    assert [dedup.admit(number) for number in (1, 2, 3, 4)] == [
        Admission.FORGOTTEN,
        Admission.REPEAT,
        Admission.FORGOTTEN,
        Admission.ATTACH,
    ]


class Twin:
    """A dedup that never forgets anything: slow, large, and obviously right."""

    def __init__(self) -> None:
        self.state: dict[int, str] = {}

    def admit(self, number: int) -> Admission:
        known = self.state.setdefault(number, "new")
        if known == "new":
            self.state[number] = "running"
            return Admission.RUN
        return {"running": Admission.ATTACH, "answered": Admission.REPEAT, "settled": Admission.FORGOTTEN}[known]

    def answered(self, number: int) -> bool:
        if self.state.get(number) != "running":
            return False
        self.state[number] = "answered"
        return True

    def settle(self, number: int) -> None:
        if self.state.get(number) == "answered":
            self.state[number] = "settled"


@given(st.lists(st.tuples(st.sampled_from(["new", "again", "answer", "settle"]), st.integers(0, 30)), max_size=80))
def test_the_ledger_decides_as_its_dumb_twin(steps: list[tuple[str, int]]) -> None:
    dedup, twin, last = CallDeduplicator(), Twin(), 0
    for what, pick in steps:
        number = 1 + pick % last if last else 0
        if what == "new":
            last += 1
            assert dedup.admit(last) is twin.admit(last)
        elif not number:
            continue
        elif what == "again":
            assert dedup.admit(number, again=True) is twin.admit(number)
        elif what == "answer":
            assert dedup.answered(number, answer()) is twin.answered(number)
        else:
            dedup.discard_answers([number])
            twin.settle(number)
    assert dedup.kept_bytes == sum(state == "answered" for state in twin.state.values())
    assert len(dedup) == sum(state in ("running", "answered") for state in twin.state.values())


# The caller's table --------------------------------------------------------------------------------------------------


def test_calls_get_growing_numbers_when_they_are_sent() -> None:
    table: PendingCalls[Call] = PendingCalls()
    first, second = Call(), Call()
    table.queue(first)
    table.queue(second)
    assert (first.number, second.number) == (0, 0)
    assert [table.sent_queued() for _ in range(2)] == [first, second]
    assert (first.number, second.number) == (1, 2)


def test_a_call_that_could_not_be_handed_over_stays_first_in_the_queue() -> None:
    table: PendingCalls[Call] = PendingCalls()
    first, second = Call(), Call()
    table.sent(first)
    table.queue(second)
    table.unsend(first)
    assert list(table.queued) == [first, second]
    assert table.sent_queued().number == 2, "a number is never used twice"


def test_a_queued_call_can_be_withdrawn_and_a_sent_one_cannot() -> None:
    table: PendingCalls[Call] = PendingCalls()
    sent, queued = Call(), Call()
    table.sent(sent)
    table.queue(queued)
    assert table.withdraw(queued)
    assert not table.withdraw(sent)
    assert table.held_bytes == 1


def test_answers_are_settled_in_lots() -> None:
    table: PendingCalls[Call] = PendingCalls()
    for _ in range(wire.SETTLE_EVERY_CALLS):
        assert table.take_settled() is None
        table.answered(table.sent(Call()), 10)
    lot = table.take_settled()
    assert lot is not None
    assert unpack_numbers(lot) == tuple(range(1, wire.SETTLE_EVERY_CALLS + 1))
    assert table.take_settled() is None


def test_a_large_answer_is_settled_at_once() -> None:
    table: PendingCalls[Call] = PendingCalls()
    table.answered(table.sent(Call()), wire.SETTLE_EVERY_BYTES)
    assert table.take_settled() == pack_numbers([1])


def test_a_table_is_full_by_number_or_by_bytes() -> None:
    by_number: PendingCalls[Call] = PendingCalls()
    for _ in range(wire.OPEN_CALLS_LIMIT):
        assert not by_number.is_full
        by_number.queue(Call())
    assert by_number.is_full
    by_bytes: PendingCalls[Call] = PendingCalls()
    by_bytes.sent(Call(size=wire.OPEN_BYTES_LIMIT))
    assert by_bytes.is_full


def test_the_calls_of_one_binding_can_be_taken_out_in_order() -> None:
    table: PendingCalls[Call] = PendingCalls()
    named = [Call(name) for name in "abab"]
    for call in named[:2]:
        table.sent(call)
    for call in named[2:]:
        table.queue(call)
    queued, opened = table.take(lambda call: call.name == "a")
    assert (queued, opened) == ([named[2]], [named[0]])
    assert list(table.open.values()) == [named[1]]
    assert table.held_bytes == 2


# When the host is gone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delivered", "may_come_back", "repeats", "expected"),
    [
        (False, False, 0, LossAction.DIED),
        (False, False, 9, LossAction.DIED),
        (False, True, 0, LossAction.REPEAT),
        (False, True, 9, LossAction.REPEAT),
        (True, False, 0, LossAction.UNKNOWN),
        (True, False, 9, LossAction.UNKNOWN),
        (True, True, 0, LossAction.UNKNOWN),
        (True, True, 1, LossAction.REPEAT),
    ],
)
def test_the_action_for_a_call_whose_host_is_gone(
    delivered: bool, may_come_back: bool, repeats: int, expected: LossAction
) -> None:
    assert on_host_lost(delivered=delivered, may_come_back=may_come_back, repeats=repeats) is expected


def test_an_undelivered_call_died_and_a_delivered_one_is_unknown_and_both_are_caught_as_actor_died() -> None:
    end = HostLoss(text="killed by signal 9", cause=ValueError("why"))
    died, unknown = end.undelivered("counter"), end.delivered("counter", "add")
    assert type(died) is ActorDied
    assert type(unknown) is OutcomeUnknown
    assert isinstance(unknown, ActorDied)
    assert isinstance(died.__cause__, ValueError)
    assert "killed by signal 9" in str(unknown)
    assert "idempotent=True" in str(unknown)


def test_the_error_of_a_lost_call_advises_by_what_its_caller_has_allowed() -> None:
    end = HostLoss(text="killed by signal 9")
    allowed, other = (str(end.delivered("counter", "add", repeated)) for repeated in (True, False))
    assert "there is no next incarnation of the actor to repeat it" in allowed
    assert "idempotent=True" not in allowed
    assert "pass idempotent=True if it may be repeated" in other
    assert "incarnation" not in other


def test_calls_on_a_silent_machine_end_as_machine_lost() -> None:
    end = HostLoss(text="silent", is_machine_lost=True)
    assert type(end.undelivered("a")) is MachineLost
    assert type(end.delivered("a", "m")) is MachineLost


def test_calls_that_could_not_be_made_for_want_of_a_key_say_that() -> None:
    trouble: FrayError = Unauthorized("wrong key")
    end = HostLoss(text="wrong key", channel_error=trouble)
    assert end.undelivered("a") is trouble
    assert end.delivered("a", "m").__cause__ is trouble


# Both together, with cuts at every place ------------------------------------------------------------------------------


@define(eq=False)
class World:
    """A caller and a host with a wire in each direction that a reset empties; user code counts its runs.

    The channel below gives order and no repetition as long as it remembers; a reset is what it does not hide.
    """

    table: PendingCalls[Call] = field(factory=PendingCalls)
    dedup: CallDeduplicator = field(factory=CallDeduplicator)
    down: deque[tuple[str, int, bool, bytes]] = field(factory=deque)
    up: deque[tuple[int, bytes]] = field(factory=deque)
    runs: dict[int, int] = field(factory=dict)
    running: list[int] = field(factory=list)
    answers: dict[int, list[bytes]] = field(factory=dict)

    def call(self) -> None:
        self.down.append(("call", self.table.sent(Call()), False, b""))

    def deliver(self) -> None:
        if not self.down:
            return
        what, number, again, body = self.down.popleft()
        if what == "settled":
            self.dedup.discard_answers(unpack_numbers(body))
        elif what == "only":
            self.dedup.discard_answers_except(unpack_numbers(body))
        else:
            self.admit(number, again)

    def admit(self, number: int, again: bool) -> None:
        verdict = self.dedup.admit(number, again)
        if verdict is Admission.RUN:
            self.runs[number] = self.runs.get(number, 0) + 1
            self.running.append(number)
        elif verdict is Admission.REPEAT:
            kept = self.dedup.answer(number)
            assert kept is not None
            self.up.append((number, kept[2]))
        elif verdict is Admission.FORGOTTEN:
            self.up.append((number, b"unknown"))

    def finish(self, pick: int) -> None:
        if self.running:
            number = self.running.pop(pick % len(self.running))
            reply = answer(b"run %d" % self.runs[number])
            if self.dedup.answered(number, reply):
                self.up.append((number, reply[2]))

    def receive(self) -> None:
        if self.up:
            number, body = self.up.popleft()
            if self.table.answered(number, len(body)) is not None:
                self.answers.setdefault(number, []).append(body)
            settled = self.table.take_settled(force=True)
            if settled is not None:
                self.down.append(("settled", 0, False, settled))

    def reset(self) -> None:
        self.down.clear()
        self.up.clear()
        unsettled, again = self.table.reset()
        self.down.append(("only", 0, False, unsettled))
        self.down.extend(("call", call.number, True, b"") for call in again)

    def forget(self) -> None:
        """The host throws the dedup away; the caller says that it is known when it comes back."""
        self.dedup = CallDeduplicator(is_complete=False)
        self.running.clear()
        self.reset()

    def settle(self) -> None:
        """Let everything arrive and end."""
        while self.down or self.up or self.running:
            self.deliver()
            self.finish(0)
            self.receive()

    def check(self, calls_made: int, *, all_known: bool) -> None:
        assert self.runs == dict.fromkeys(self.runs, 1), "no call runs twice"
        assert sorted(self.answers) == list(range(1, calls_made + 1)), "every call is answered"
        assert all(len(bodies) == 1 for bodies in self.answers.values()), "and once"
        if all_known:
            assert all(bodies == [b"run 1"] for bodies in self.answers.values())
            assert len(self.runs) == calls_made
        assert len(self.dedup) == 0, "nothing is kept for ever"
        assert self.dedup.kept_bytes == self.table.held_bytes == 0


STEPS = ("call", "deliver", "finish", "receive", "reset")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=60))
def test_resets_anywhere_lose_no_call_and_repeat_none(steps: list[tuple[str, int]]) -> None:
    world = World()
    for what, pick in steps:
        if what == "finish":
            world.finish(pick)
        else:
            getattr(world, what)()
    made = sum(what == "call" for what, _ in steps)
    world.settle()
    world.check(made, all_known=True)


@given(st.lists(st.tuples(st.sampled_from((*STEPS, "forget")), st.integers(0, 5)), max_size=60))
def test_a_host_that_forgot_runs_nothing_twice_and_answers_all(steps: list[tuple[str, int]]) -> None:
    world = World()
    for what, pick in steps:
        if what == "finish":
            world.finish(pick)
        else:
            getattr(world, what)()
    made = sum(what == "call" for what, _ in steps)
    world.settle()
    world.check(made, all_known=False)


def test_a_reset_at_every_place_of_a_long_conversation() -> None:
    rng = random.Random(7)
    steps = [rng.choice(STEPS[:4]) for _ in range(60)]
    for cuts in itertools.combinations(range(0, 60, 3), 2):
        world = World()
        for place, what in enumerate(steps):
            if place in cuts:
                world.reset()
            if what == "finish":
                world.finish(place)
            else:
                getattr(world, what)()
        world.settle()
        world.check(steps.count("call"), all_known=True)
