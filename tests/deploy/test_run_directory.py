"""Directories of embedded clusters: locked by their processes, removed when abandoned."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fray.deploy.run_directory import LOCK, PREFIX, open_run_directory, remove_abandoned


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_run_directory_is_private_and_removed_on_exit(tmp_path: Path) -> None:
    with open_run_directory() as directory:
        assert Path(directory.path).parent == tmp_path
        assert os.stat(directory.path).st_mode & 0o777 == 0o700
    assert not os.path.exists(directory.path)


def test_only_abandoned_directories_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "node-0").mkdir(parents=True)
    (dead / LOCK).touch()
    strange = tmp_path / f"{PREFIX}strange"
    strange.mkdir()
    # Stores and state directories have one of this name, which is free while their daemon is down.
    store = tmp_path / f"{PREFIX}store"
    store.mkdir()
    (store / "lock").touch()
    with open_run_directory() as living:
        assert remove_abandoned() == 1
        assert os.path.exists(living.path)
    assert not dead.exists()
    assert strange.exists(), "a directory without a lock may have a living owner"
    assert store.exists(), "the store of a controller that is down is not a run directory"


def test_a_child_that_has_inherited_the_lock_holds_the_directory_too(tmp_path: Path) -> None:
    with open_run_directory() as directory:
        inherited = os.dup(directory.lock_fd)
        os.close(directory.lock_fd)  # as the kernel does for a driver that is killed
        assert remove_abandoned() == 0
        os.close(inherited)
        assert remove_abandoned() == 1
        os.dup2(os.open(os.devnull, os.O_RDONLY), directory.lock_fd)  # what the exit closes
