"""Failures of episodes: how many in a row, and when they end a run."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from attrs import define, field


class OnError(Enum):
    """Errors at which a run ends."""

    STOP_ON_ERROR = "stop_on_error"
    """The first: an episode that is out of attempts is one."""
    STOP_ON_CRITICAL = "stop_on_critical"
    """Errors that the run cannot repair: every episode fails, a restart budget is spent, data is lost."""
    CONTINUE = "continue"
    """None."""


@define
class EpisodeFailures:
    """Failed attempts of episodes since the state was made; `accepted` and `failed` note what happens.

    Args:
        policy: errors at which the run ends.
        limit: samples of failed attempts in a row at which the run cannot progress, after the first accepted sample;
            None if it comes to its end all the same.
        first_limit: the same before the first accepted sample.
    """

    policy: OnError
    limit: int | None = None
    first_limit: int = 0
    total: int = 0
    """Failed attempts."""
    reasons: Counter[str] = field(factory=Counter)
    """Failed attempts by reason."""
    in_a_row: int = 0
    """Samples of failed attempts since a sample was accepted."""
    has_accepted: bool = False
    stop_reason: str = ""
    """Reason for which the run ends; empty while it continues."""

    def accepted(self) -> None:
        """Note that samples were accepted."""
        self.in_a_row, self.has_accepted = 0, True

    def failed(self, task_id: str, samples: int, reason: str, attempt: int, *, is_last: bool) -> None:
        """Note a failed attempt.

        Args:
            samples: of the task.
            attempt: its number, from 1.
            is_last: the task has no further attempt.
        """
        self.total += 1
        self.reasons[reason] += 1
        self.in_a_row += samples
        if self.stop_reason or self.policy is OnError.CONTINUE:
            return
        limit = self.limit if self.has_accepted else self.first_limit
        if self.policy is OnError.STOP_ON_ERROR and is_last:
            self.stop_reason = f"task {task_id} is out of attempts: attempt {attempt} failed ({reason})"
        elif self.limit is not None and limit is not None and self.in_a_row >= limit:
            since = "since a sample was last accepted" if self.has_accepted else "since the start"
            self.stop_reason = f"every episode fails: {self.in_a_row} samples in a row failed {since}"
