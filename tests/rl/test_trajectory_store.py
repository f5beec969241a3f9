"""Groups and batches of samples."""

from __future__ import annotations

import pytest

from fray.rl.core.tasks import RolloutTask
from fray.rl.core.trajectory_store import ReadyRule, Sample, TrajectoryStore


def sample(row: int, repeat: int = 0, reward: float = 0.0) -> Sample:
    return Sample(RolloutTask(0, row, repeat, row), 0, (), (reward,))


def put(store: TrajectoryStore, *samples: Sample) -> None:
    for one in samples:
        store.put(one, (one.task.group_id,))


def take(store: TrajectoryStore) -> list[str]:
    groups, lost = store.choose()
    ids = [one.sample_id for group in groups for one in group.samples]
    return [one.sample_id for group in store.take(ids, lost) for one in group.samples]


def is_ready(store: TrajectoryStore, batch_finished: bool = False, is_last: bool = False) -> bool:
    return store.is_ready(batch_finished=batch_finished, is_last=is_last)


def test_a_batch_is_ready_when_whole_groups_fill_it() -> None:
    store = TrajectoryStore(2, 4)
    put(store, sample(0), sample(1), sample(2), sample(2, 1))
    assert not is_ready(store)
    put(store, sample(0, 1))
    assert is_ready(store)
    # Row 2 was complete first, but the trainer gets the groups in the order of the data.
    assert take(store) == ["0-0-0/0", "0-0-1/0", "0-2-0/0", "0-2-1/0"]
    assert [one.sample_id for one in store.samples] == ["0-1-0/0"]


def test_a_batch_that_no_whole_number_of_groups_fills_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid batch_size 6: expected a multiple of the group_size 4"):
        TrajectoryStore(4, 6)


@pytest.mark.parametrize(
    ("rule", "samples", "batch_finished", "ready"),
    [
        ("batch_size", 2, False, True),
        ("batch_size_reached", 1, True, False),
        ("loaded_batch_finished", 1, False, False),
        ("loaded_batch_finished", 1, True, True),
        ("loaded_batch_finished", 0, True, False),
        ("batch_size_reached_and_loaded_batch_finished", 2, False, False),
        ("batch_size_reached_and_loaded_batch_finished", 1, True, False),
        ("batch_size_reached_and_loaded_batch_finished", 2, True, True),
    ],
)
def test_rules_of_readiness(rule: str, samples: int, batch_finished: bool, ready: bool) -> None:
    store = TrajectoryStore(1, 2, ReadyRule(rule))
    put(store, *(sample(row) for row in range(samples)))
    assert is_ready(store, batch_finished) is ready


def test_the_loaded_batch_is_taken_as_a_whole() -> None:
    store = TrajectoryStore(1, 2, ReadyRule.LOADED_BATCH_FINISHED)
    put(store, sample(0), sample(1), sample(2))
    assert take(store) == ["0-0-0/0", "0-1-0/0", "0-2-0/0"]


def test_a_sample_that_never_comes_makes_its_group_smaller_and_not_the_batch_late() -> None:
    store = TrajectoryStore(2, 4)
    store.miss("0-0", 1)
    put(store, sample(0))
    put(store, sample(1), sample(1, 1))
    assert is_ready(store)
    assert take(store) == ["0-0-0/0", "0-1-0/0", "0-1-1/0"]


def test_a_sample_is_missed_after_its_siblings_have_come() -> None:
    store = TrajectoryStore(2, 2)
    put(store, sample(0))
    assert not is_ready(store)
    store.miss("0-0", 1)
    assert is_ready(store)


def test_groups_of_which_nothing_comes_use_up_their_place() -> None:
    store = TrajectoryStore(2, 4)
    store.miss("0-0", 1)
    store.miss("0-0", 1)
    put(store, sample(1), sample(1, 1), sample(2), sample(2, 1))
    assert is_ready(store)
    assert take(store) == ["0-1-0/0", "0-1-1/0"]
    assert store.lost_slots == 0


def test_several_keys_make_leaf_groups() -> None:
    store = TrajectoryStore(2, 2)
    store.put(sample(0), ("user", 1))
    store.put(sample(1), ("user", 2))
    assert not is_ready(store)
    store.put(sample(2), ("user", 1))
    assert take(store) == ["0-0-0/0", "0-2-0/0"]


def test_taking_a_sample_that_is_in_no_complete_group_is_an_error() -> None:
    store = TrajectoryStore(2, 2)
    put(store, sample(0))
    with pytest.raises(KeyError, match="0-0-0/0"):
        store.take(["0-0-0/0"], 0)


def test_a_group_of_several_rows_that_lack_samples_is_not_larger_than_its_size() -> None:
    store = TrajectoryStore(3, 3)
    store.put(sample(0), ("user",))
    store.miss("0-1", 2)
    # Two of the three samples of row 1 were dropped before the third comes.
    group = store.put(sample(1), ("user",))
    assert group is not None
    assert (len(group.samples), group.slots) == (2, 3)
    assert is_ready(store)
    assert take(store) == ["0-0-0/0", "0-1-0/0"]
