"""The shim process: assembles the loop and its plug-ins in a fresh fork of the zygote.

Invariants: the job and everything below it end before the shim does. It is a subreaper, so no process of the job
escapes to init while it lives; if it is killed, the job's main process dies by PDEATHSIG and the rest is adopted by the
zygote or the node, which kill it. The end of the node (its pidfd, or the end of the control socket) ends the attempt at
once.

Protocol with the node, JSON lines on one socket. Node to shim: the start message, then ``{"stop": 1}``, ``{"kill":
1}``, ``{"notice": seconds}``, ``{"say": text}`` for the attempt's log, ``{"acknowledged": 1}``, ``{"capture":
py-spy}``, ``{"command": 1}`` with the descriptor of a socket (`fray.node.shim.commands`). Shim to node: ``{"shim":
pid}`` with its pidfd, ``{"running": pid}`` with the pipes the job prints into, ``{"log": lines}`` now and then (dropped
while the socket is full), ``{"report": …}`` (`fray.node.shim.progress_pipe`; at most one unacknowledged),
``{"captured": 1}`` (`fray.node.shim.stack_capture`), ``{"ended": lines, "swept": count, "left": count}`` once the
outcome is on disk (or with the outcome, if it cannot be written).
"""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable
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
from fray.node.shim.commands import CommandRunner
from fray.node.shim.event_loop import ShimLoop
from fray.node.shim.node_connection import NodeSocket
from fray.node.shim.pid_namespace import mount_proc
from fray.node.shim.progress_pipe import ProgressPipeReader, open_pipe
from fray.node.shim.resource_usage import ResourceUsage
from fray.node.shim.spawn import ShimConfig, spawn
from fray.node.shim.stack_capture import CAPTURED, CaptureTarget, StackCapturer
from fray.node.shim.usage_report import UsageReporter


def run_shim(control: socket.socket, node_pidfd: int) -> ProcessSpec:
    """Run the shim of one attempt. Returns only in the process of the job."""
    become_subreaper()
    set_title("fray-shim")
    # Before anything reads /proc: process ids there must be those of this process's own PID namespace.
    outside = mount_proc()
    node = NodeSocket(control)
    first = node.receive_start()
    if first is None:
        os._exit(0)
    attempt_spec = from_json(AttemptSpec, first["attempt_spec"])
    directory = Path(first["records"])
    # Before there is a job: from here on the node can kill this shim, and does not take it for an orphan.
    node.send_pid(outside.pid)
    pipe = open_pipe(Path(attempt_spec.directory))
    try:
        child = spawn(_shim_config(attempt_spec, first))
    except OSError as error:
        child = None
        why = f"cannot start a process on this machine: {error}"
        # Out of processes or descriptors: the machine's fault, so no retry budget of the job is charged.
        save(directory, Outcome(cause=EndReason.ENVIRONMENT, message=why, machine_fault=True))
        node.send_last(ended=0, swept=0, left=0)
    if isinstance(child, ProcessSpec):
        control.detach()  # closed already; the object must not close the number again once it is something else
        return child
    if child is None:
        os._exit(0)
    # The node keeps the read ends, too: what is in the pipes can still be read if this process is killed.
    node.send_with_descriptors([child.out_fd, child.err_fd], running=outside.pid_of(child.pidfd, child.pid))
    loop = ShimLoop(attempt_spec, directory, child, node, node_pidfd, _open_log(directory, first["log"]))
    progress_reader, capturer = _add_monitoring(loop, attempt_spec, pipe)
    allocation = Allocation(**first["allocation"])
    commands = CommandRunner(loop, child.pid, _shim_config(attempt_spec, first), allocation)
    _add_limits(
        loop,
        allocation,
        UsageReporter(progress_reader.on_usage),
        lambda: [*capturer.pids(), *commands.recorder_pids()],
    )
    loop.add(commands)
    loop.handlers["command"] = lambda _: commands.start(node.take_descriptor())
    loop.handlers["record"] = lambda py_spy: commands.start(node.take_descriptor(), py_spy)
    # Imported for containers only: each shim would pay for it in time and in copied pages.
    if first["prepared"]["image"]:
        from fray.node.shim.container_plugin import ContainerPlugin

        loop.add(ContainerPlugin(first["prepared"]["engine"], attempt_spec))
    os._exit(_run_loop(loop))


def _add_monitoring(loop: ShimLoop, attempt_spec: AttemptSpec, pipe: int) -> tuple[ProgressPipeReader, StackCapturer]:
    """Add the readers of progress reports and the stack capturer."""
    target = CaptureTarget(
        loop.child.pid,
        loop.child.control_fd,
        Path(attempt_spec.directory),
        loop.directory / CAPTURED,
        account=attempt_spec.account,
    )
    capturer = StackCapturer(loop, target, lambda: loop.node.post(captured=1))
    loop.handlers["capture"] = capturer.start
    loop.add(capturer)
    progress_reader = ProgressPipeReader(pipe, lambda news: loop.node.post(report=news), loop.log_line)
    loop.handlers["acknowledged"] = progress_reader.on_acknowledged
    if pipe >= 0:
        loop.add_reader(pipe, progress_reader.read)
        loop.add(progress_reader)
    return progress_reader, capturer


def _add_limits(
    loop: ShimLoop, allocation: Allocation, usage_reporter: UsageReporter, not_counted: Callable[[], list[int]]
) -> None:
    """Add the plug-ins that measure the process tree, but for pids that are not the job's, and enforce its limits."""
    # At once: the time of a termination policy would suffice to exhaust the machine's memory.
    fail_now = partial(loop.fail, now=True)
    loop.add(ResourceUsage(allocation.limit_bytes, fail_now, usage_reporter.on_sample, not_counted))
    # After ResourceUsage: the guard amends the outcome last and takes the larger of the two peaks.
    if allocation.group:
        loop.add(CgroupGuard(Cgroup(allocation.group, allocation.group_version), allocation.limit_bytes, fail_now))


def _shim_config(attempt_spec: AttemptSpec, first: dict[str, Any]) -> ShimConfig:
    prepared = PreparedEnvironment(**first["prepared"])
    return ShimConfig(
        attempt_spec=attempt_spec,
        entry=first["entry"],
        offered=first["offered"],
        prepared=prepared,
        cpus=tuple(first["allocation"]["cpus"]),
    )


def _open_log(directory: Path, log: dict[str, Any] | None) -> LogWriter:
    """Return the writer of the attempt's log; without a log (the disk is full) lines go to the attempt's directory."""
    return (
        LogWriter(Path(log["directory"]), lines=log["lines"], limit_bytes=log["limit"]) if log else LogWriter(directory)
    )


def _run_loop(loop: ShimLoop) -> int:
    """Run the loop and return the exit status."""
    # The zygote forks with the collector off. A shim lives as long as its job.
    gc.enable()
    try:
        loop.run()
        return 0
    except BaseException:  # noqa: BLE001 - printed on the node's stderr; the exit code makes the zygote kill orphans
        traceback.print_exc()
        end_descendants()
        return 1
