"""Range of uids for jobs: its text, what is wrong with it on this machine, and the lock of the node that uses it."""

from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

from fray.errors import InvalidRequest

FIRST_UID, LAST_UID = 1_000, 2**31 - 1
"""Lower uids belong to the system's services; higher ones have a meaning in some file systems."""
OVERFLOW_UID = 65_534
"""Uid of files whose owner a namespace does not know."""
EXAMPLE = "200000-200999"
SUBORDINATE_FILES = (Path("/etc/subuid"), Path("/etc/subgid"))
ACCOUNT_FILES = (Path("/etc/passwd"), Path("/etc/group"))
LOCK = "job-uids.lock"


@frozen
class UidRange:
    """Uids from ``first`` to ``last``, both included. The gids of the same numbers belong to it."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, uid: object) -> bool:
        return isinstance(uid, int) and self.first <= uid <= self.last

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def overlaps(self, first: int, count: int) -> bool:
        """Return whether any of ``count`` numbers from ``first`` on belongs to it."""
        return first <= self.last and self.first < first + count


def parse_uids(text: str) -> UidRange:
    """Parse ``FIRST-LAST``.

    Raises:
        InvalidRequest: it is not of this form, or contains uids that no job may have.
    """
    first, dash, last = text.strip().partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise InvalidRequest(f"--job-uids {text}: expected FIRST-LAST, such as {EXAMPLE}")
    found = UidRange(int(first), int(last))
    if found.first < FIRST_UID or found.last > LAST_UID or OVERFLOW_UID in found:
        raise InvalidRequest(
            f"--job-uids {text}: uids below {FIRST_UID:,}, {OVERFLOW_UID:,} and those above {LAST_UID:,} are the "
            f"system's; choose a range that no account has, such as {EXAMPLE}"
        )
    return found


# Conflicts -----------------------------------------------------------------------------------------------------------


def account_conflict(uids: UidRange) -> str:
    """Return which account or group of this machine has a number of the range; empty: none."""
    for file in ACCOUNT_FILES:
        for words in _lines(file):
            if len(words) > 2 and words[2].isdecimal() and int(words[2]) in uids:
                return f"{words[0]} of {file} has {words[2]}"
    # Accounts of a directory service (LDAP) are in no file. The whole range would take minutes to ask for.
    for uid in {uids.first, uids.last}:
        with suppress(KeyError):
            return f"the account {pwd.getpwuid(uid).pw_name} has {uid}"
    return ""


def subordinate_conflict(uids: UidRange) -> str:
    """Return whose subordinate ids (for rootless containers) overlap with the range; empty: none do."""
    for file in SUBORDINATE_FILES:
        for words in _lines(file):
            if len(words) > 2 and words[1].isdecimal() and words[2].isdecimal():
                first, count = int(words[1]), int(words[2])
                if uids.overlaps(first, count):
                    return f"{words[0]} of {file} has {first}-{first + count - 1}"
    return ""


def check_uids(uids: UidRange) -> None:
    """Check that this process may use the range.

    Raises:
        InvalidRequest: it is not root, or the range belongs to others.
    """
    if os.geteuid() != 0:
        raise InvalidRequest(f"--job-uids {uids}: fray-node must run as root to change the accounts of jobs")
    conflict = account_conflict(uids) or subordinate_conflict(uids)
    if conflict:
        raise InvalidRequest(
            f"--job-uids {uids}: {conflict}; choose a range that no account has, such as {EXAMPLE} (fray doctor "
            "--job-uids FIRST-LAST checks one)"
        )


def _lines(file: Path) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            yield line.strip().split(":")


# The lock ------------------------------------------------------------------------------------------------------------


@contextmanager
def holding(uids: UidRange, directory: Path = Path("/run/fray")) -> Iterator[None]:
    """Hold the range: two nodes of one machine must not give one uid to two users.

    Raises:
        InvalidRequest: another node holds a uid of it.
        OSError: the directory cannot be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            # A lock of the bytes whose positions are the uids, which the kernel releases with this process.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, uids.last - uids.first + 1, uids.first)
        except BlockingIOError:
            raise InvalidRequest(
                f"--job-uids {uids}: another fray-node of this machine uses uids of this range; give each a range of "
                "its own"
            ) from None
        yield
    finally:
        os.close(descriptor)
