"""Plug-in of the shim for an attempt in a container: removes the container and explains the engine's exit codes."""

from __future__ import annotations

import contextlib

from attrs import evolve

from fray.model.specs import AttemptSpec, EndReason, EntryKind, Outcome
from fray.node.containers.engine import container_name, remove_command
from fray.node.shim.plugin import ShimPlugin

REMOVE_S = 20.0
"""Seconds the engine may take to remove a container."""
FAILED = 125
"""Exit code of the client when the engine itself has failed."""
# Of a program these may be its own codes (a shell returns 127 for an unknown command). Of a Python job they mean that
# the image has no usable python3.
NOT_EXECUTED = (126, 127)


class ContainerPlugin(ShimPlugin):
    """Removes the container of an attempt, and classifies failures of the engine."""

    def __init__(self, engine: str, attempt_spec: AttemptSpec) -> None:
        self.engine, self.attempt_spec = engine, attempt_spec

    def on_exit(self) -> None:
        """Remove the container: the client has ended, but if it was killed, the container keeps running."""
        import subprocess

        # The only plug-in that waits in the loop: the job has ended, so nothing but its report is delayed.
        quiet = subprocess.DEVNULL
        command = remove_command(self.engine, [container_name(self.attempt_spec.attempt_id)])
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=REMOVE_S, check=False)

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """Attribute failures of the engine to the environment: its client has exit codes of its own."""
        python = self.attempt_spec.spec.entry is not EntryKind.BINARY
        own = outcome.exit_code == FAILED or (python and outcome.exit_code in NOT_EXECUTED)
        if outcome.cause is not EndReason.FAILURE or not own:
            return outcome
        message = f"could not start the container: {outcome.message}"
        return evolve(outcome, cause=EndReason.ENVIRONMENT, message=message)
