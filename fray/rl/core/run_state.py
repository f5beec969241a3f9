"""State of a run: decides what workers, trainer and servers get, and records each decision as entries of a journal.

The caller writes `RunState.entries` to storage before it answers a worker or the trainer; `RunState.recover` rebuilds
the state from a snapshot and the entries written since. Leases are not among them: what was rolled out when the state
was lost is rolled out again, and the results of the old leases are refused.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum

from attrs import define, field, frozen

from fray.rl.core.failures import EpisodeFailures
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
from fray.rl.core.leases import Lease, LeaseTable
from fray.rl.core.run_record import EQUAL_REWARDS, RunPlan, RunRecord, StalePolicy
from fray.rl.core.tasks import RolloutTask
from fray.rl.core.trajectory_store import Sample, SampleGroup
from fray.rl.core.validation import VALIDATION, ValidationRound, foreign_versions
from fray.rl.core.versions import Gate, Segment, VersionName

INCOMPLETE_BATCHES = 16
"""Batches of samples in incomplete groups that are kept, where groups are made by keys of the trajectories."""


class PutAnswer(Enum):
    """Answer to a worker that delivers a task."""

    SUCCESS = "success"
    FAIL = "fail"
    """The lease is not open: the task is rolled out by another worker, or was already."""
    RE_ROLLOUT = "re-rollout"
    """Made by weights that are too old; the task is given out again."""


@frozen
class NoTask:
    """Reason why a worker gets no task."""

    reason: str


@define
class RunState:
    """Samples, weights and leases of a run.

    Args:
        record: what the journal tells of the run.
        incarnation: of this state, higher than that of any before: leases of those are refused.
    """

    record: RunRecord
    incarnation: int = 0
    entries: list[Entry] = field(init=False, factory=list)
    """Entries since the caller last took them."""
    failures: EpisodeFailures = field(init=False)
    _leases: LeaseTable = field(init=False)
    _validation_leases: LeaseTable = field(init=False)
    _validation_waiting: list[RolloutTask] = field(init=False, factory=list)
    _validation_attempts: Counter[RolloutTask] = field(init=False, factory=Counter)
    _validation_losses: Counter[RolloutTask] = field(init=False, factory=Counter)

    def __attrs_post_init__(self) -> None:
        self.failures = self.record.plan.new_failures()
        self._leases = LeaseTable(f"{self.incarnation}", self.record.plan.lease_s)
        self._validation_leases = LeaseTable(f"{self.incarnation}v", self.record.plan.lease_s)
        if (round_ := self.record.validation) is not None:
            self._validation_waiting = round_.open_tasks
        self._begin_validation()

    @classmethod
    def new(cls, plan: RunPlan) -> RunState:
        """Return the state of a run that has not begun."""
        return cls(RunRecord.new(plan))

    @classmethod
    def recover(cls, snapshot: RunRecord, entries: Iterable[Entry], incarnation: int) -> RunState:
        """Rebuild a state whose process was lost, while the trainer was not.

        Args:
            snapshot: of the last checkpoint.
            entries: those written since, in their order.
            incarnation: higher than that of the lost state.
        """
        record = snapshot.copy()
        for entry in entries:
            _remove_from_waiting(record, entry)
            record.apply(entry)
        return cls(record, incarnation)

    @classmethod
    def rewind(cls, snapshot: RunRecord, incarnation: int) -> RunState:
        """Return the state of a checkpoint whose trainer continues in a new incarnation. The weights are sent again."""
        record = snapshot.copy()
        record.rewind()
        return cls(record, incarnation)

    def snapshot(self) -> RunRecord:
        """Return the record as it is now, for a checkpoint. Tasks under lease are the first to be rolled out again."""
        record = self.record.copy()
        for lease in self.leases:
            record.return_task(lease.task)
        return record

    # Rollout workers

    def take_task(self, worker: str, now: float) -> Lease | NoTask:
        """Lease the next task to a worker, those of a validation first."""
        if self._validation_waiting:
            return self._validation_leases.make(heapq.heappop(self._validation_waiting), worker, now)
        record = self.record
        weights = record.weights
        if self.is_done:
            return NoTask("no further update will be done")
        if weights.gate is not Gate.OPEN:
            return NoTask("the trainer trains" if weights.gate is Gate.TRAINING else "the servers receive weights")
        if self._treatment([(weights.rollout, 0)]) is not StalePolicy.KEEP:
            return NoTask(f"the servers have version {weights.rollout}, too old beside {weights.line.current}")
        if not record.waiting and not self._load_batch():
            return self._no_task()
        task = self._admitted_task()
        if task is None:
            return NoTask(f"{record.plan.most_untrained} samples are rolled out or not trained yet")
        record.take_waiting(task)
        return self._leases.make(task, worker, now)

    def put(self, number: str, samples: Sequence[Sample], keys: Sequence[tuple[Hashable, ...]]) -> PutAnswer:
        """Accept the samples of a task: of a validation for its scores, others for training.

        Args:
            number: of the lease, which decides whether the task is of a validation.
            samples: as many as the task has.
            keys: of the groups of the samples.

        Raises:
            ValueError: another number of samples than the task has, or of keys than samples.
        """
        lease = self.lease(number)
        if lease is None:
            return PutAnswer.FAIL
        if len(samples) != lease.task.samples or len(keys) != len(samples):
            raise ValueError(f"{len(samples)} samples and {len(keys)} keys for a task of {lease.task.samples} samples")
        if self._validation_leases.get(number) is not None:
            return self._put_validated(lease, samples)
        self._leases.close(number)
        self.failures.accepted()
        treatment = self._treatment([segment for sample in samples for segment in sample.segments])
        if treatment is StalePolicy.REQUEUE or self.record.weights.gate is not Gate.OPEN:
            self._add(TaskFailed(lease.task, "stale", RetryCost.NOTHING))
            return PutAnswer.RE_ROLLOUT
        if treatment is StalePolicy.DROP:
            self._add(TaskDropped(lease.task, "stale"))
            return PutAnswer.SUCCESS
        self._add(SamplesAccepted(tuple(samples), tuple(keys)))
        if self.record.plan.drop_equal_rewards:
            self._replace_equal_rewards()
        return PutAnswer.SUCCESS

    def fail(self, number: str, reason: str, *, is_final: bool = False) -> None:
        """Give a task back whose attempt has failed; it is dropped after its last one, or if the failure is final.

        Ignored if the lease is not open.
        """
        if (lease := self._validation_leases.get(number)) is not None:
            self._validation_attempts[lease.task] += 1
            attempt = self._validation_attempts[lease.task]
            is_last = is_final or attempt >= self.record.plan.max_attempts
            # Of no samples: training may progress all the same.
            self.failures.failed(lease.task.task_id, 0, reason, attempt, is_last=is_last and not is_final)
            self._give_back_validation(lease, reason if is_last else None)
        elif (lease := self._leases.get(number)) is not None:
            attempt = self.record.attempts[lease.task.task_id] + 1
            is_last = is_final or attempt >= self.record.plan.max_attempts
            # A final failure is one of the data, and not of an episode that is out of attempts.
            is_out = is_last and not is_final
            self.failures.failed(lease.task.task_id, lease.task.samples, reason, attempt, is_last=is_out)
            self._give_back(lease, reason, RetryCost.ATTEMPT, is_last)

    def roll_out_again(self, number: str, reason: str) -> None:
        """Give a task back whose worker asks for another rollout of it, which costs it nothing.

        Ignored if the lease is not open.
        """
        if (lease := self._validation_leases.get(number)) is not None:
            self._validation_leases.close(number)
            heapq.heappush(self._validation_waiting, lease.task)
        elif (lease := self._leases.get(number)) is not None:
            self._give_back(lease, reason, RetryCost.NOTHING, is_last=False)

    def lose_worker(self, worker: str) -> None:
        """Give back what a worker had whose process or machine was lost."""
        for lease in self._validation_leases.of_worker(worker):
            self._validation_losses[lease.task] += 1
            is_last = self._validation_losses[lease.task] >= self.record.plan.max_losses
            self._give_back_validation(lease, "worker_lost" if is_last else None)
        for lease in self._leases.of_worker(worker):
            # An episode that ends its process each time would otherwise be rolled out for ever.
            is_last = self.record.losses[lease.task.task_id] + 1 >= self.record.plan.max_losses
            self._give_back(lease, "worker_lost", RetryCost.WORKER, is_last)

    def begin_worker(self, worker: str) -> None:
        """Give back what earlier incarnations of a worker had: their loss was perhaps not noticed.

        Args:
            worker: an incarnation: name of the actor, and numbers behind two colons.
        """
        actor = worker.rsplit(":", 2)[0]
        known = {lease.worker for table in (self._validation_leases, self._leases) for lease in table.all}
        for other in sorted(known):
            if other != worker and other.rsplit(":", 2)[0] == actor:
                self.lose_worker(other)

    def expire(self, now: float) -> None:
        """Give back the tasks whose leases have expired; it counts as an attempt."""
        for table in (self._validation_leases, self._leases):
            for lease in table.expired(now):
                self.fail(lease.number, "timeout")

    def add_row(self, row: int, *, in_front: bool = False, key: str = "", content: object = None) -> None:
        """Add a row to what is to be rolled out, in front of what is waiting or behind it.

        Args:
            row: index: that of its place behind the data.
            in_front: of what is waiting; rows that are added so keep their order.
            key: name of the request; one that is known changes nothing.
            content: the row.
        """
        if not key or all(one.key != key for one in self.record.added_rows):
            self._add(RowAdded(row, in_front, key, content))

    # Trainer

    def next_batch(self) -> list[SampleGroup] | None:
        """Begin an update; return its groups. None if there is no batch, an update is under way, or the run is done."""
        record = self.record
        while not (record.training is not None or self.is_done or record.weights.gate is not Gate.OPEN):
            self._refuse_stale()
            is_last = not self._may_get_more()
            if not record.store.is_ready(batch_finished=self._is_batch_finished, is_last=is_last):
                if not is_last or not self._drop_incomplete():
                    return None
                continue
            groups, lost = record.store.choose()
            self._add(BatchTaken(tuple(sample_id for group in groups for sample_id in group.sample_ids), lost))
            if groups:
                return record.training
            # All of its samples were dropped: there is nothing to train.
            self.skip_update("all_samples_dropped")
        return None

    def finish_update(self, without_effect: str = "") -> VersionName:
        """Note that the update was done; return the version that it made.

        Args:
            without_effect: reason why its weights are those of the version before it; empty: they are new.
        """
        if without_effect:
            self._add(NothingLearned(without_effect))
        self._add(BatchTrained())
        return self.record.weights.line.current

    def skip_update(self, reason: str) -> None:
        """Drop the batch: no update was done with it."""
        self._add(BatchSkipped(reason))

    def sync(self, version: VersionName) -> bool:
        """Note that the servers have a version. Return False if it is not the one to be sent, and nothing changed."""
        if version != self.record.weights.to_send:
            return False
        self._add(WeightsSynced(version))
        self._begin_validation()
        return True

    @property
    def is_done(self) -> bool:
        """True if no further update will be done."""
        plan, record = self.record.plan, self.record
        if plan.steps is not None and record.weights.line.number >= plan.steps:
            return True
        return record.training is None and record.store.complete_slots == 0 and self._is_exhausted

    @property
    def is_finished(self) -> bool:
        """True if no further update will be done, and nothing is to be validated."""
        return self.is_done and self.record.weights.pinned is None

    # Validation

    @property
    def complete_validation(self) -> ValidationRound | None:
        """The validation all tasks of which have a result or were dropped, until it is ended."""
        round_ = self.record.validation
        return round_ if round_ is not None and round_.is_complete else None

    def end_validation(self, version: VersionName) -> None:
        """Let the servers take newer versions. Ignored if no validation of this version is complete."""
        round_ = self.complete_validation
        if round_ is not None and round_.version == version:
            self._add(ValidationEnded())
            self._begin_validation()

    # What it is

    @property
    def leases(self) -> list[Lease]:
        """The open leases of training tasks."""
        return self._leases.all

    def lease(self, number: str) -> Lease | None:
        """Return an open lease; None if it is not open."""
        return self._leases.get(number) or self._validation_leases.get(number)

    def has_lease(self, number: str) -> bool:
        """Return whether a lease is open."""
        return self.lease(number) is not None

    def attempts_of(self, task: RolloutTask) -> int:
        """Return the number of attempts of a task that failed."""
        return self._validation_attempts[task] if task.epoch == VALIDATION else self.record.attempts[task.task_id]

    @property
    def open_samples(self) -> int:
        """Number of samples that are waiting, rolled out, in the pool or in training, found by counting."""
        record = self.record
        waiting = sum(task.samples for task in [*(task for _, task in record.waiting), *self._validation_waiting])
        leased = self._leases.samples + self._validation_leases.samples
        return waiting + leased + record.store.sample_count + len(record.batch_samples)

    def wait_reason(self, now: float | None = None, doing: Mapping[str, str] | None = None) -> str:
        """Return what the trainer waits for, in one line; with the time ``now``, how long the slowest task takes.

        Args:
            doing: what episodes do, by the numbers of their leases.
        """
        record = self.record
        if self.is_finished:
            return "the run is done"
        if self.is_done:
            return self._validation_reason()
        if record.training is not None:
            return f"update {record.weights.line.number + 1} is done with {len(record.batch_samples)} samples"
        if record.weights.gate is Gate.SYNCING:
            waits_for = "the servers" if record.validation is None else self._validation_reason()
            return f"version {record.weights.line.current} waits for {waits_for}"
        have, want = (
            record.store.complete_slots // record.plan.group_size,
            record.plan.batch_size // record.plan.group_size,
        )
        text = f"the trainer waits: {have} of {want} groups"
        if record.plan.keyed_group_size is not None and (growing := record.store.growing_samples):
            text += f", and {growing} samples of incomplete ones"
        if oldest := min(self.leases, key=lambda lease: lease.expires_at, default=None):
            age = "" if now is None else f", {now - oldest.expires_at + record.plan.lease_s:.0f} s,"
            does = (doing or {}).get(oldest.number)
            text += f"; slowest: task {oldest.task.task_id}{age}{f' {does},' if does else ''} of {oldest.worker}"
        return text

    # Decisions

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.record.apply(entry)

    def _give_back(self, lease: Lease, reason: str, cost: RetryCost, is_last: bool) -> None:
        self._leases.close(lease.number)
        self._add(TaskDropped(lease.task, reason) if is_last else TaskFailed(lease.task, reason, cost))

    def _load_batch(self) -> bool:
        record = self.record
        if record.is_held or not record.plan.order.has_batch(record.loaded):
            return False
        plan = record.plan
        if plan.keyed_group_size is not None and record.store.growing_samples > INCOMPLETE_BATCHES * plan.batch_size:
            # Keys that few trajectories have would fill the memory.
            self._add(IncompleteDropped("group_incomplete"))
        self._add(BatchLoaded(record.loaded))
        return True

    def _no_task(self) -> NoTask:
        if self.record.is_held:
            return NoTask("the next batch waits for the next weights")
        return NoTask("all data is rolled out")

    def _admitted_task(self) -> RolloutTask | None:
        """Return the first waiting task that may be rolled out now."""
        record = self.record
        if record.plan.holds_batches:
            return record.waiting[0][1]
        if record.plan.keyed_group_size is not None:
            # Samples of groups that are not complete take no room: which tasks complete them is not known.
            untrained = record.store.complete_slots + len(record.batch_samples) + self._leases.samples
            task = record.waiting[0][1]
            return task if untrained + task.samples <= record.plan.most_untrained else None
        leased, accepted = self._leases.groups, record.open_groups
        begun = len(accepted) + sum(group not in accepted for group in leased)
        if (begun + 1) * record.plan.group_size <= record.plan.most_untrained:
            return record.waiting[0][1]
        # A group that has begun is finished, whatever is in front of it: else halves of groups keep each other's rest
        # out.
        open_ = [one for one in record.waiting if one[1].group_id in accepted or one[1].group_id in leased]
        return min(open_)[1] if open_ else None

    def _treatment(self, segments: Sequence[Segment]) -> StalePolicy:
        """Return whether samples of these versions are kept for training, rolled out again or dropped."""
        weights = self.record.weights
        if weights.is_usable(segments):
            return StalePolicy.KEEP
        # Of a lost version: whatever the policy is, it is not the task that was too slow.
        return StalePolicy.REQUEUE if weights.line.age(segments) is None else self.record.plan.stale

    def _refuse_stale(self) -> None:
        for group in self.record.store.complete:
            treatment = self._treatment(group.segments)
            if treatment is not StalePolicy.KEEP:
                self._add(GroupRefused(group.sample_ids, "stale", again=treatment is StalePolicy.REQUEUE))

    def _replace_equal_rewards(self) -> None:
        record = self.record
        for group in record.store.complete:
            if group.has_equal_rewards and record.replaced_groups < record.plan.max_replaced_groups:
                self._add(GroupRefused(group.sample_ids, EQUAL_REWARDS, again=False))

    @property
    def _is_batch_finished(self) -> bool:
        return not self.record.waiting and not len(self._leases)

    def _may_get_more(self) -> bool:
        """Return whether samples may still come before a batch is taken."""
        record = self.record
        return not self._is_batch_finished or (not record.is_held and record.plan.order.has_batch(record.loaded))

    @property
    def _is_exhausted(self) -> bool:
        record = self.record
        return (
            self._is_batch_finished and not record.plan.order.has_batch(record.loaded) and not record.store.sample_count
        )

    def _drop_incomplete(self) -> bool:
        """Drop groups that cannot become complete, or let the next batch be loaded. Return whether either was due."""
        record = self.record
        if record.store.sample_count:
            self._add(IncompleteDropped("group_incomplete"))
            return True
        if record.is_held:
            self._add(BatchTaken((), 0))
            self.skip_update("no_samples")
            return True
        return False

    def _begin_validation(self) -> None:
        """Begin the validation of the pinned version, if servers have it."""
        weights, plan = self.record.weights, self.record.plan.validation
        if plan is not None and self.record.validation is None and weights.pinned == weights.rollout:
            self._add(ValidationBegan())
            self._validation_waiting = plan.tasks()
            self._validation_attempts.clear()
            self._validation_losses.clear()

    def _put_validated(self, lease: Lease, samples: Sequence[Sample]) -> PutAnswer:
        assert self.record.validation is not None
        if foreign_versions(samples, self.record.validation.version):
            self._give_back_validation(lease)
            return PutAnswer.RE_ROLLOUT
        self._validation_leases.close(lease.number)
        self._add(ValidationDelivered(tuple(samples)))
        return PutAnswer.SUCCESS

    def _give_back_validation(self, lease: Lease, dropped: str | None = None) -> None:
        self._validation_leases.close(lease.number)
        if dropped is None:
            heapq.heappush(self._validation_waiting, lease.task)
        else:
            self._add(ValidationDropped(lease.task, dropped))

    def _validation_reason(self) -> str:
        """Return what a validation waits for."""
        weights, round_ = self.record.weights, self.record.validation
        if round_ is None:
            return f"the validation of version {weights.pinned} waits for the servers"
        return f"the validation of version {round_.version}: {round_.done} of {round_.plan.size} tasks"


def _remove_from_waiting(record: RunRecord, entry: Entry) -> None:
    """Remove the tasks of an entry from those that wait: the worker that had them took them before it was written."""
    match entry:
        case SamplesAccepted(samples, _):
            tasks = {sample.task for sample in samples}
        case TaskFailed(task, _, _) | TaskDropped(task, _):
            tasks = {task}
        case _:
            return
    record.waiting = [one for one in record.waiting if one[1] not in tasks]
    heapq.heapify(record.waiting)
