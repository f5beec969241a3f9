"""Processes of a campaign: their kinds, descendants, and whether they live."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

from bench.faults.lab import TAG

BUILDER = b"fray.node.environments.builder"
"""Module of the process that builds an environment, in its command line."""


@frozen
class Process:
    """Process, identified by pid and start time."""

    pid: int
    ticks: int
    parent: int
    comm: str

    @property
    def lives(self) -> bool:
        found = look_at(self.pid)
        return found is not None and found.ticks == self.ticks


def look_at(pid: int) -> Process | None:
    """Return the process of a pid; None if it has ended, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    comm, fields = text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]), int(fields[1]), comm)


def all_processes() -> dict[int, Process]:
    found = (look_at(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def below(root: int, processes: dict[int, Process]) -> list[Process]:
    """Return all living descendants of ``root``, parents first."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found, at = list(children.get(root, [])), 0
    while at < len(found):
        found += children.get(found[at].pid, [])
        at += 1
    return found


def kind_of(process: Process, processes: dict[int, Process], nodes: Iterable[int]) -> str:
    """Return the kind of a process below a node, by its name and those of the processes above it."""
    parent = processes.get(process.parent)
    if any(BUILDER in _read(f"/proc/{one.pid}/cmdline") for one in _line_of(process, processes)):
        return "builder"  # or what it has started
    if process.comm.startswith("fray-"):
        return process.comm.removeprefix("fray-")
    if process.comm.startswith("fray:"):
        return "job"
    if parent is not None and parent.comm.startswith(("fray-shim", "fray-init")):
        return "job"  # a program, or an orphan that the shim has adopted
    return "zygote" if process.parent in nodes else "child"


def _line_of(process: Process, processes: dict[int, Process]) -> Iterator[Process]:
    """Yield the process, its parent, and so on."""
    found: Process | None = process
    while found is not None:
        yield found
        found = processes.get(found.parent)


def marked(tag: str, directory: str) -> list[Process]:
    """Return the living processes with the mark of a campaign in their environment or command line."""
    mark, place = f"{TAG}={tag}".encode(), directory.encode()
    found = []
    for pid, process in all_processes().items():
        if mark in _read(f"/proc/{pid}/environ").split(b"\0") or place in _read(f"/proc/{pid}/cmdline"):
            found.append(process)
    return found


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
