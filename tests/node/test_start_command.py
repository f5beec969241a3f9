"""Commands in the environment of an attempt: what a node answers when the shim is gone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fray.errors import Refused
from fray.model.messages.tunnels import RunCommand
from fray.model.specs import AttemptSpec, EntryKind, JobSpec
from fray.node.attempts.process_launcher import ProcessLauncher
from fray.node.attempts.runner import RunningAttempt
from fray.node.attempts.shim_connection import ShimConnection


async def test_a_command_for_an_attempt_whose_shim_ends_at_that_moment_is_refused(tmp_path: Path) -> None:
    spec = JobSpec(job_id="j", name="j", namespace="n", entry=EntryKind.CALLABLE)
    attempt_spec = AttemptSpec(attempt_id="j:0:0", spec=spec, controller="unix:/c", key="k", directory=str(tmp_path))
    launcher = ProcessLauncher(tmp_path)
    near, shim = socket.socketpair()
    with near:
        shim.close()
        attempt = RunningAttempt(attempt_spec, tmp_path, pid=1, control=ShimConnection(near))
        launcher._attempts["j:0:0"] = attempt
        with pytest.raises(Refused, match="j:0:0 has ended"):
            await launcher.start_command("j:0:0", RunCommand(job="j", argv=("true",)))
