"""Changes of jobs and machines by number: each once; those of the store, forgotten ones, other epochs."""

from __future__ import annotations

from fray.controller.connections import changes as changes_module
from fray.controller.connections.changes import JobChanges, NodeChanges
from fray.scheduler.effects import DesiredAttemptsChanged, NodeSilent, ReservationInfoChanged


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
    monkeypatch.setattr(changes_module, "FORGOTTEN_LIMIT", 1)
    number = changes.last
    for job in ("b", "c"):
        changes.record(job)
        changes.since(number, ["a", job])
        changes.since(number, ["a"])
    assert changes.since(number, ["a"])[:2] == (True, changes.since(0, ["a"])[1])


def test_there_is_something_new_after_a_change_and_once_a_job_is_forgotten() -> None:
    changes = JobChanges(epoch=1)
    changes.since(0, ["a"])
    number = changes.last
    assert not changes.has_since(number, ["a"])
    assert changes.has_since(number, [])
    changes.record("a")
    assert changes.has_since(number, ["a"])


def look(changes: NodeChanges, marks: dict[str, int], now: float = 0.0) -> int:
    """Look at machines with these marks."""
    return changes.look(lambda names: {n: m for n, m in marks.items() if names is None or n in names}, now)


def test_a_machine_has_changed_once_its_mark_differs() -> None:
    changes = NodeChanges(epoch=1)
    first = look(changes, {"a": 1, "b": 1})
    assert changes.since(0) == (True, ["a", "b"], [])
    assert look(changes, {"a": 1, "b": 1}, now=2.0) == first
    second = look(changes, {"a": 1, "b": 2}, now=4.0)
    assert changes.since(first) == (False, ["b"], [])
    assert look(changes, {"b": 2}, now=6.0) > second
    assert changes.since(second) == (False, [], ["a"])
    look(changes, {"a": 1, "b": 2}, now=8.0)
    assert changes.since(second) == (False, ["a"], [])
    assert NodeChanges(epoch=2).since(second)[0]


def test_between_comparisons_of_all_machines_only_those_of_saved_batches_are_compared() -> None:
    changes = NodeChanges(epoch=1)
    first = look(changes, {"a": 1, "b": 1, "c": 1})
    changes.note([], [DesiredAttemptsChanged(node="b")])
    second = look(changes, {"a": 2, "b": 2, "c": 1})
    assert changes.since(first) == (False, ["b"], [])
    changes.note([NodeSilent(node="b", incarnation="1")], [])
    third = look(changes, {"a": 2, "c": 1})
    assert changes.since(second) == (False, [], ["b"])
    changes.note([], [ReservationInfoChanged(reservation_id="r")])
    fourth = look(changes, {"a": 2, "c": 1})
    assert changes.since(third) == (False, ["a"], [])
    assert look(changes, {"a": 2, "c": 2}) == fourth
    assert look(changes, {"a": 2, "c": 2}, now=1.0) > fourth
    assert changes.since(fourth) == (False, ["c"], [])
