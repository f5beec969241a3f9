"""What an exit code means, by the word of the job's author."""

from __future__ import annotations

from enum import StrEnum


class ExitRule(StrEnum):
    RETRY = "retry"
    """Begin again, at the expense of the budget for failures."""
    FAIL = "fail"
    """The job has failed, whatever budget is left."""
    IGNORE = "ignore"
    """As good as 0: the job has succeeded."""
