"""Machines that are ``fray-node`` processes on the controller's own machine, to try autoscaling without a cloud.

A unit is a directory: ``unit.json`` contains its description and the process of each host; beside it are the
directories, configurations and logs of its nodes. Everything is stored there, so the next controller finds the units of
this one. A node ends with the controller's process, unless its group has ``options.detached``: then it keeps running
and is found again. A unit with a process that has ended has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio
from attrs import asdict, define, field

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.errors import InvalidRequest
from fray.model.messages.client import ProcessMark
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)
from fray.net.atomic_file import write_atomically
from fray.net.process_identity import ProcessWatch, process_mark, wait_process_exited

END_S = 5.0
"""Seconds nodes may take to end after SIGTERM; nothing runs on them."""
LAST_WORDS_CHARS = 300
_FILE = "unit.json"


def read_options(group: GroupConfig) -> bool:
    """Return whether the nodes of the group survive the controller.

    Raises:
        InvalidRequest: an option is invalid.
    """
    unknown = sorted(group.options.keys() - {"detached"})
    if unknown:
        raise InvalidRequest(f"[[group]] {group.name!r}: unknown option {unknown[0]!r}; there is detached")
    detached = group.options.get("detached", False)
    if not isinstance(detached, bool):
        raise InvalidRequest(f"[[group]] {group.name!r}: options.detached={detached!r} must be true or false")
    return detached


@define(eq=False)
class ProcessProvider:
    """Provider of all groups of kind ``process``.

    Args:
        directory: of the units; made with the first one.

    Raises:
        InvalidRequest: invalid options.
    """

    directory: Path
    groups: Sequence[GroupConfig]
    _children: dict[int, subprocess.Popen[bytes]] = field(factory=dict, init=False)
    """Processes that this controller has started and must reap."""

    def __attrs_post_init__(self) -> None:
        self.update_groups(self.groups)

    def update_groups(self, groups: Sequence[GroupConfig]) -> None:
        """Apply a changed policy.

        Raises:
            InvalidRequest: invalid options.
        """
        for group in groups:
            if group.provider == "process":
                read_options(group)
        self.groups = groups

    async def create(self, request: MachineRequest) -> None:
        unit = self.directory / request.name
        # Already created, by a call whose answer got lost with a controller.
        if (unit / _FILE).exists():
            return
        group = request.group
        if not request.join.address:
            raise ProviderError(
                ErrorKind.INVALID,
                "this cluster has no address that another process could reach: use machine?policy=FILE",
            )
        about: dict[str, Any] = {
            "group": group.name,
            "zone": request.zone,
            "detached": read_options(group),
            "hosts": group.hosts,
            "processes": [],
        }
        try:
            # The record is written before the first process and after each: a controller that ends in between leaves no
            # process that is not on record.
            unit.mkdir(mode=0o700, parents=True)
            self._write_record(unit, about)
            for worker in range(group.hosts):
                about["processes"].append(asdict(self._start(unit, request, worker)))
                self._write_record(unit, about)
                await trio.lowlevel.checkpoint()
        except OSError as error:
            raise ProviderError(ErrorKind.TRANSIENT, f"cannot start {request.name}: {error}") from error

    def _start(self, unit: Path, request: MachineRequest, worker: int) -> ProcessMark:
        """Start one node from the thread of the event loop, which lives as long as this process; the node is bound to
        it."""
        name = request.name if request.group.hosts == 1 else f"{request.name}-{worker}"
        home = unit / str(worker)
        home.mkdir(mode=0o700)
        token = home / "join-token"
        # With its mode before its content. In a file, since other users can read the command lines of processes.
        token.touch(mode=0o600)
        token.write_text(request.join.token)
        config = home / "node.toml"
        config.write_text(_node_toml(request, name, worker, home, token))
        with open(home / "log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fray.node", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the controller's terminal must not reach the nodes, which end attempts in order.
                start_new_session=True,
                # The node joins by its own token and must not hold the cluster's.
                env={key: value for key, value in os.environ.items() if key != "FRAY_TOKEN"},
            )
        self._children[process.pid] = process
        return process_mark(process.pid)

    def _write_record(self, unit: Path, about: dict[str, Any]) -> None:
        write_atomically(unit / _FILE, json.dumps(about).encode())

    async def delete(self, name: str, zone: str, group: str) -> None:
        unit = self.directory / name
        about = _read(unit)
        if about is not None:
            await self._end(_process_marks(about))
        # After the processes have ended: what still runs would write into it.
        shutil.rmtree(unit, ignore_errors=True)
        if unit.exists():
            raise ProviderError(ErrorKind.TRANSIENT, f"cannot remove {unit}")

    async def _end(self, marks: Sequence[ProcessMark]) -> None:
        """Send SIGTERM, then SIGKILL to those that have not ended in time."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [mark for mark in marks if self._alive(mark)]
            for mark in alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(mark.pid, number)
            # After SIGKILL the wait is shielded: a directory must not be removed under a process that still runs.
            with trio.move_on_after(END_S, shield=number is signal.SIGKILL):
                for mark in alive:
                    await wait_process_exited(mark)

    def _alive(self, mark: ProcessMark) -> bool:
        child = self._children.get(mark.pid)
        # Reaps it: a zombie would stay until the controller ends.
        if child is not None and child.poll() is not None:
            del self._children[mark.pid]
        process_watch = ProcessWatch.open(mark)
        if process_watch is None:
            return False
        try:
            return not process_watch.has_exited()
        finally:
            process_watch.close()

    async def list(self) -> Sequence[SeenMachine]:
        return list(self._seen())

    def _seen(self) -> Iterator[SeenMachine]:
        try:
            units = sorted(path for path in self.directory.iterdir() if path.is_dir())
        except FileNotFoundError:
            return
        for unit in units:
            about = _read(unit)
            if about is None:
                yield SeenMachine(
                    unit.name, "", state=MachineState.FAILED, hosts=0, message="its creation was interrupted"
                )
                continue
            alive = [self._alive(mark) for mark in _process_marks(about)]
            # Fewer processes than hosts: the controller ended while it created the unit.
            failed = not all(alive) or len(alive) < about["hosts"]
            yield SeenMachine(
                unit.name,
                about["group"],
                about["zone"],
                MachineState.FAILED if failed else MachineState.RUNNING,
                sum(alive),
                _last_words(unit, alive) if failed else "",
            )

    async def aclose(self) -> None:
        """End all nodes that are not detached, and delete their units."""
        async with trio.open_nursery() as nursery:
            for seen in list(self._seen()):
                about = _read(self.directory / seen.name)
                if about is None or not about["detached"]:
                    nursery.start_soon(self.delete, seen.name, seen.zone, seen.group)


