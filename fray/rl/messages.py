"""Messages between the coordinator of a run, its rollout processes and its trainer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from attrs import field, frozen

from fray.api.actors.handle import ActorHandle
from fray.rl.core.versions import Segment, VersionName
from fray.rl.nexrl.experiment_posts import NO_POSTS, FetchedPosts

COLLECTED, NOTHING_TO_LEARN, NOT_FINITE = "collected", "nothing_to_learn", "not_finite"
"""Reasons why a batch changed no weights."""


@frozen
class TaskGrant:
    """A task for a rollout worker."""

    lease: str
    """Number of the lease; the result counts while it is open."""
    task_id: str
    group_id: str
    attempt: int
    """Number of attempts that failed before."""
    row: dict[str, Any]
    samples: int
    """Number of scores that the episode returns."""
    is_validation: bool = False
    """True for a task of the validation data."""
    version: int = 0
    """Number of updates of the weights that servers had when it was leased."""


@frozen
class SampleResult:
    """One sample of a task."""

    segments: tuple[Segment, ...]
    rewards: tuple[float, ...]
    key: tuple[Hashable, ...]
    """Key of its group."""
    content: bytes
    """Pickled list of trajectories, which the coordinator does not open."""
    score: tuple[tuple[str, float], ...] = ()
    """Names and values, of which a validation has the means."""


@frozen
class TaskResult:
    """Delivery of a task: its samples, or why there are none."""

    lease: str
    samples: tuple[SampleResult, ...] = ()
    failure: str = ""
    """Short reason, by which the drops of a run are counted; empty: it succeeded."""
    detail: str = ""
    """The error of the episode, for its reader."""
    is_attempt: bool = True
    """False if a failure is not one of the attempts of the task."""
    is_final: bool = False
    """True if another attempt would fail, too: the task is dropped."""
    posts: FetchedPosts = NO_POSTS
    """Posts of its worker to the trackers of the run."""
    added: tuple[tuple[dict[str, Any], bool], ...] = ()
    """Rows that are added to the data if this is accepted, and whether in front of what is waiting."""
    left_out: tuple[str, ...] = ()
    """The ``model_tag`` of each trajectory of another model, which is not among the samples."""


@frozen
class ServerRoute:
    """An inference server that answers requests."""

    name: str
    handle: ActorHandle
    version: VersionName
    accepts: bool = True
    """False: it has not answered in time; it gets no requests, and those it has go to another, if there is one."""
    leaves: bool = False
    """True: it gets no requests, and answers those it has."""
    incarnation: str = ""
    """The incarnation of its process that has the weights; empty: any."""


@frozen
class TrainingBatch:
    """Samples of an update, group by group."""

    number: int
    """Number of the update, from 1."""
    groups: tuple[tuple[bytes, ...], ...]
    """Contents of their samples."""


@frozen
class FailureReport:
    """Episodes that failed."""

    total: int
    """Attempts that failed since the process that counts them began."""
    reasons: dict[str, int]
    """The same by reason."""
    last: str
    """Error of the last one, with its traceback."""
    stop_reason: str = ""
    """Reason for which the run ends; empty while it continues."""

    def text_since(self, known: FailureReport | None) -> str:
        """Return what failed since an earlier report, in one line."""
        # A coordinator that was restarted counts from 0.
        before = known.reasons if known is not None and known.total < self.total else {}
        reasons = {name: count - before.get(name, 0) for name, count in self.reasons.items()}
        listed = ", ".join(f"{name} {count}" for name, count in reasons.items() if count)
        return f"{sum(reasons.values())} attempts of episodes failed ({listed}); the last: {last_line(self.last)}"


@frozen
class ValidationResult:
    """Scores of a version on the validation data."""

    version: VersionName
    metrics: dict[str, float]
    """Means by name, with the prefix ``val/``."""


@frozen
class RunStanding:
    """State of a run, for a controller that takes it over."""

    version: VersionName
    """Version of the trainer's weights."""
    target: VersionName
    """Version that servers shall have now."""
    servers: int | None
    """Servers that the run shall have; None: those of its settings."""
    is_stopping: bool
    """True if it was asked to end after the update under way."""


@frozen
class RunStatus:
    """State of a run, in numbers and in one line."""

    waits_for: str
    version: VersionName
    rollout_version: VersionName
    issued: int
    trained: int
    validated: int
    open: int
    dropped: dict[str, int]
    repeated: dict[str, int]
    last_failure: str
    """Reason and detail of the last episode that failed."""
    left_out: dict[str, int] = field(factory=dict)
    """Trajectories of other models, which no trainer takes, by ``model_tag``, since the coordinator's process began."""
    skipped: dict[str, int] = field(factory=dict)
    """Batches of which nothing was learned, by reason."""


def last_line(text: object) -> str:
    """Return the last line of a text that has something in it."""
    return str(text).rstrip().rpartition("\n")[2]
