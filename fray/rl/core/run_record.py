"""Record of a run: the part of its state that its journal rebuilds."""

from __future__ import annotations

import copy
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from attrs import define, field, frozen, validators

from fray.rl.core.accounting import SampleCounts
from fray.rl.core.failures import EpisodeFailures, OnError
from fray.rl.core.journal import (
    BatchLoaded,
    BatchSkipped,
    BatchTaken,
    BatchTrained,
    Entry,
    GroupRefused,
    IncompleteDropped,
    NothingLearned,
    RetryCost,
    RowAdded,
    SamplesAccepted,
    TaskDropped,
    TaskFailed,
    ValidationBegan,
    ValidationDelivered,
    ValidationDropped,
    ValidationEnded,
    WeightsSynced,
)
from fray.rl.core.tasks import RolloutTask, TaskOrder
from fray.rl.core.trajectory_store import ReadyRule, Sample, SampleGroup, TrajectoryStore
from fray.rl.core.validation import ValidationPlan, ValidationRound
from fray.rl.core.versions import Gate, SyncMode, WeightSchedule

ADDED = -1
"""Epoch of rows that were added while the run was under way."""
EQUAL_REWARDS = "equal_rewards"
"""Reason of groups that dynamic sampling drops."""
FRONT, BACK = 0, 1
"""Order of waiting tasks: those that were returned or added in front, then the others."""


class StalePolicy(Enum):
    """Treatment of a group with a token that is too old to be trained."""

    REQUEUE = "requeue"
    KEEP = "keep"
    DROP = "drop"


@frozen
class RunPlan:
    """Settings of a run that decide about its samples.

    Args:
        order: the data, with ``repeats`` equal to the size of a group.
        batch_size: samples of an update.
        rule: when a batch is ready.
        keep_batch_order: nothing beyond the loaded batch is rolled out until the next weights are in place. A rule that
            waits for the loaded batch implies it.
        stale: what happens to a group that became too old. A group of a lost version is rolled out again in any case.
        max_attempts: attempts of a task that may fail or expire.
        max_losses: workers that may be lost with a task, before it is taken for the cause.
        lease_s: seconds for one attempt.
        steps: updates; None for as many as the data gives.
        drop_equal_rewards: groups in which all rewards are equal are dropped and replaced (dynamic sampling).
        max_replaced_groups: how many in one step; more are trained as they are.
        on_error: errors at which the run ends.
        validation: what is validated, and when; None: nothing is.
        keyed_group_size: size of a group, where groups are made by keys of the trajectories; None: the repeats of a
            row are a group.

    Raises:
        ValueError: a number is out of its range, no whole number of groups fills a batch, or ``keep`` with a mode in
            which no group becomes too old.
    """

    order: TaskOrder
    batch_size: int
    rule: ReadyRule = ReadyRule.BATCH_SIZE
    mode: SyncMode = SyncMode.SYNC
    threshold: int = field(default=1, validator=validators.ge(0))
    keep_batch_order: bool = False
    stale: StalePolicy = StalePolicy.REQUEUE
    max_attempts: int = field(default=3, validator=validators.ge(1))
    max_losses: int = field(default=10, validator=validators.ge(1))
    lease_s: float = field(default=600.0, validator=validators.gt(0))
    steps: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    drop_equal_rewards: bool = False
    max_replaced_groups: int = field(default=64, validator=validators.ge(0))
    on_error: OnError = OnError.STOP_ON_CRITICAL
    validation: ValidationPlan | None = None
    keyed_group_size: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.stale is StalePolicy.KEEP and self.mode is not SyncMode.FULLY_ASYNC:
            raise ValueError(
                f"invalid stale policy 'keep' with sync mode {self.mode.value!r}: expected 'requeue' or 'drop'"
            )
        loaded = self.order.batch_rows * self.order.repeats
        if self.keep_batch_order and self.rule is not ReadyRule.LOADED_BATCH_FINISHED and loaded < self.batch_size:
            raise ValueError(
                f"invalid batch_size {self.batch_size}: a loaded batch has {loaded} samples,"
                " and keep_batch_order loads the next one only after an update"
            )
        self.new_store()

    @property
    def group_size(self) -> int:
        return self.keyed_group_size or self.order.repeats

    @property
    def holds_batches(self) -> bool:
        return self.keep_batch_order or self.rule is not ReadyRule.BATCH_SIZE

    @property
    def most_untrained(self) -> int:
        """Samples that may be rolled out, in the pool or in training at once: more would be too old when trained.

        Where batches are held, the loaded one is the limit.
        """
        return self.batch_size * (1 if self.mode is SyncMode.SYNC else self.threshold + 1)

    def new_failures(self) -> EpisodeFailures:
        """Return counts of failures, with the limits of this plan."""
        # Data that ends lets the run end; data that does not end gives tasks for ever.
        limit = None if self.order.epochs is not None else self.batch_size * self.max_attempts
        return EpisodeFailures(self.on_error, limit, self.batch_size)

    def new_store(self) -> TrajectoryStore:
        return TrajectoryStore(self.group_size, self.batch_size, self.rule)


