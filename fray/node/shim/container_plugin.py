"""Plug-in of the shim for an attempt in a container: removes the container and explains the engine's exit codes."""

from __future__ import annotations

import contextlib

from attrs import evolve

from fray.model.specs import AttemptSpec, EndReason, EntryKind, Outcome
from fray.node.containers.engine import container_name, remove_command
from fray.node.shim.plugin import ShimPlugin

REMOVE_S = 20.0
"""How long the engine may take to remove a container."""
FAILED = 125
"""Exit code of the client when the engine itself has failed."""
NOT_EXECUTED = (126, 127)


class ContainerPlugin(ShimPlugin):
    """The shim's care for its container."""

    def __init__(self, engine: str, attempt_spec: AttemptSpec) -> None:
        self.engine, self.attempt_spec = engine, attempt_spec

    def on_exit(self) -> None:
        """The client has ended; if it was killed, the container goes on without it."""
        import subprocess

        quiet = subprocess.DEVNULL
        command = remove_command(self.engine, [container_name(self.attempt_spec.attempt_id)])
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=REMOVE_S, check=False)

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """Whose doing it was: the engine's client has exit codes of its own."""
        python = self.attempt_spec.spec.entry is not EntryKind.BINARY
        own = outcome.exit_code == FAILED or (python and outcome.exit_code in NOT_EXECUTED)
        if outcome.cause is not EndReason.FAILURE or not own:
            return outcome
        message = f"its container could not be started: {outcome.message}"
        return evolve(outcome, cause=EndReason.ENVIRONMENT, message=message)
