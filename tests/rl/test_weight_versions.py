"""Versions of the weights: which led to which, their age, and when the servers receive which."""

from __future__ import annotations

import pytest

from fray.rl.core.versions import Gate, SyncMode, VersionLine, VersionName, WeightSchedule


def train(weights: WeightSchedule) -> str:
    """Do one update and its sync; return the versions of trainer and servers."""
    weights.begin_update()
    weights.finish_update()
    if weights.to_send is not None:
        assert weights.synced(weights.to_send)
    return f"{weights.line.number}/{weights.rollout.number}"


@pytest.mark.parametrize(
    ("mode", "threshold", "expected"),
    [
        (SyncMode.SYNC, 1, "1/1 2/2 3/3 4/4 5/5 6/6"),
        (SyncMode.BATCH_ASYNC, 0, "1/1 2/2 3/3 4/4 5/5 6/6"),
        (SyncMode.BATCH_ASYNC, 1, "1/0 2/2 3/2 4/4 5/4 6/6"),
        (SyncMode.BATCH_ASYNC, 2, "1/0 2/0 3/3 4/3 5/3 6/6"),
        (SyncMode.FULLY_ASYNC, 4, "1/1 2/2 3/3 4/4 5/5 6/6"),
    ],
)
def test_golden_versions_of_trainer_and_servers(mode: SyncMode, threshold: int, expected: str) -> None:
    weights = WeightSchedule(mode, threshold)
    assert " ".join(train(weights) for _ in range(6)) == expected


def test_a_resumed_trainer_makes_other_versions_of_the_same_number() -> None:
    line = VersionLine()
    for _ in range(5):
        line.advance()
    assert str(line.fork(3)) == "1.3"
    line.advance()
    assert str(line.current) == "1.4"
    known = [VersionName(0, 2), VersionName(0, 3), VersionName(1, 3), VersionName(1, 4)]
    lost = [VersionName(0, 4), VersionName(0, 5), VersionName(1, 2), VersionName(1, 5), VersionName(2, 3)]
    assert [name for name in known + lost if line.has(name)] == known


def test_a_second_resume_cuts_what_the_first_one_made() -> None:
    line = VersionLine()
    for _ in range(4):
        line.advance()
    line.fork(2)
    line.advance()
    line.advance()
    line.fork(3)
    line.advance()
    assert [line.has(VersionName(*name)) for name in [(0, 2), (0, 3), (1, 3), (1, 4), (2, 4)]] == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_only_a_version_of_the_line_can_be_resumed_from() -> None:
    with pytest.raises(ValueError, match=r"no version 1: the line ends at 0.0"):
        VersionLine().fork(1)


def test_the_age_is_that_of_the_oldest_token() -> None:
    line = VersionLine(number=5)
    assert line.age([]) == 0
    assert line.age([(VersionName(0, 5), 10), (VersionName(0, 3), 1)]) == 2
    assert line.age([(VersionName(1, 5), 1)]) is None


def test_servers_keep_the_version_of_a_validation() -> None:
    weights = WeightSchedule(SyncMode.FULLY_ASYNC, 4, validate_every=2)
    versions = []
    for number in range(1, 8):
        weights.begin_update()
        weights.finish_update()
        versions.append(f"{weights.target.number}")
        if weights.to_send is not None and number != 2:
            weights.synced(weights.to_send)
        if number in (3, 6):
            weights.end_validation()
    # Version 2 is sent while 3 is made. In the validation of 4, which ends after 6, 6 is to be validated as well.
    assert versions == ["1", "2", "2", "4", "4", "4", "6"]
    assert weights.last_validated == 6


def test_a_version_is_sent_to_be_validated_where_rollouts_need_none() -> None:
    weights = WeightSchedule(SyncMode.BATCH_ASYNC, 2, validate_every=1)
    weights.begin_update()
    name = weights.finish_update()
    assert weights.to_send == name == VersionName(0, 1)
    weights.begin_update()
    weights.finish_update()
    weights.begin_update()
    assert weights.gate is Gate.TRAINING
    # Rollouts of version 1 are young enough for update 3 and those after it.
    assert weights.synced(name)
    assert weights.gate is Gate.OPEN
    weights.finish_update()
    weights.begin_update()
    assert weights.gate is Gate.TRAINING
    weights.finish_update()
    assert (weights.gate, weights.to_send) == (Gate.SYNCING, None)
    weights.end_validation()
    assert weights.to_send == VersionName(0, 4)


def test_a_version_that_was_not_to_be_sent_changes_nothing() -> None:
    weights = WeightSchedule(SyncMode.SYNC)
    weights.begin_update()
    name = weights.finish_update()
    assert not weights.synced(VersionName(1, 1))
    assert weights.gate is Gate.SYNCING
    assert weights.synced(name)
    assert not weights.synced(name)


def test_after_a_resume_the_servers_are_taken_back() -> None:
    weights = WeightSchedule(SyncMode.FULLY_ASYNC, 4)
    for _ in range(3):
        train(weights)
    back = weights.fork(2)
    assert weights.gate is Gate.SYNCING
    assert weights.to_send == back == VersionName(1, 2)
    assert not weights.is_usable([(VersionName(0, 3), 1)])
    assert weights.is_usable([(VersionName(0, 2), 1)])
