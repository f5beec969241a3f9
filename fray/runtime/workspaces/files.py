"""Selection of a workspace's files: those git tracks or would track; without git, all but derived files."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from fray.errors import InvalidRequest
from fray.model.resources import parse_bytes
from fray.model.text import byte_size_text
from fray.model.workspace import FILE, FILES_LIMIT, LINK, PROGRAM, is_outside

SKIPPED = frozenset(
    {
        *(".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", ".tox", ".nox"),
        *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".eggs", ".DS_Store"),
    }
)
"""Names left out without git, besides ``*.pyc`` and every directory with a ``pyvenv.cfg``."""
TOTAL_VARIABLE, FILE_VARIABLE = "FRAY_WORKSPACE_LIMIT", "FRAY_WORKSPACE_FILE_LIMIT"
TOTAL_LIMIT_BYTES = 512 * 1024**2
FILE_LIMIT_BYTES = 100 * 1024**2
_NAMED = 5
"""Number of files named in an error message."""

log = logging.getLogger("fray.workspace")


@frozen
class ScannedFile:
    """One file of a workspace at the time of the scan."""

    path: str
    mode: str
    size_bytes: int
    stamp: tuple[int, ...]
    """Stamp that changes whenever the content may have changed."""


@frozen
class Limits:
    """Limits of a workspace that can be sent."""

    total_bytes: int = TOTAL_LIMIT_BYTES
    file_bytes: int = FILE_LIMIT_BYTES
    files: int = FILES_LIMIT

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Limits:
        """Read the limits from ``FRAY_WORKSPACE_LIMIT`` and ``FRAY_WORKSPACE_FILE_LIMIT``, as in ``2GB``."""
        total, each = environ.get(TOTAL_VARIABLE), environ.get(FILE_VARIABLE)
        return cls(
            TOTAL_LIMIT_BYTES if total is None else parse_bytes(total, TOTAL_VARIABLE),
            FILE_LIMIT_BYTES if each is None else parse_bytes(each, FILE_VARIABLE),
        )


def list_files(root: str, limits: Limits | None = None) -> list[ScannedFile]:
    """Return all selected files, sorted by path, without reading their contents.

    Raises:
        InvalidRequest: not a directory, no files in it, too large, or a link that leads out of it.
    """
    if not os.path.isdir(root):
        raise InvalidRequest(f"workspace={root!r} is not a directory: pass the directory of your project")
    found = sorted(_scan_paths(root, _paths(root)), key=lambda each: each.path)
    if not found:
        raise InvalidRequest(f"the workspace {root} has no files that git would track: is all of it ignored?")
    check_limits(root, found, limits or Limits())
    return found


def check_limits(root: str, found: list[ScannedFile], limits: Limits) -> None:
    """Raise InvalidRequest if the files exceed the limits, naming the largest and what to do about them."""
    total = sum(each.size_bytes for each in found)
    if len(found) > limits.files:
        raise InvalidRequest(
            f"the workspace {root} has {len(found):,} files and at most {limits.files:,} are allowed: name a smaller "
            "directory, or list what the job does not need in .gitignore"
        )
    if total <= limits.total_bytes and all(each.size_bytes <= limits.file_bytes for each in found):
        return
    largest = sorted(found, key=lambda each: -each.size_bytes)[:_NAMED]
    names = ", ".join(f"{each.path} ({byte_size_text(each.size_bytes)})" for each in largest)
    raise InvalidRequest(
        f"the workspace {root} has {byte_size_text(total)}; at most {byte_size_text(limits.total_bytes)} are allowed, "
        f"and {byte_size_text(limits.file_bytes)} of one file. The largest: {names}. "
        "List them in .gitignore and read them from storage in the job, "
        f"or raise {TOTAL_VARIABLE} and {FILE_VARIABLE}",
        size_bytes=total,
        limit_bytes=limits.total_bytes,
        largest=[[each.path, each.size_bytes] for each in largest],
    )


def _scan_paths(root: str, paths: Iterator[str]) -> Iterator[ScannedFile]:
    for path in paths:
        try:
            seen = os.lstat(f"{root}/{path}")
        except FileNotFoundError:
            continue  # tracked, and deleted since
        except OSError as error:
            raise unreadable(root, path, error) from error
        if stat.S_ISREG(seen.st_mode):
            mode = PROGRAM if seen.st_mode & 0o111 else FILE
        elif stat.S_ISLNK(seen.st_mode):
            # Links are sent as links; one that leads out would point to nothing, or to another file, on the job's
            # machine.
            mode = LINK
            _check_link(root, path)
        else:
            # Sockets, pipes and devices have no content to send.
            continue
        yield ScannedFile(path, mode, seen.st_size, stamp_of(seen))


def stamp_of(seen: os.stat_result) -> tuple[int, ...]:
    return seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino, seen.st_mode


def unreadable(root: str, path: str, error: OSError) -> InvalidRequest:
    return InvalidRequest(
        f"{path!r} in the workspace {root} cannot be read ({error.strerror}): fix it, or add it to .gitignore"
    )


def _check_link(root: str, path: str) -> None:
    target = os.readlink(f"{root}/{path}")
    if is_outside(path, target):
        raise InvalidRequest(
            f"the symbolic link {path!r} leads out of the workspace {root} (to {target!r}), where the job cannot "
            "follow: make it relative and inside, copy its target, or add it to .gitignore"
        )


# Git -----------------------------------------------------------------------------------------------------------------


def _paths(root: str) -> Iterator[str]:
    listed = _git_files(root)
    if listed is None:
        yield from _walk(root)
        return
    for path in dict.fromkeys(filter(None, listed.split(b"\0"))):  # in a merge git names one path several times
        name = os.fsdecode(path).rstrip("/")
        below = f"{root}/{name}"
        if os.path.isdir(below) and not os.path.islink(below):
            yield from _nested_paths(below, name)
        else:
            yield name


def _nested_paths(below: str, name: str) -> Iterator[str]:
    """Yield the files of a nested repository (a submodule or an untracked one), by its own rules."""
    if os.path.exists(f"{below}/.git"):
        yield from (f"{name}/{path}" for path in _paths(below))


def _git_files(root: str) -> bytes | None:
    """Return the paths below the root, each followed by NUL; None without git or repository."""
    # Git sets GIT_DIR and others in hooks; they would make it list another repository.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # Files that are new and not ignored belong to what the user is working on.
    command = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, env={**environ, "LC_ALL": "C"}, check=False)
    except FileNotFoundError:
        log.warning("git is not installed: all files of %s are sent, except derived ones", root)
        return None
    if done.returncode == 0:
        return done.stdout
    message = done.stderr.decode(errors="replace").strip()
    # By message, with LC_ALL=C: git has one exit code for all fatal errors.
    if "not a git repository" in message:
        return None
    raise InvalidRequest(f"git cannot list the files of the workspace {root}: {message}")


def _walk(root: str) -> Iterator[str]:
    for place, directories, files in os.walk(root, onerror=_error_handler(root)):
        below = os.path.relpath(place, root)
        prefix = "" if below == "." else f"{below}/"
        links = [name for name in directories if os.path.islink(f"{place}/{name}")]
        yield from (prefix + name for name in (*files, *links) if name not in SKIPPED and not name.endswith(".pyc"))
        # In place: `os.walk` reads this list to decide which directories to enter.
        directories[:] = [name for name in directories if name not in links and _is_wanted(Path(place, name))]


def _is_wanted(directory: Path) -> bool:
    return directory.name not in SKIPPED and not (directory / "pyvenv.cfg").exists()


def _error_handler(root: str):  # type: ignore[no-untyped-def]
    def refuse(error: OSError) -> None:
        raise unreadable(root, os.path.relpath(error.filename, root), error) from error

    return refuse
