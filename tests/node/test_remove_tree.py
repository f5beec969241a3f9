"""Removal of all that jobs leave in their directories, and of nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fray.model.workspace import Manifest
from fray.node.linux.remove_tree import remove
from fray.node.workspaces.reusable_copies import ReusableCopies


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Files that must still exist at the end."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("years of work")
    return tmp_path / "precious"


def test_links_are_removed_and_not_what_they_lead_to(tmp_path: Path, precious: Path) -> None:
    left = tmp_path / "left"
    (left / "sub").mkdir(parents=True)
    (left / "sub" / "link").symlink_to(precious)
    (left / "file").symlink_to(precious / "data")
    os.mkfifo(left / "pipe")
    assert remove(left)
    assert (precious / "data").read_text() == "years of work"
    (tmp_path / "instead").symlink_to(precious)
    assert remove(tmp_path / "instead")
    assert (precious / "data").exists()
    assert remove(tmp_path / "never was")


def test_no_depth_is_an_obstacle(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    for branch, levels in (("a", 1100), ("branch", 100)):  # Python's own way ends at a thousand
        at = os.open(left, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir(branch, dir_fd=at)
            below = os.open(branch, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(os.open("file", os.O_CREAT, dir_fd=at))
        os.close(at)
    assert remove(left)
    assert not left.exists()


def test_no_mode_is_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "left" / "sub" / "deeper").mkdir(parents=True)
    for path in ("left/sub/deeper", "left/sub"):
        (tmp_path / path).chmod(0)
    assert remove(tmp_path / "left")


def test_what_a_job_has_mounted_is_unmounted_and_stays(tmp_path: Path, precious: Path) -> None:
    place = tmp_path / "left" / "a place"
    place.mkdir(parents=True)
    if subprocess.run(["mount", "--bind", precious, place], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        assert remove(tmp_path / "left")
        assert (precious / "data").exists()
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)


def test_a_link_that_a_job_has_left_in_place_of_its_workspace_is_no_copy_for_the_next(
    tmp_path: Path, precious: Path
) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "workspace").symlink_to(precious)
    copies = ReusableCopies(tmp_path / "copies", lambda seen, entry: True)
    copies.handed_ns[tmp_path / "workspace"] = 2**62
    assert not copies.return_copy("0" * 64, Manifest((), ()), tmp_path / "workspace", "")
    assert (precious / "data").exists()
    assert not copies.take("0" * 64, tmp_path / "next", "")
