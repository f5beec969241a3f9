"""Processes that have an accelerator of this machine open, from their descriptors in ``/proc``.

A device is free when only those have its file open that had it before the attempt began (drivers' own daemons, which
never release it; asking nvidia-smi instead would take half a second) and processes of other running attempts.
Everything is read below ``root``, so that tests can describe a machine as a tree of files. Only root sees the files of
other users' processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path("/")
TPU_LOCK = Path("tmp/libtpu_lockfile")
_MINOR = re.compile(r"Device Minor:\s*(\d+)")


def device_files(root: Path = ROOT) -> dict[str, str]:
    """Return the file of each accelerator, by the id that the inventory gives it."""
    found = {f"gpu-{index}": f"/dev/nvidia{minor}" for index, minor in enumerate(_gpu_minors(root))}
    chips = _numbered(root, "dev/accel[0-9]*") or _numbered(root, "dev/vfio/[0-9]*")
    return found | {f"tpu-{index}": path for index, path in enumerate(chips)}


def _gpu_minors(root: Path) -> list[int]:
    """Return the minors in the order of their places on the bus, which is the inventory's."""
    texts = [_MINOR.search(_read_text(file)) for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    known = [int(match[1]) for match in texts if match]
    # The minor numbers need not follow the places on the bus, so their order is the second choice.
    return known or [int(path.rpartition("nvidia")[2]) for path in _numbered(root, "dev/nvidia[0-9]*")]


def _numbered(root: Path, pattern: str) -> list[str]:
    paths = [f"/{path.relative_to(root)}" for path in root.glob(pattern)]
    return sorted(paths, key=lambda path: int(re.sub(r"\D", "", path) or 0))


def holders(files: Collection[str], root: Path = ROOT) -> dict[int, set[str]]:
    """Return which of these files each process has open; takes a few microseconds per open file of the machine."""
    found: dict[int, set[str]] = {}
    wanted = set(files)
    for name in os.listdir(root / "proc") if wanted else ():
        if name.isdigit() and (held := _open_files(root / "proc" / name / "fd") & wanted):
            found[int(name)] = held
    return found


def _open_files(directory: Path) -> set[str]:
    try:
        names = os.listdir(directory)
    except OSError:  # it has ended, or is another user's
        return set()
    found = set()
    for name in names:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"{directory}/{name}"))
    return found


def device_holder_text(pids: Mapping[int, set[str]], root: Path = ROOT) -> dict[str, str]:
    """Return the process that holds each file, as text."""
    return {path: f"pid {pid} ({command(pid, root)})" for pid, paths in sorted(pids.items()) for path in paths}


def command(pid: int, root: Path = ROOT) -> str:
    return _read_text(root / f"proc/{pid}/comm").strip() or "gone"


def remove_stale_lock(root: Path = ROOT) -> bool:
    """Remove libtpu's lock file if no process locks it: a killed process leaves it behind."""
    path = root / TPU_LOCK
    try:
        with open(path, "rb+") as file:
            # libtpu locks the file while it runs: a lock that is free means that its process has ended.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # there is none, it is locked, or it is another user's
        return False
    return True


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
