"""The loop of a shim, without a job."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from fray.model.specs import AttemptSpec, EntryKind, JobSpec
from fray.node.logs.writer import LogWriter
from fray.node.shim.event_loop import ShimLoop
from fray.node.shim.node_connection import NodeSocket
from fray.node.shim.spawn import SpawnedProcess


def test_a_pipe_that_is_still_held_open_when_the_node_has_died_costs_no_cpu_time(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pipes = [os.pipe() for _ in range(4)]
    out, err, outcome, control = pipes
    child = SpawnedProcess(
        pid=pid, pidfd=os.pidfd_open(pid), out_fd=out[0], err_fd=err[0], outcome_fd=outcome[0], control_fd=control[1]
    )
    spec = JobSpec(job_id="j", name="n", namespace="s", entry=EntryKind.BINARY)
    attempt_spec = AttemptSpec(
        attempt_id="j:0:0", spec=spec, controller="unix:/c", key="k", node="n", directory=str(tmp_path)
    )
    node_end, shim_end = socket.socketpair()
    node_pidfd = os.pidfd_open(pid)  # also of a process that has ended
    try:
        loop = ShimLoop(attempt_spec, tmp_path, child, NodeSocket(shim_end), node_pidfd, LogWriter(tmp_path))
        while loop.status is None:
            loop._handle_ready(None)
        before_s = time.thread_time()
        loop._drain()
        assert time.thread_time() - before_s < 0.2
    finally:
        for descriptor in (*(end for pipe in pipes for end in pipe), child.pidfd, node_pidfd):
            os.close(descriptor)
        node_end.close()
        shim_end.close()