def _process_marks(about: dict[str, Any]) -> list[ProcessMark]:
    return [ProcessMark(**one) for one in about["processes"]]


def _read(unit: Path) -> dict[str, Any] | None:
    try:
        about: dict[str, Any] = json.loads((unit / _FILE).read_text())
    except (OSError, ValueError):
        return None
    return about


def _last_words(unit: Path, alive: Sequence[bool]) -> str:
    worker = alive.index(False) if False in alive else len(alive)
    try:
        last_lines = (unit / str(worker) / "log").read_text(errors="replace").strip()[-LAST_WORDS_CHARS:]
    except OSError:
        last_lines = ""
    return f"the process of host {worker} has ended" + (f": {last_lines}" if last_lines else "")


def _node_toml(request: MachineRequest, name: str, worker: int, home: Path, token: Path) -> str:
    group = request.group
    capacity = group.capacity(request.zone, request.name, worker)
    config_values: dict[str, Any] = {
        "controller": request.join.address,
        "name": name,
        "state_dir": str(home / "node"),
        "join_token_file": str(token),
        "cpu": capacity.cpu_milli / 1000,
        "memory": capacity.memory_bytes,
        "disk": capacity.disk_bytes,
        "gpus": [device.variant for device in capacity.devices if device.kind == "gpu"],
        "tpus": [device.variant for device in capacity.devices if device.kind == "tpu"],
    }
    # The node ends with the process of this id.
    if not read_options(group):
        config_values["parent_pid"] = os.getpid()
    lines = [f"{key} = {json.dumps(value)}" for key, value in config_values.items()]
    attributes = (f"{json.dumps(key)} = {json.dumps(value)}" for key, value in capacity.attributes.items())
    return "\n".join([*lines, "[attributes]", *attributes]) + "\n"
