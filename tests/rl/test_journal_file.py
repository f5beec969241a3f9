"""The file of a run's journal: what was appended is read, and what is cut or damaged ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fray.errors import InvalidRequest
from fray.rl.core.journal import BatchLoaded, BatchTrained, Entry, SamplesAccepted
from fray.rl.core.run_record import RunPlan
from fray.rl.core.tasks import RolloutTask, TaskOrder
from fray.rl.core.trajectory_store import Sample
from fray.rl.core.versions import VersionName
from fray.rl.journal_file import JournalFile, RunJournal, claim_journal, read_journal

SAMPLE = Sample(RolloutTask(0, 1, 0, 7), 0, ((VersionName(0, 0), 3),), (1.0,), b"content")
ENTRIES: list[Entry] = [BatchLoaded(0), SamplesAccepted((SAMPLE,), (("g",),)), BatchTrained()]


def written(path: Path) -> Path:
    journal = JournalFile(path)
    for entry in ENTRIES:
        journal.append([entry])
    journal.append([])
    journal.close()
    return path


def test_entries_are_read_as_they_were_appended_with_the_contents_of_samples(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    assert read_journal(path) == ENTRIES
    (accepted,) = [entry for entry in read_journal(path) if isinstance(entry, SamplesAccepted)]
    assert accepted.samples[0].content == b"content"
    assert read_journal(tmp_path / "none") == []


def test_a_journal_that_was_cut_anywhere_ends_before_the_cut_and_is_continued_there(tmp_path: Path) -> None:
    content = written(tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = read_journal(path)
        assert found == ENTRIES[: len(found)]
        assert len(found) < len(ENTRIES)
        journal = JournalFile(path)
        journal.append([BatchTrained()])
        journal.close()
        assert read_journal(path) == [*found, BatchTrained()]


@pytest.mark.parametrize("place", [0, 5, 9, -1])
def test_a_damaged_record_ends_the_journal(place: int, tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    assert read_journal(path) == (ENTRIES[:-1] if place == -1 else [])


def test_a_process_that_lives_on_cannot_write_to_the_journal_that_another_one_has_taken_over(tmp_path: Path) -> None:
    plan = RunPlan(TaskOrder(rows=4, batch_rows=2, repeats=1, epochs=None), batch_size=2)
    old, new = RunJournal(tmp_path), RunJournal(tmp_path)
    state = old.recover(plan)
    old.append([BatchLoaded(0)], 0)
    found = new.recover(plan)
    assert (found.record.loaded, found.incarnation) == (1, 2)
    for write in (
        lambda: old.append([BatchLoaded(1)], 0),
        lambda: old.begin(state.record),
        lambda: old.rewind(state.record),
        old.next_incarnation,
    ):
        with pytest.raises(InvalidRequest, match="another process has taken over the run"):
            write()
    new.append([BatchLoaded(1)], 0)
    assert RunJournal(tmp_path).recover(plan).record.loaded == 2


def test_the_process_of_an_earlier_start_gets_no_journal_and_cannot_write_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    plan = RunPlan(TaskOrder(rows=4, batch_rows=2, repeats=1, epochs=None), batch_size=2)
    claim_journal(tmp_path / "rollouts", "first")
    RunJournal(tmp_path / "rollouts", "first").recover(plan)
    again = RunJournal(tmp_path / "rollouts", "first")
    again.recover(plan)
    claim_journal(tmp_path / "rollouts", "second")
    with pytest.raises(InvalidRequest, match="another process has taken over the run"):
        again.append([BatchLoaded(0)], 0)
    with pytest.raises(InvalidRequest, match="another process has taken over the run"):
        RunJournal(tmp_path / "rollouts", "first").recover(plan)
    assert RunJournal(tmp_path / "rollouts", "second").recover(plan).record.loaded == 0
