"""Answers of a sampler: kept by time and number."""

from __future__ import annotations

import pytest

from fray.tinker.core.ledger import LedgerConflict, LedgerEntry
from fray.tinker.core.sample_ledger import ANSWER_S, ANSWERS_LIMIT, SampleLedger


def test_the_answer_one_past_the_limit_is_forgotten_the_oldest_first() -> None:
    ledger = SampleLedger()
    for seq in range(ANSWERS_LIMIT + 2):
        assert ledger.receive(seq, "asample", str(seq))
    # The first request has none yet, and the second is answered last.
    for seq in (*range(2, ANSWERS_LIMIT + 1), 1):
        ledger.finish(seq, 0.0)
    assert not ledger.has_old(0.0)
    assert ledger.forget(0.0) == []
    ledger.finish(ANSWERS_LIMIT + 1, 0.0)
    assert ledger.has_old(0.0)
    assert ledger.forget(0.0) == [2]
    assert (0 in ledger.entries, 1 in ledger.entries, len(ledger.entries)) == (True, True, ANSWERS_LIMIT + 1)
    # It may come again, and is a new request; one that is known is not.
    assert ledger.receive(2, "asample", "2")
    assert not ledger.receive(3, "asample", "3")
    with pytest.raises(LedgerConflict, match="number 3 was sent before with another body"):
        ledger.receive(3, "asample", "other")


def test_an_answer_is_forgotten_after_its_time_and_its_number_is_not_used_again() -> None:
    entries = [LedgerEntry(0, "asample", "a", answer=True), LedgerEntry(1, "asample", "b")]
    ledger = SampleLedger(entries, now=100.0)
    ledger.finish(1, 200.0)
    assert not ledger.has_old(99.9 + ANSWER_S)
    assert ledger.has_old(100.0 + ANSWER_S)
    assert ledger.forget(100.0 + ANSWER_S) == [0]
    assert ledger.forget(200.0 + ANSWER_S) == [1]
    assert (ledger.entries, ledger.next_seq) == ({}, 2)
