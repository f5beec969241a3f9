"""What else a shim does for its attempt, each in a file of its own: limits, accounts, beats, captures.

Law: a `Watcher` decides in microseconds and never waits; whatever takes longer it starts, and hears of by a descriptor
(`Watch.watch`). It is asked only when it said it wanted to be (`next_at`), so an idle shim sleeps.
"""

from __future__ import annotations

from fray.model.specs import Outcome


class ShimPlugin:
    """One such thing; override what it needs. All times are `time.monotonic`'s."""

    def next_due_at(self) -> float | None:
        """When `due` is to be called at the latest; None: not by itself. Asked before each wait."""
        return None

    def on_timer(self, now: float) -> None:
        """Called after each wait, early or late: do what is due, and move `next_at` on."""

    def on_exit(self) -> None:
        """The main process has ended, and what it left is about to be swept: the last look at what still lives."""

    def on_node_lost(self) -> None:
        """The node is gone, and nothing of the job lives any more: leave nothing behind that the node would remove."""

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """Nothing of the job lives any more: what is to be added to its record."""
        return outcome
