"""Count of the resources of a cluster on this machine: processes, memory, descriptors, files, segments, objects.

For campaigns that must leave nothing behind (`bench.restarts`) or not grow (`bench.soak`): they count after the warm-up
in a quiet moment, count again later, and compare.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio.lowlevel
from attrs import asdict, field, frozen

SHARED_MEMORY = Path("/dev/shm")


@frozen
class ResourceCount:
    """Counts at a quiet moment. Everything but memory must be equal at another quiet moment."""

    pss_kb: dict[str, int] = field(factory=dict)
    """Proportional memory by role: driver (with the controller), nodes, others (zygotes, shims, actors)."""
    processes: dict[str, int] = field(factory=dict)
    descriptors: dict[str, int] = field(factory=dict)
    threads: int = 0
    """Threads of the driver."""
    tasks: int = 0
    """Tasks of the driver's loop."""
    files: int = 0
    """Files in the cluster's directories: sockets, records. Not the logs, which outlive their attempts by design."""
    segments: int = 0
    """Files of shared memory of living processes of the cluster."""
    orphans: int = 0
    """Directories of shared memory of any user on this machine whose process has ended."""
    objects: dict[str, int] = field(factory=dict)
    """Living objects of Fray's classes in the driver, by class."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def take(nodes: Iterable[int], *, objects: bool = True) -> ResourceCount:
    """Count now. ``nodes`` are the pids of the nodes; all other descendants of the driver are "others"."""
    gc.collect()
    node_pids = set(nodes)
    below = descendants(os.getpid())
    roles = {
        "driver": [os.getpid()],
        "nodes": [pid for pid in below if pid in node_pids],
        "others": [pid for pid in below if pid not in node_pids],
    }
    return ResourceCount(
        pss_kb={role: sum(map(pss_kb, pids)) for role, pids in roles.items()},
        processes={role: len(pids) for role, pids in roles.items()},
        descriptors={role: sum(map(descriptors, pids)) for role, pids in roles.items()},
        threads=threading.active_count(),
        tasks=trio.lowlevel.current_statistics().tasks_living,
        files=sum(map(_count_below, held_directories([os.getpid()], Path(tempfile.gettempdir())))),
        segments=sum(map(_count_below, held_directories([os.getpid(), *below], SHARED_MEMORY))),
        orphans=count_orphans(),
        objects=dict(count_objects()) if objects else {},
    )


def growth(
    before: ResourceCount, after: ResourceCount, *, more_than: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the counts that have grown by more than ``more_than`` allows (by name; objects: ``object``). Memory is
    left out, as its slope is checked instead."""
    allowed = dict(more_than or {})
    found: dict[str, Any] = {}
    pairs = [
        *(
            (f"{what} of {role}", getattr(before, what), getattr(after, what), role)
            for what in ("processes", "descriptors")
            for role in after.processes
        ),
    ]
    for name, one, other, role in pairs:
        _compare(found, name, one.get(role, 0), other.get(role, 0), allowed.get(name.split()[0], 0))
    for name in ("threads", "tasks", "files", "segments", "orphans"):
        _compare(found, name, getattr(before, name), getattr(after, name), allowed.get(name, 0))
    for name, count in after.objects.items():
        _compare(found, f"objects {name}", before.objects.get(name, 0), count, allowed.get("objects", 0))
    return found


def _compare(found: dict[str, Any], name: str, before: int, after: int, allowed: int) -> None:
    if after > before + allowed:
        found[name] = {"before": before, "after": after}


# Processes -----------------------------------------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    """Return the living descendants of ``root``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _parent(entry: Path) -> int | None:
    """Return the parent's pid; None for a process that has ended, or a zombie."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[1])


def pss_kb(pid: int) -> int:
    """Return the proportional memory of a process in KB; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


# Files and objects ---------------------------------------------------------------------------------------------------


def held_directories(pids: Iterable[int], base: Path) -> set[Path]:
    """Return Fray's directories below ``base`` whose lock these processes hold."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = Path(os.readlink(link))
                    if (
                        target.name == "lock"
                        and target.parent.parent == base
                        and target.parent.name.startswith("fray-")
                    ):
                        found.add(target.parent)
    return found


def _count_below(directory: Path) -> int:
    return sum("logs" not in path.relative_to(directory).parts for path in directory.rglob("*"))


def count_orphans() -> int:
    """Count directories of shared memory that no process holds. (A lock file of this process must not be opened:
    closing it would release the POSIX lock.)"""
    everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return len({lock.parent for lock in SHARED_MEMORY.glob("fray-*/lock")} - held_directories(everybody, SHARED_MEMORY))


def count_objects() -> Counter[str]:
    """Count living objects of Fray's classes (those the collector sees), and the lengths of their collections."""
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        cls = type(thing)
        if str(cls.__module__).startswith("fray."):  # some C extensions have another type here
            counts[f"{cls.__module__}.{cls.__qualname__}"] += 1
            for name, value in _attributes(thing):
                if type(value) in (dict, list, set):
                    counts[f"{cls.__module__}.{cls.__qualname__}.{name}[]"] += len(value)
    return counts


def _attributes(thing: Any) -> Iterable[tuple[str, Any]]:
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    for cls in type(thing).__mro__:
        for name in cls.__dict__.get("__slots__", ()):
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield name, getattr(thing, name)
