"""Directories of jobs: who can find and open them, and which one a job keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fray.errors import InvalidRequest
from fray.tinker.job_directories import check_enterable, directory_of, share


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_directory_of_a_users_job_has_a_name_that_cannot_be_guessed_and_all_else_is_closed(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    plain = directory_of(jobs, "0001", is_of_user=False)
    for path in (tmp_path / "models", tmp_path / "http"):
        path.mkdir(mode=0o755)
    (tmp_path / "service.sqlite").touch(mode=0o644)
    (tmp_path / "link").symlink_to("/etc/hosts")
    place = directory_of(jobs, "0002", is_of_user=True)
    assert (place.name, place.parent.parent, len(place.parent.name)) == ("0002", jobs, len("0002-") + 32)
    assert [mode_of(path) for path in (tmp_path, jobs, place.parent, place)] == [0o711, 0o711, 0o711, 0o777]
    closed = {name: mode_of(tmp_path / name) for name in ("models", "http", "service.sqlite", "link")}
    assert closed == {"models": 0o700, "http": 0o755, "service.sqlite": 0o600, "link": mode_of(Path("/etc/hosts"))}
    assert mode_of(plain) == 0o700


def test_a_job_keeps_its_directory(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    place = directory_of(jobs, "0002", is_of_user=True)
    assert directory_of(jobs, "0002", is_of_user=False) == place
    place.rmdir()  # as a service that was killed between the two
    assert directory_of(jobs, "0002", is_of_user=True) == place
    assert place.is_dir()
    earlier = jobs / "0003"
    earlier.mkdir()
    assert directory_of(jobs, "0003", is_of_user=True) == earlier
    assert directory_of(jobs, "0002", is_of_user=True) != directory_of(jobs, "0004", is_of_user=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the account of a file")
def test_what_an_engine_under_another_account_writes_is_open_below_its_jobs_directory(tmp_path: Path) -> None:
    job, saved = tmp_path / "job", tmp_path / "job/snapshots/one"
    (saved / "below").mkdir(parents=True, mode=0o700)
    (saved / "below/file").touch(mode=0o600)
    (saved / "link").symlink_to("/etc/hosts")
    before = [mode_of(path) for path in (saved.parent, saved, saved / "below", saved / "below/file")]
    share(job, saved)
    assert [mode_of(path) for path in (saved.parent, saved, saved / "below", saved / "below/file")] == before
    os.chown(job, 12345, 12345)
    share(job, saved)
    for path, mode in ((saved.parent, 0o777), (saved, 0o777), (saved / "below", 0o777), (saved / "below/file", 0o666)):
        assert mode_of(path) == mode
    assert mode_of(Path("/etc/hosts")) != 0o666


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its account")
def test_an_engine_that_cannot_enter_a_directory_above_its_jobs_says_which(tmp_path: Path) -> None:
    job = tmp_path / "closed/jobs/a"
    job.mkdir(parents=True)
    tmp_path.joinpath("closed").chmod(0o700)
    for path in (tmp_path, *tmp_path.parents):
        path.chmod(path.stat().st_mode | 0o011)
    check_enterable(job)
    os.seteuid(12345)
    try:
        with pytest.raises(InvalidRequest, match=rf"uid 12345\) cannot enter {tmp_path}/closed: use a directory"):
            check_enterable(job)
    finally:
        os.seteuid(0)
