"""Changes of jobs by number: each job once; jobs of the store, forgotten ones, other epochs, long absences."""

from __future__ import annotations

from fray.controller.connections import job_changes
from fray.controller.connections.job_changes import JobChanges


def test_a_job_that_changes_twice_is_there_once_with_its_last_number() -> None:
    changes = JobChanges(epoch=1)
    for job in ("a", "b", "a"):
        changes.record(job)
    is_unknown, found, _ = changes.since(0, ["a", "b"])
    assert (is_unknown, [job for job, _ in found]) == (True, ["b", "a"])
    assert changes.since(found[0][1], ["a", "b"]) == (False, found[1:], [])
    assert changes.since(changes.last, ["a", "b"]) == (False, [], [])


def test_jobs_of_the_store_and_forgotten_ones_are_found_by_comparison() -> None:
    changes = JobChanges(epoch=1)
    _, found, _ = changes.since(0, ["old", "older"])
    assert [job for job, _ in found] == ["old", "older"]
    assert changes.since(changes.last, ["old"]) == (False, [], ["older"])
    assert changes.since(changes.last, ["old"]) == (False, [], [])


def test_a_number_of_another_epoch_or_too_old_gets_everything(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    changes, later = JobChanges(epoch=1), JobChanges(epoch=2)
    changes.record("a")
    later.record("a")
    assert changes.since(later.last, ["a"])[0]
    assert later.since(changes.last, ["a"])[0]
    monkeypatch.setattr(job_changes, "FORGOTTEN_LIMIT", 1)
    number = changes.last
    for job in ("b", "c"):
        changes.record(job)
        changes.since(number, ["a", job])
        changes.since(number, ["a"])
    assert changes.since(number, ["a"])[:2] == (True, changes.since(0, ["a"])[1])