@define
class RunRecord:
    """Samples of a run by where they are. Changed by `apply` alone, with the same result wherever it is done."""

    plan: RunPlan
    weights: WeightSchedule
    store: TrajectoryStore
    counts: SampleCounts = field(factory=SampleCounts)
    loaded: int = 0
    """Number of batches that were loaded."""
    is_held: bool = False
    """True while the next batch must not be loaded."""
    added: int = 0
    """Number of rows that were added."""
    added_rows: list[RowAdded] = field(factory=list)
    waiting: list[tuple[int, RolloutTask]] = field(factory=list)
    """Heap of the tasks that no worker has, or had when it was lost."""
    attempts: Counter[str] = field(factory=Counter)
    """Failed attempts, by task."""
    losses: Counter[str] = field(factory=Counter)
    """Workers lost, by task."""
    training: list[SampleGroup] | None = None
    """The batch that is being trained."""
    replaced_groups: int = 0
    """Groups with equal rewards that were dropped in this step."""
    skipped: Counter[str] = field(factory=Counter)
    """Batches of which nothing was learned, by reason."""
    validation: ValidationRound | None = None
    open_groups: Counter[str] = field(factory=Counter)
    """Accepted samples that are not trained, by the group of their tasks."""

    @classmethod
    def new(cls, plan: RunPlan) -> RunRecord:
        """Return the record of a run that has not begun."""
        weights = WeightSchedule(plan.mode, plan.threshold, _validate_every(plan))
        if plan.validation is not None and plan.validation.before:
            weights.pinned = weights.rollout
        return cls(plan, weights, plan.new_store())

    def continue_with(self, plan: RunPlan) -> None:
        """Take the settings of the run that continues; rows, groups and their sizes must be those of the old plan."""
        self.plan, self.weights.mode, self.weights.threshold = plan, plan.mode, plan.threshold
        self.weights.validate_every = _validate_every(plan)
        if not hasattr(self, "added_rows"):
            self.added_rows = []  # of a checkpoint that an earlier release has written
        if plan.validation is None:
            self._abandon_validation()
            self.weights.pinned = None

    def copy(self) -> RunRecord:
        """Return a copy that shares the samples, which do not change."""
        return copy.deepcopy(self, {id(self.plan): self.plan})

    @property
    def batch_samples(self) -> list[Sample]:
        """Samples of the batch in training."""
        return [sample for group in self.training or () for sample in group.samples]

    def take_waiting(self, task: RolloutTask) -> None:
        """Remove a waiting task; a worker gets it."""
        if self.waiting[0][1] is task:
            heapq.heappop(self.waiting)
        else:
            self.waiting = [one for one in self.waiting if one[1] is not task]
            heapq.heapify(self.waiting)

    def return_task(self, task: RolloutTask) -> None:
        """Put a task back that a worker had."""
        heapq.heappush(self.waiting, (FRONT, task))

    def apply(self, entry: Entry) -> None:
        """Change the record by an entry. Tasks under lease must not be waiting any more."""
        match entry:
            case BatchLoaded(number):
                self.loaded, self.is_held = number + 1, self.plan.holds_batches
                self._issue(self.plan.order.batch(number), BACK)
            case RowAdded(row, in_front):
                self.added_rows.append(entry)
                self._issue(self.plan.order.tasks_of(ADDED, self.added, row), FRONT if in_front else BACK)
                self.added += 1
            case SamplesAccepted(samples, keys):
                for sample, key in zip(samples, keys, strict=True):
                    self.store.put(sample, key)
                    self.open_groups[sample.task.group_id] += 1
            case TaskFailed(task, reason, cost):
                if cost is RetryCost.ATTEMPT:
                    self.attempts[task.task_id] += 1
                elif cost is RetryCost.WORKER:
                    self.losses[task.task_id] += 1
                self.counts.repeated[reason] += task.samples
                self.return_task(task)
            case TaskDropped(task, reason):
                self.counts.dropped[reason] += task.samples
                self.store.miss(task.group_id, task.samples)
            case GroupRefused(sample_ids, reason, again):
                self._refuse(sample_ids, reason, again)
            case IncompleteDropped(reason):
                self._drop(self.store.take_incomplete(), reason)
            case BatchTaken(sample_ids, lost):
                self.training, self.replaced_groups = self.store.take(sample_ids, lost), 0
                self.weights.begin_update()
                if self.weights.gate is Gate.OPEN:
                    self.is_held = False
            case NothingLearned(reason):
                self.skipped[reason] += 1
            case BatchTrained():
                self.counts.trained += len(self.batch_samples)
                self._close(self.batch_samples)
                self.training = None
                self.weights.finish_update()
            case BatchSkipped(reason):
                self.skipped[reason] += 1
                self._drop(self.batch_samples, reason)
                self.training = None
                self._open_gate(self.weights.skip_update)
            case WeightsSynced(version):
                self._open_gate(lambda: self.weights.synced(version))
            case ValidationBegan():
                self._begin_validation()
            case ValidationDelivered() | ValidationDropped():
                self._end_validation_task(entry)
            case ValidationEnded():
                self.validation = None
                self.weights.end_validation()

    def rewind(self) -> None:
        """Continue with a new incarnation of the trainer. What the lost one made since is not known here."""
        if self.training is not None:
            # It was taken for an update that the lost trainer may have done, whose weights are lost with it.
            for group in self.training:
                self._again(group, "trainer lost")
            self.training = None
        self._abandon_validation()
        self.weights.fork(self.weights.line.number)

    def _issue(self, tasks: Iterable[RolloutTask], priority: int) -> None:
        for task in tasks:
            heapq.heappush(self.waiting, (priority, task))
            self.counts.issued += task.samples

    def _refuse(self, sample_ids: tuple[str, ...], reason: str, again: bool) -> None:
        for group in self.store.take(sample_ids, 0):
            if again:
                self._again(group, reason)
            else:
                self.replaced_groups += reason == EQUAL_REWARDS
                self._drop(group.samples, reason)

    def _again(self, group: SampleGroup, reason: str) -> None:
        self._close(group.samples)
        self.counts.repeated[reason] += len(group.samples)
        for task in group.tasks:
            self.return_task(task)
        for group_id, samples in group.missing.items():
            self.store.miss(group_id, samples)

    def _drop(self, samples: Iterable[Sample], reason: str) -> None:
        dropped = list(samples)
        self.counts.dropped[reason] += len(dropped)
        self._close(dropped)

    def _close(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            group_id = sample.task.group_id
            self.open_groups[group_id] -= 1
            if not self.open_groups[group_id]:
                del self.open_groups[group_id]

    def _open_gate(self, step: Callable[[], object]) -> None:
        """Take a step of the weights; if rollouts waited for it, the next batch may be loaded."""
        was_closed = self.weights.gate is not Gate.OPEN
        step()
        if was_closed and self.weights.gate is Gate.OPEN:
            self.is_held = False

    def _begin_validation(self) -> None:
        plan = self.plan.validation
        # None where entries were written with the plan of an earlier start, which a checkpoint replaces next.
        if plan is not None:
            self.validation = ValidationRound(self.weights.rollout, plan)
            self.counts.issued += sum(task.samples for task in plan.tasks())

    def _end_validation_task(self, entry: ValidationDelivered | ValidationDropped) -> None:
        if self.validation is None:
            return
        match entry:
            case ValidationDelivered(samples):
                self.validation.delivered[samples[0].task] = samples
                self.counts.validated += len(samples)
            case ValidationDropped(task, reason):
                self.validation.dropped[task] = reason
                self.counts.dropped[reason] += task.samples

    def _abandon_validation(self) -> None:
        """Forget the open tasks of a validation, which begins again if its version is still pinned."""
        if self.validation is not None:
            self.counts.issued -= sum(task.samples for task in self.validation.open_tasks)
            self.validation = None


def _validate_every(plan: RunPlan) -> int | None:
    return None if plan.validation is None else plan.validation.every
