"""Base class of what a shim does for its attempt besides ending it: limits, usage, progress, stack captures.

Contract: a plug-in decides in microseconds and never waits; anything slower it starts, and learns about through a
descriptor (`ShimLoop.add_reader`). Its timer runs only when it asked for it (`next_due_at`), so an idle shim sleeps.
"""

from __future__ import annotations

from fray.model.specs import Outcome


class ShimPlugin:
    """A plug-in of the shim's loop; override what it needs. All times are `time.monotonic`'s."""

    def next_due_at(self) -> float | None:
        """Return when `on_timer` is to be called at the latest; None: not needed. Called before each wait."""
        return None

    def on_timer(self, now: float) -> None:
        """Do what is due and advance `next_due_at`. Called after each wait, early or late."""

    def on_exit(self) -> None:
        """Look at what is still alive: the main process has ended, and the rest is about to be killed."""

    def on_node_lost(self) -> None:
        """Remove what the node would have removed: the node has died, and so has all of the job."""

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """Return the outcome, completed. Called once no process of the job is alive."""
        return outcome
