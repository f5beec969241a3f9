"""Checkpoints at a URL: what is complete is found, what is not is ignored, and nothing safe is removed too early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from fray.errors import InvalidRequest
from fray.net import storage
from fray.rl.checkpoint_store import (
    JournalCopy,
    StoredCheckpoints,
    directory_to_read,
    directory_to_write,
)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield "memory://run" if request.param == "memory" else f"file://{tmp_path}/run"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/run", recursive=True)


def write(store: StoredCheckpoints, step: int, text: str = "") -> str:
    """Write a checkpoint as its processes do; return its location, which does not count yet."""
    location = store.begin(step)
    with directory_to_write(f"{location}/model") as directory:
        (directory / "weights").write_text(text)
        (directory / "deeper").mkdir()
        (directory / "deeper" / "more").write_text(text)
    with directory_to_write(location) as directory:
        (directory / "state.json").write_text(f'{{"step": {step}}}')
    return location


def test_the_newest_complete_checkpoint_is_found_and_read(url: str) -> None:
    store = StoredCheckpoints(url)
    assert store.latest() is None
    for step in (9, 10, 2):
        store.finish(write(store, step, f"weights of {step}"), step)
    half = write(store, 30)
    found = store.latest()
    assert found is not None
    assert (found.step, found.state) == (10, {"step": 10})
    with directory_to_read(found.model) as directory:
        assert (directory / "weights").read_text() == "weights of 10"
        assert (directory / "deeper" / "more").read_text() == "weights of 10"
    assert store.unfinished() == [half]


def test_what_was_left_half_written_is_removed_by_the_next_attempt(url: str) -> None:
    store = StoredCheckpoints(url)
    half = write(store, 1)
    assert store.unfinished() == [half]
    store.finish(write(store, 1), 1)
    assert store.unfinished() == []
    # A process that was taken for lost goes on to write; what it writes does not count.
    storage.write_now(f"{half}/state.json", b"{}")
    found = store.latest()
    assert found is not None
    assert found.path != half


def test_older_checkpoints_are_removed_and_never_half_of_one_counts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoredCheckpoints(url)
    for step in (1, 2):
        store.finish(write(store, step), step)
    removed, remove = [], storage.remove_now

    def remove_until_the_process_is_lost(location: str) -> None:
        remove(location)
        removed.append(location)
        raise ConnectionError

    monkeypatch.setattr(storage, "remove_now", remove_until_the_process_is_lost)
    keep = store.latest()
    assert keep is not None
    with pytest.raises(ConnectionError):
        store.remove_older(keep.path)
    assert len(removed) == 1
    monkeypatch.undo()
    assert len(store.unfinished()) == 1
    assert "global_step_1-" in store.unfinished()[0]
    assert store.latest() == keep
    store.finish(write(store, 3), 3)
    found = store.latest()
    assert found is not None
    store.remove_older(found.path)
    assert storage.names_now(url) == [found.path.rpartition("/")[2]]


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_one_before(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoredCheckpoints(url)
    first = store.finish(write(store, 4), 4)
    with monkeypatch.context() as lost:
        # The process is lost before it has removed the first.
        lost.setattr(storage, "remove_now", lambda location: None)
        second = store.finish(write(store, 4), 4)
    found = store.latest()
    assert found is not None
    assert found.path == second != first
    third = store.finish(write(store, 4), 4)
    assert storage.names_now(url) == [third.rpartition("/")[2]]


def test_a_journal_is_continued_on_its_machine_and_on_no_other(url: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "old").mkdir(parents=True)
    first = JournalCopy(url, "first")
    first.claim(here)
    assert not (here / "old").exists(), "of an earlier start"
    (here / "step_1").write_text("entries")
    first.claim(here)
    first.upload([here / "step_1"])
    assert storage.read_now(f"{url}/step_1") == b"entries"
    with pytest.raises(InvalidRequest, match="the machine with the journal of this run was lost"):
        first.claim(there)
    JournalCopy(url, "second").claim(there)
    JournalCopy(url, "second").claim(there)


def test_a_directory_that_is_not_there_cannot_be_read(url: str) -> None:
    storage.write_now(f"{url}/other", b"")
    assert storage.names_now(f"{url}/none") == []
    with pytest.raises(FileNotFoundError, match="there are no files at"), directory_to_read(f"{url}/none"):
        pass
