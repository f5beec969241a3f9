"""The keeper: one small process per attempt, between the zygote that forked it and the job it forks.

Law: the job and everything below it end before the keeper does. It is a subreaper, so nothing of the job escapes to
init while it lives; if it is killed, the job's main process dies by PDEATHSIG and the rest falls to the zygote, or to
the node. The node's end (its process descriptor, or the end of the control socket) ends the attempt at once.

Conversation with the node, JSON lines on one socket. Down: the start, then ``{"stop": 1}``, ``{"kill": 1}``,
``{"say": text}`` for the attempt's log, ``{"heard": 1}``, ``{"capture": py-spy}``. Up: ``{"keeper": pid}`` with its
pidfd, ``{"running": pid}`` with the pipes the job prints into, ``{"log": lines}`` now and then, ``{"said": what}``
(`fray.node.shim.progress_pipe`; at most one until it was heard), ``{"captured": 1}`` (`fray.node.shim.stack_capture`),
``{"ended": lines, "swept": count, "left": count}`` once the outcome is on disk (or with it, if it cannot be there).
"""

from __future__ import annotations

import gc
import os
import socket
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from fray.model.specs import AttemptSpec, EndReason, Outcome
from fray.net.codec import from_json
from fray.node.job_process.bootstrap import ProcessSpec
from fray.node.job_process.outcome_file import save
from fray.node.linux.cgroups import Cgroup
from fray.node.linux.process_tree import become_subreaper, end_descendants, set_title
from fray.node.logs.writer import LogWriter
from fray.node.prepare import PreparedEnvironment
from fray.node.resources.allocation import Allocation
from fray.node.shim.cgroup_guard import CgroupGuard
from fray.node.shim.event_loop import ShimLoop
from fray.node.shim.node_connection import NodeSocket
from fray.node.shim.pid_namespace import mount_proc
from fray.node.shim.progress_pipe import ProgressPipeReader, open_pipe
from fray.node.shim.resource_usage import ResourceUsage
from fray.node.shim.spawn import ShimConfig, spawn
from fray.node.shim.stack_capture import CaptureTarget, StackCapturer
from fray.node.shim.usage_report import UsageReporter


def run_shim(control: socket.socket, node_pidfd: int) -> ProcessSpec:
    """The whole life of a keeper, in a fresh fork of the zygote. Returns only in the process of the job."""
    become_subreaper()
    set_title("fray-keeper")
    outside = mount_proc()
    lines = NodeSocket(control)
    first = lines.wait_first()
    if first is None:
        os._exit(0)
    ticket = from_json(AttemptSpec, first["ticket"])
    directory = Path(ticket.directory)
    lines.introduce(outside.pid)
    pipe = open_pipe(directory)
    try:
        child = spawn(_start(ticket, first))
    except OSError as error:
        child = None
        why = f"the machine cannot start a process: {error}"
        save(directory, Outcome(cause=EndReason.ENVIRONMENT, message=why, machine_fault=True))
        lines.tell(ended=0, swept=0, left=0)
    if isinstance(child, ProcessSpec):
        control.detach()  # closed already; the object must not close the number again once it is something else
        return child
    if child is None:
        os._exit(0)
    lines.tell_with([child.out_fd, child.err_fd], running=outside.pid_of(child.pidfd, child.pid))
    watch = ShimLoop(ticket, child, lines, node_pidfd, _spool(directory, first["log"]))
    ear, scribes = _add_monitoring(watch, pipe)
    _guard(watch, Allocation(**first["given"]), UsageReporter(ear.measured), scribes)
    if first["prepared"]["image"]:
        from fray.node.shim.container_plugin import ContainerPlugin

        watch.add(ContainerPlugin(first["prepared"]["engine"], ticket))
    os._exit(_watch(watch))


def _add_monitoring(watch: ShimLoop, pipe: int) -> tuple[ProgressPipeReader, StackCapturer]:
    """Listen to what the job says of itself, and look into it when asked to."""
    whom = CaptureTarget(watch.child.pid, watch.child.control_fd, watch.directory)
    scribes = StackCapturer(watch, whom, lambda: watch.lines.tell(captured=1))
    watch.words["capture"] = scribes.begin
    watch.add(scribes)
    ear = ProgressPipeReader(pipe, lambda news: watch.lines.tell(said=news), watch.remark)
    watch.words["heard"] = ear.heard
    if pipe >= 0:
        watch.watch(pipe, ear.hear)
        watch.add(ear)
    return ear, scribes


def _guard(watch: ShimLoop, given: Allocation, meter: UsageReporter, scribes: StackCapturer) -> None:
    """Keep account of what its tree takes, and hold it to what it was given."""
    end_it = partial(watch.condemn, now=True)
    watch.add(ResourceUsage(given.limit_bytes, end_it, meter.looked, scribes.pids))
    if given.group:
        watch.add(CgroupGuard(Cgroup(given.group, given.group_version), given.limit_bytes, end_it))


def _start(ticket: AttemptSpec, first: dict[str, Any]) -> ShimConfig:
    prepared = PreparedEnvironment(**first["prepared"])
    return ShimConfig(
        ticket=ticket,
        entry=first["entry"],
        offered=first["offered"],
        prepared=prepared,
        cpus=tuple(first["given"]["cpus"]),
    )


def _spool(directory: Path, log: dict[str, Any] | None) -> LogWriter:
    """Where its lines go; without a log (no room on the disk) they go with the attempt's own directory."""
    return (
        LogWriter(Path(log["directory"]), lines=log["lines"], limit_bytes=log["limit"]) if log else LogWriter(directory)
    )


def _watch(watch: ShimLoop) -> int:
    gc.enable()
    try:
        watch.run()
        return 0
    except BaseException:  # noqa: BLE001 - said on the node's stderr; the exit code makes the zygote sweep
        traceback.print_exc()
        end_descendants()
        return 1
