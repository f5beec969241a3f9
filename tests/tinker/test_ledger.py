"""The ledger of a job: order, repetition, gaps and restarts; and a simulation against a plain list of requests."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.tinker.core.ledger import AHEAD_LIMIT, Ledger, LedgerConflict, LedgerEntry


def test_requests_are_executed_in_order_and_answered_once() -> None:
    ledger = Ledger()
    assert ledger.next_seq() is None
    assert ledger.receive("train_step", "a").seq == 1
    assert ledger.receive("train_step", "b").seq == 2
    assert ledger.next_seq() == 1
    assert ledger.finish(1, "A")
    assert ledger.next_seq() == 2
    with pytest.raises(ValueError, match="request 1 was executed, but 2 is the next"):
        ledger.finish(1, "again")


def test_a_repetition_by_request_id_is_the_same_request() -> None:
    ledger = Ledger()
    first = ledger.receive("train_step", "a", request_id="r1")
    ledger.finish(1, "A")
    ledger.entries[1].was_sent = True
    again = ledger.receive("train_step", "a", request_id="r1")
    assert (again.seq, again.is_new, first.is_new) == (1, False, True)
    with pytest.raises(LedgerConflict, match="request id 'r1' was sent before with another body"):
        ledger.receive("train_step", "b", request_id="r1")


def test_an_equal_body_is_a_repetition_only_if_the_answer_was_lost() -> None:
    ledger = Ledger()
    ledger.receive("train_step", "a")
    ledger.entries[1].listeners = 1
    assert ledger.receive("train_step", "a").is_new, "the first connection waits: it is sent twice on purpose"
    ledger.finish(1, "A")
    ledger.finish(2, "A2")
    assert ledger.receive("train_step", "a").seq == 2, "no connection waits for the latest, and it was not sent"
    ledger.entries[2].was_sent = True
    assert ledger.receive("train_step", "a").seq == 3


def test_a_request_behind_a_gap_names_the_number_it_waits_for() -> None:
    ledger = Ledger()
    ledger.receive("train_step", "c", seq=3)
    assert (ledger.next_seq(), ledger.waits_for(3)) == (None, 1)
    ledger.receive("train_step", "a", seq=1)
    assert (ledger.next_seq(), ledger.waits_for(3)) == (1, 2)
    ledger.receive("train_step", "b", seq=2)
    assert ledger.waits_for(3) is None
    assert ledger.receive("train_step", "b", seq=2).is_new is False
    with pytest.raises(LedgerConflict, match="number 2 was sent before with another body"):
        ledger.receive("train_step", "x", seq=2)
    with pytest.raises(LedgerConflict, match="the first request of this job has number 1"):
        ledger.receive("train_step", "x", seq=0)
    with pytest.raises(LedgerConflict, match=f"more than {AHEAD_LIMIT} after 0"):
        ledger.receive("train_step", "x", seq=AHEAD_LIMIT + 1)


def test_after_a_snapshot_effects_are_executed_again_and_answers_stay() -> None:
    ledger = Ledger()
    for kind, digest in (("train_step", "a"), ("validate", "v"), ("train_step", "b")):
        ledger.receive(kind, digest, has_effect=kind == "train_step")
    for seq in (1, 2, 3):
        assert ledger.next_seq() == seq
        ledger.finish(seq, f"first {seq}")
    ledger.rewind(0)
    assert ledger.next_seq() == 1
    assert ledger.finish(1, "second") is False
    assert ledger.next_seq() == 3, "what has no effect is not executed again"
    assert ledger.entries[1].answer == "first 1"
    with pytest.raises(ValueError, match="up to 9, but 4 is not in the ledger"):
        ledger.rewind(9)
    ledger.receive("train_step", "c")
    with pytest.raises(ValueError, match="up to 4, but the answer to 4 was lost"):
        ledger.rewind(4)


@st.composite
def faults(draw: st.DrawFn) -> tuple[int, list[bool], int]:
    effects = draw(st.lists(st.booleans(), min_size=1, max_size=8))
    return draw(st.integers(0, 2**32)), effects, draw(st.integers(0, 4))


@given(faults())
def test_lost_doubled_reordered_and_late_requests_take_effect_once(plan: tuple[int, list[bool], int]) -> None:
    """Clients repeat until they have an answer; engine and server are lost at any moment. The reference is a list."""
    seed, effects, losses = plan
    rng = random.Random(seed)
    numbers = list(range(1, len(effects) + 1))
    expected = [seq for seq in numbers if effects[seq - 1]]
    disk: dict[int, LedgerEntry] = {}  # written before a request is taken, and with each answer
    ledger = Ledger()
    engine: list[int] = []  # effects that its weights have
    snapshot: tuple[int, list[int]] = (0, [])
    answers: dict[int, set[str]] = {seq: set() for seq in numbers}
    received: set[int] = set()
    for _ in range(10_000):
        event = rng.choice(["send", "send", "execute", "execute", "snapshot", "lose engine", "lose server"])
        if event == "send":
            seq = rng.choice(numbers)
            if rng.random() < 0.2:
                continue  # lost on its way
            receipt = ledger.receive("work", f"body {seq}", seq=seq, has_effect=effects[seq - 1])
            assert receipt.seq == seq
            if receipt.is_new:
                assert seq not in received
                received.add(seq)
                disk[seq] = copy.copy(ledger.entries[seq])
            answer = ledger.entries[seq].answer
            if answer is not None and rng.random() < 0.8:
                answers[seq].add(answer)
        elif event == "execute" and (seq := ledger.next_seq()) is not None:
            if effects[seq - 1]:
                engine.append(seq)
            if losses and rng.random() < 0.3:
                losses -= 1  # the engine is lost after the effect and before the answer
                engine = list(snapshot[1])
                ledger.rewind(snapshot[0])
                continue
            if ledger.finish(seq, f"{seq} after {engine}"):
                disk[seq] = copy.copy(ledger.entries[seq])
        elif event == "snapshot":
            snapshot = (ledger.applied, list(engine))
        elif event == "lose engine" and losses:
            losses -= 1
            engine = list(snapshot[1])
            ledger.rewind(snapshot[0])
        elif event == "lose server" and losses:
            losses -= 1
            ledger = Ledger([copy.copy(entry) for entry in disk.values()])
            engine = list(snapshot[1])
            ledger.rewind(snapshot[0])
        if all(answers.values()) and engine == expected:
            break
    assert engine == expected
    assert all(len(found) == 1 for found in answers.values())
    for seq in numbers:
        assert answers[seq] == {f"{seq} after {[each for each in expected if each <= seq]}"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=10))
def test_without_ids_a_client_that_repeats_until_it_is_answered_is_trained_once_a_batch(
    batches: list[tuple[str, bool]],
) -> None:
    """Each batch may lose its first connection, before or after it was executed."""
    ledger = Ledger()
    executed: list[str] = []
    for body, is_lost in batches:
        seq = ledger.receive("train_step", body).seq
        if is_lost:
            if (ready := ledger.next_seq()) is not None and len(executed) % 2:
                executed.append(body)
                ledger.finish(ready, "done")
            again = ledger.receive("train_step", body)
            assert (again.seq, again.is_new) == (seq, False)
        if (ready := ledger.next_seq()) is not None:
            executed.append(body)
            ledger.finish(ready, "done")
        ledger.entries[seq].was_sent = True
    assert executed == [body for body, _ in batches]
