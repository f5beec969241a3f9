"""Entries of the journal of a run: what happens to its samples.

A run's state is what its entries make of a snapshot; nothing else changes it, but who has which lease. So a state that
was lost with its process is rebuilt from the last snapshot and the entries written since.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any, TypeAlias

from attrs import field, frozen

from fray.rl.core.tasks import RolloutTask
from fray.rl.core.trajectory_store import Sample
from fray.rl.core.versions import VersionName


@frozen
class BatchLoaded:
    """The tasks of the next batch of the data are waiting."""

    number: int


@frozen
class RowAdded:
    """A row that was added while the run was under way is waiting."""

    row: int
    in_front: bool
    key: str = ""
    """Name by which a repeated request is known."""
    content: Any = field(default=None, repr=False)
    """The row."""


@frozen
class SamplesAccepted:
    """A task was rolled out."""

    samples: tuple[Sample, ...]
    keys: tuple[tuple[Hashable, ...], ...]
    """Keys of the groups of the samples."""


class RetryCost(Enum):
    """Limit that a failure uses up; the task is dropped when it is reached."""

    ATTEMPT = "attempt"
    WORKER = "worker"
    NOTHING = "nothing"


@frozen
class TaskFailed:
    """A task was not rolled out; it is waiting again."""

    task: RolloutTask
    reason: str
    cost: RetryCost


@frozen
class TaskDropped:
    """A task will not be rolled out again."""

    task: RolloutTask
    reason: str


@frozen
class GroupRefused:
    """Samples of a complete group are not trained: dropped, or their tasks wait again."""

    sample_ids: tuple[str, ...]
    reason: str
    again: bool


@frozen
class IncompleteDropped:
    """The samples of groups that are not complete are dropped, since no more will come."""

    reason: str


@frozen
class BatchTaken:
    """A batch is being trained."""

    sample_ids: tuple[str, ...]
    lost: int
    """Lost slots that it uses up."""


@frozen
class BatchTrained:
    """An update was done with the batch."""


@frozen
class NothingLearned:
    """The update that is done with the batch leaves the weights as they are."""

    reason: str


@frozen
class BatchSkipped:
    """The batch was not trained, and is dropped."""

    reason: str


@frozen
class WeightsSynced:
    """The servers have a version."""

    version: VersionName


@frozen
class ValidationBegan:
    """The tasks of a validation are waiting; the servers keep their version until it ends."""


@frozen
class ValidationDelivered:
    """A task of a validation was rolled out."""

    samples: tuple[Sample, ...]


@frozen
class ValidationDropped:
    """A task of a validation will not be rolled out again."""

    task: RolloutTask
    reason: str


@frozen
class ValidationEnded:
    """Servers may take newer versions."""


Entry: TypeAlias = (
    BatchLoaded
    | RowAdded
    | SamplesAccepted
    | TaskFailed
    | TaskDropped
    | GroupRefused
    | IncompleteDropped
    | BatchTaken
    | BatchTrained
    | NothingLearned
    | BatchSkipped
    | WeightsSynced
    | ValidationBegan
    | ValidationDelivered
    | ValidationDropped
    | ValidationEnded
)
