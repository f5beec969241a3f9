"""Checkpoints: the newest complete one is found, a half-written one is not, and another run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fray.errors import InvalidRequest
from fray.rl.checkpoint import (
    begin_checkpoint,
    check_resumable,
    finish_checkpoint,
    latest_checkpoint,
    load_record,
    remove_older,
    unfinished_checkpoints,
    write_state,
)
from fray.rl.core.run_record import RunPlan
from fray.rl.core.run_state import RunState
from fray.rl.core.tasks import TaskOrder

FACTS = {"data": "abc", "model": "tiny"}


def save(directory: Path, step: int) -> Path:
    state = RunState.new(RunPlan(TaskOrder(rows=3, batch_rows=1), batch_size=1))
    state.take_task("w", 0.0)
    unfinished = begin_checkpoint(directory, step)
    (unfinished / "model").mkdir()
    (unfinished / "model" / "weights").write_bytes(bytes([step]))
    write_state(unfinished, state.snapshot(), FACTS)
    return finish_checkpoint(unfinished, step)


def test_the_newest_complete_checkpoint_is_found_by_its_number(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (9, 10, 2):
        save(tmp_path, step)
    begin_checkpoint(tmp_path, 30)
    (tmp_path / "global_step_20").mkdir()
    (tmp_path / "global_step_x").mkdir()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path.name, found.step) == ("global_step_10", 10)
    assert (found.model / "weights").read_bytes() == bytes([10])
    assert load_record(found.path).counts.issued == 1
    assert found.state["samples"]["issued"] == 1


def test_a_checkpoint_is_replaced_by_one_of_the_same_number_and_older_ones_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    begin_checkpoint(tmp_path, 2).joinpath("half").touch()
    first = save(tmp_path, 2)
    (first / "old").touch()
    path = save(tmp_path, 2)
    assert not (path / "old").exists()
    assert not (path / "half").exists()
    remove_older(tmp_path, path)
    assert [one.name for one in tmp_path.iterdir()] == ["global_step_2"]


def test_a_run_of_other_data_is_refused_with_the_difference(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    check_resumable(found, FACTS)
    with pytest.raises(InvalidRequest, match=r"cannot continue from .*: data is 'xyz', and was 'abc'; choose another"):
        check_resumable(found, {**FACTS, "data": "xyz"})


def test_what_was_left_half_written_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert unfinished_checkpoints(tmp_path) == []
    half = begin_checkpoint(tmp_path, 2)
    (tmp_path / "global_step_3").mkdir()
    assert unfinished_checkpoints(tmp_path) == [half, tmp_path / "global_step_3"]


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    path.rename(tmp_path / ".global_step_2.replaced")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.path == path


def test_two_attempts_to_write_a_checkpoint_have_directories_of_their_own(tmp_path: Path) -> None:
    first = begin_checkpoint(tmp_path, 2)
    second = begin_checkpoint(tmp_path, 2)
    assert first != second
    assert not first.exists()
