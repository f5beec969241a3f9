"""Directories of jobs whose engines may have other accounts of the machine than the service.

On machines with accounts for jobs, the engine of a user runs under the user's account. It has to reach the directories
of the user's jobs, and nothing else of the service's. A permission for one account would not do: the user has another
one on another machine, and an account may become another user's later. So such a directory has an unguessable name in a
directory that cannot be listed, and all is allowed below it. The service, and engines and clients of the user (the
latter from the paths of checkpoints) know the name. The rest of the service's directory is closed to all accounts but
its own.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from fray.errors import InvalidRequest

JOBS = "jobs"
"""Directory of the jobs, below the service's."""
_PUBLIC = (JOBS, "http")
"""Directories that stay open: ``http`` has the certificate that clients read, and its key is closed by itself."""


def directory_of(jobs: Path, job_id: str, *, is_of_user: bool) -> Path:
    """Return the directory of a job: the one that it has, else a new one, which is made.

    Args:
        jobs: directory of all jobs.
        job_id: last part of the path.
        is_of_user: its engine runs for a user of the cluster, and may have the user's account.

    Raises:
        OSError: it cannot be made.
    """
    plain = jobs / job_id
    outer = next(jobs.glob(f"{job_id}-*"), None)
    if outer is None and (not is_of_user or plain.exists()):
        plain.mkdir(mode=0o700, parents=True, exist_ok=True)
        return plain
    if outer is None:
        _open_for_engines(jobs)
        outer = jobs / f"{job_id}-{secrets.token_hex(16)}"
    place = outer / job_id
    if not place.is_dir():
        for path, mode in ((outer, 0o711), (place, 0o777)):
            path.mkdir(exist_ok=True)
            # Not by the mode of `mkdir`, from which the umask is subtracted.
            path.chmod(mode)
    return place


def _open_for_engines(jobs: Path) -> None:
    """Let all accounts enter the service's directory and that of the jobs, and neither list them nor read the rest."""
    service = jobs.parent
    jobs.mkdir(parents=True, exist_ok=True)
    closed = [path for path in service.iterdir() if path.name not in _PUBLIC]
    closed += [path for path in jobs.iterdir() if "-" not in path.name]
    for path in closed:
        if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)
    # Last: until then, nothing below can be reached.
    jobs.chmod(0o711)
    service.chmod(stat.S_IMODE(service.stat().st_mode) & 0o700 | 0o011)


def share(job: Path, path: Path) -> None:
    """Open what this process has written below the directory of a job to the service and later engines of the user.

    Without effect where this process has the account of the service.

    Args:
        job: directory of the job.
        path: what was written, directly below it or one level deeper.

    Raises:
        OSError: it is not there.
    """
    own = os.geteuid()
    if job.stat().st_uid == own:
        return
    above = [path.parent] if path.parent != job else []
    for each in (*above, path, *path.rglob("*")):
        if each.lstat().st_uid == own and not each.is_symlink():
            each.chmod(0o777 if each.is_dir() else 0o666)


def check_enterable(job: Path) -> None:
    """Check that this process may enter the directory of a job, and those above it.

    Raises:
        InvalidRequest: one of them is closed to its account.
    """
    for path in (*reversed(job.parents), job):
        there, may_enter = (os.access(path, mode, effective_ids=True) for mode in (os.F_OK, os.X_OK))
        if there and not may_enter:
            raise InvalidRequest(
                f"the engine's account (uid {os.geteuid()}) cannot enter {path}: use a directory of the service whose "
                "parents the accounts of jobs may enter, see docs/tinker.md#accounts-for-jobs"
            )
