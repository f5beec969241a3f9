"""A driver with a child of its own, a node, a zygote, two shims and two storms of forks, for the test of what is left
when some of them are killed. A storm that ended is followed by a new one.

Run as a script: ``process_tree_program.py driver STATE_DIR READY_FD PID_NAMESPACE``.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import trio

from fray.model.log_records import LogChunk
from fray.model.specs import AttemptSpec, EntryKind, JobSpec, ObservedAttempt, Phase
from fray.node.attempts.process_launcher import ProcessLauncher
from fray.node.config import PidNamespaceMode
from fray.node.linux.process_wait import wait_process_end

HERE = str(Path(__file__).parent)
STORMS = ("storm-a", "storm-b")


def attempt_spec(name: str) -> AttemptSpec:
    spec = JobSpec(job_id=name, name=name, namespace="test", entry=EntryKind.CALLABLE, sys_path=(HERE,))
    return AttemptSpec(attempt_id=f"{name}:0:0", spec=spec, controller="memory:none", key="secret")


def drive(state_dir: str, ready_fd: int, mode: str) -> None:
    unrelated = subprocess.Popen(["sleep", "1000"])
    node = subprocess.Popen(
        [sys.executable, __file__, "node", state_dir, str(ready_fd), mode, str(os.getpid()), str(unrelated.pid)],
        pass_fds=[ready_fd],
    )
    os.close(ready_fd)
    node.wait()
    signal.pause()


async def serve(state_dir: str, ready_fd: int, mode: str, driver: int, unrelated: int) -> None:
    launcher = ProcessLauncher(
        state_dir,
        entry="job_functions:dispatch",
        warm=("job_functions",),
        subreaper=True,
        pid_namespace=PidNamespaceMode(mode),
    )
    ready: set[str] = set()
    pids: dict[str, int] = {}

    numbers = itertools.count()

    def on_observed(observed: ObservedAttempt, value: bytes | None) -> None:
        if observed.phase is Phase.ENDED:
            launcher.forget(observed.attempt_id)
            launcher.start(attempt_spec(f"storm-{next(numbers)}"), None)
        if observed.phase is Phase.RUNNING and observed.pid is not None:
            pids[observed.attempt_id.partition(":")[0]] = observed.pid

    def on_log(attempt_id: str, chunk: LogChunk) -> None:
        before = len(ready)
        ready.add(attempt_id)
        if before < len(ready) == len(STORMS):
            attempts = launcher.statistics()["attempts"]
            shims = {name: attempts[f"{name}:0:0"][1] for name in STORMS}
            zygote = launcher.statistics()["zygote"]
            pids_of = {"driver": driver, "unrelated": unrelated, "node": os.getpid(), "zygote": zygote}
            os.write(ready_fd, json.dumps({**pids_of, "shims": shims, "jobs": pids}).encode() + b"\n")
            os.close(ready_fd)

    launcher.on_observed, launcher.on_log = on_observed, on_log
    async with trio.open_nursery() as nursery:
        await nursery.start(launcher.run)
        for name in STORMS:
            launcher.start(attempt_spec(name), None)
        await wait_process_end(driver)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    sys.path.insert(0, HERE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))
    if sys.argv[1] == "driver":
        drive(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        trio.run(serve, sys.argv[2], int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
