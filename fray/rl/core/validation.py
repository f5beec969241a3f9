"""Validation of a version: the tasks of a round, and the means of their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from attrs import define, field, frozen, validators

from fray.rl.core.tasks import RolloutTask
from fray.rl.core.trajectory_store import Sample
from fray.rl.core.versions import VersionName

VALIDATION = -2
"""Epoch of the tasks of a validation."""
PREFIX = "val/"
"""Begins the names of the metrics of a validation."""


@frozen
class ValidationPlan:
    """Settings of the validations of a run.

    Args:
        rows: of the validation data.
        every: versions between two validations; None: there are none after the first.
        before: validate the version with which the run begins.
        samples: of each row.
        whole_groups: one task for all samples of a row.

    Raises:
        ValueError: a number is below 1.
    """

    rows: int = field(validator=validators.ge(1))
    every: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    before: bool = False
    samples: int = field(default=1, validator=validators.ge(1))
    whole_groups: bool = False

    @property
    def size(self) -> int:
        """Number of tasks of a round."""
        return self.rows if self.whole_groups else self.rows * self.samples

    def tasks(self) -> list[RolloutTask]:
        """Return the tasks of a round, in order."""
        if self.whole_groups:
            return [RolloutTask(VALIDATION, row, 0, row, self.samples) for row in range(self.rows)]
        repeats = range(self.samples)
        return [RolloutTask(VALIDATION, row, repeat, row) for row in range(self.rows) for repeat in repeats]


@define
class ValidationRound:
    """A validation under way.

    Args:
        version: that answers its requests.
        plan: as it was when the round began.
    """

    version: VersionName
    plan: ValidationPlan
    delivered: dict[RolloutTask, tuple[Sample, ...]] = field(factory=dict)
    dropped: dict[RolloutTask, str] = field(factory=dict)
    """Tasks without a result, with the reason."""

    @property
    def open_tasks(self) -> list[RolloutTask]:
        """The tasks that have no result yet."""
        return [task for task in self.plan.tasks() if task not in self.delivered and task not in self.dropped]

    @property
    def is_complete(self) -> bool:
        return self.done == self.plan.size

    @property
    def done(self) -> int:
        """Number of tasks that have a result or were dropped."""
        return len(self.delivered) + len(self.dropped)

    def metrics(self) -> dict[str, float]:
        """Return means of rewards and scores, and how many samples there are, by name, with the prefix ``val/``."""
        samples = [sample for task in sorted(self.delivered) for sample in self.delivered[task]]
        scores = [{name: value} for sample in samples for name, value in sample.score]
        # A score of this name is what the user wants to see.
        has_reward = any("reward" in score for score in scores)
        rewards = [] if has_reward else [{"reward": reward} for sample in samples for reward in sample.rewards]
        counts = {"samples": float(len(samples)), "dropped": float(sum(task.samples for task in self.dropped))}
        return means_of([*rewards, *scores]) | {f"{PREFIX}{name}": value for name, value in counts.items()}


def means_of(scores: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each score over those that have it, with the prefix ``val/``."""
    by_name: dict[str, list[float]] = {}
    for each in scores:
        for name, value in each.items():
            by_name.setdefault(name, []).append(value)
    return {f"{PREFIX}{name}": fmean(values) for name, values in by_name.items()}


def foreign_versions(samples: Sequence[Sample], version: VersionName) -> set[VersionName]:
    """Return the versions other than that of a validation which made tokens of samples."""
    return {name for sample in samples for name, _ in sample.segments} - {version}
