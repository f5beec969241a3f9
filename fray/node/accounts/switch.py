"""Giving directories to an account, and changing to an account. Only for processes that are root."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path

from fray.errors import InvalidRequest
from fray.model.specs import JobAccount

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_KEYCTL_SYSCALL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_OF_ROOT = ("XDG_", "SUDO_", "SSH_", "DBUS_", "KRB5")
"""Beginnings of the names of variables that lead to what belongs to root."""
_OF_ROOT_TOO = ("MAIL", "UV_CACHE_DIR", "PIP_CACHE_DIR", "TMPDIR")

_libc = ctypes.CDLL(None, use_errno=True)


def become(account: JobAccount) -> None:
    """Change to the account, for ever: this process and its children cannot become root again. Only without threads.

    The parent-death signal of this process is lost.

    Raises:
        OSError: this process may not.
    """
    # Keys of root's session would stay in the possession of this process, whatever its uid.
    number = _KEYCTL_SYSCALL.get(os.uname().machine)
    if number is not None:
        _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)
    os.setgroups(())
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    # Files in /tmp and other shared directories are this user's alone.
    os.umask(0o077)
    # Set-uid programs would give processes that the rest of the account cannot see, and another uid than it has.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # The kernel has cleared it with the change of the uid: /proc/self would belong to root, and the account's own
    # debuggers could not attach. This process was forked by a zygote, which knows no secret.
    _prctl(_PR_SET_DUMPABLE, 1)


def set_environ(environ: MutableMapping[str, str], account: JobAccount) -> None:
    """Replace the variables that lead to what belongs to root by those of the account."""
    for name in [name for name in environ if name.startswith(_OF_ROOT) or name in _OF_ROOT_TOO]:
        del environ[name]
    environ.update(HOME=account.home, USER=account.name, LOGNAME=account.name)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def give(directory: str | Path, account: JobAccount) -> None:
    """Give a directory that belongs to root, and all below it, to the account; what belongs to it already is skipped.

    From then on root must neither write there by a path nor follow a link there.

    Raises:
        OSError: it is not there, or no directory.
    """
    top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _give_contents(top, account)
        _give_directory(top, account)
    finally:
        os.close(top)


def _give_contents(place: int, account: JobAccount) -> None:
    with os.scandir(place) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    for name, seen in found:
        # A directory of the account may change at any moment, and a link there would lead elsewhere.
        if seen.st_uid == account.uid:
            continue
        if not stat.S_ISDIR(seen.st_mode):
            os.chown(name, account.uid, account.gid, dir_fd=place, follow_symlinks=False)
            continue
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        try:
            _give_contents(below, account)
            _give_directory(below, account)
        finally:
            os.close(below)


def _give_directory(descriptor: int, account: JobAccount) -> None:
    # After its contents: until then the account can change nothing in it.
    os.fchown(descriptor, account.uid, account.gid)
    os.fchmod(descriptor, 0o700)


# What accounts need --------------------------------------------------------------------------------------------------


def unreadable(account: JobAccount, paths: Iterable[str]) -> str:
    """Return the first path that the account cannot read (a directory: list and enter); empty if it can read all.

    Tries it in a child process; only without threads.

    Raises:
        OSError: no process can be made.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become(account)
            found = next((path for path in paths if not os.access(path, _access_needed(path))), "")
            os.write(write, os.fsencode(found))
        except OSError as error:
            os.write(write, f"({error})".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        text = os.fsdecode(answer.read())
    os.waitpid(pid, 0)
    return text


def _access_needed(path: str) -> int:
    return os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK


def interpreter_paths() -> list[str]:
    """Return what a job needs of this process's interpreter: the program, its library, and each directory of its path
    that exists."""
    known = [sys.executable, os.path.realpath(sys.executable), os.path.dirname(os.__file__), *sys.path]
    return [path for path in dict.fromkeys(known) if path and os.path.exists(path)]


def closed_parent(path: Path) -> Path | None:
    """Return the first directory above ``path`` that other accounts may not enter; None: there is none."""
    return next((place for place in reversed(path.parents) if not place.stat().st_mode & 0o001), None)


def check_enterable(directory: Path) -> None:
    """Check that the accounts of jobs can reach what they have below a directory.

    Raises:
        InvalidRequest: one of the directories above is closed to it.
    """
    if (place := closed_parent(directory)) is not None:
        raise InvalidRequest(
            f"--job-uids: the accounts of jobs cannot enter {place}, above their own directories; use another "
            "--state-dir, such as /var/lib/fray"
        )


def check_readable(account: JobAccount, paths: Iterable[str]) -> None:
    """Check that an account of the range can be used.

    Raises:
        InvalidRequest: it cannot read something that each job needs.
    """
    found = unreadable(account, paths)
    if found:
        raise InvalidRequest(
            f"--job-uids: the accounts of jobs cannot read {found}; install Python and Fray where all accounts may "
            "read them (not below /root), and use a --state-dir whose parents they may enter, such as /var/lib/fray"
        )
