"""Coordinator of a run: an actor that asks the pure state what to do, and lets callers wait for it.

It has data, leases, pool and versions of the run in one `RunState`. Nothing polls: each call that changes the state
wakes those that wait. With a directory, it writes each decision to a journal before a caller sees it, and a coordinator
that is restarted continues from there; all of its methods may be repeated.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio
from attrs import evolve

from fray.errors import InvalidRequest
from fray.rl.checkpoint import load_record, write_state
from fray.rl.checkpoint_store import JournalCopy, Location, directory_to_read, directory_to_write
from fray.rl.core.run_record import RunPlan, RunRecord
from fray.rl.core.run_state import NoTask, PutAnswer, RunState
from fray.rl.core.trajectory_store import Sample
from fray.rl.core.validation import VALIDATION
from fray.rl.core.versions import VersionName
from fray.rl.journal_file import KeptRequests, RunJournal
from fray.rl.messages import (
    COLLECTED,
    FailureReport,
    RunStanding,
    RunStatus,
    ServerRoute,
    TaskGrant,
    TaskResult,
    TrainingBatch,
    ValidationResult,
)
from fray.rl.nexrl.experiment_posts import NO_POSTS, FetchedPosts, PostQueue
from fray.rl.process_start import loading
from fray.rl.processes.actor_tasks import ActorTasks
from fray.rl.records.run_files import STATUS_PERIOD_S, write_work

T = TypeVar("T")
EXPIRY_PERIOD_S = 1.0
"""Seconds between two searches for expired leases."""


class Coordinator:
    """Actor with the state of a run.

    Args:
        plan: settings that decide about samples.
        rows: the data.
        directory: for the journal, of this run alone, readable by a restarted coordinator; None: it cannot be
            restarted.
        validation_rows: the data that is validated with.
        copy: where the journal is copied to when a checkpoint is written. Default: nowhere.
        start: as of `RunJournal`.

    Raises:
        InvalidRequest: the journal that was copied was lost with its machine, or is that of a later start of the run.
    """

    def __init__(
        self,
        plan: RunPlan,
        rows: Sequence[dict[str, Any]],
        directory: Path | None = None,
        validation_rows: Sequence[dict[str, Any]] = (),
        copy: JournalCopy | None = None,
        start: str = "",
    ) -> None:
        self._copy, self._copied = copy, 0
        """Copies of the journal, and the last update of which they have the file."""
        if copy is not None and directory is not None:
            copy.claim(directory)
        self._plan, self._rows, self._validation_rows = plan, rows, validation_rows
        self._journal = None if directory is None else RunJournal(directory, start)
        with loading():
            self._state = RunState.new(plan) if self._journal is None else self._journal.recover(plan)
        self._changed = trio.Event()
        self._routes: list[ServerRoute] = []
        # Not from 0: a process that knows the table of a lost coordinator must not take the next one's for the same.
        self._routes_number = secrets.randbits(32)
        self._last_failure = ""
        self._requests = KeptRequests() if self._journal is None else self._journal.kept_requests()
        self._left_out: Counter[str] = Counter()
        self._posts = PostQueue()
        self._sent_posts = (secrets.randbits(32), NO_POSTS)
        """Posts that were sent to the controller, until it asks for more, and their number."""
        self._slowest: dict[str, tuple[str, str]] = {}
        """Lease of the oldest episode of each worker, and what that does."""
        self._lost_workers: set[str] = set()
        self._granted: dict[str, tuple[int, list[TaskGrant]]] = {}
        """Number of the last request for tasks of each worker, and its answer."""
        self._servers_missing = ""
        """Text about servers without which no task is given out."""
        # A validation that begins with the run: before a snapshot can have it.
        self._write()
        self._tasks = ActorTasks()
        # With a URL, who looks at the run cannot read what is written on this machine.
        if directory is not None and copy is None:
            self._tasks.start(partial(self._write_work, directory))

    async def __fray_cleanup__(self) -> None:
        await self._tasks.aclose()

    async def _write_work(self, directory: Path) -> None:
        """Write what the run does, for those who look while its controller is away."""
        assert self._journal is not None
        while True:
            with self._journal.own():
                write_work(directory, await self.status())
            await trio.sleep(STATUS_PERIOD_S)

    async def expire_leases(self) -> None:
        """Give back tasks whose leases have expired, until cancelled."""
        while True:
            await trio.sleep(EXPIRY_PERIOD_S)
            failed = self._state.failures.total
            self._state.expire(trio.current_time())
            if self._state.failures.total != failed:
                self._last_failure = f"timeout: no result within the {self._plan.lease_s:g} s of a lease"
            if self._state.entries:
                self._wake()

    # Rollout processes

    async def take_tasks(self, worker: str, limit: int, request: int = 0) -> list[TaskGrant]:
        """Lease up to ``limit`` tasks to a worker; wait until there is one. Empty for a worker that was lost.

        At the end of the run it waits, too: until the controller has left, the loss of the trainer may take the run
        back to a checkpoint, after which there are tasks.

        Args:
            worker: incarnation of a rollout process.
            limit: most tasks.
            request: number of this request, from 1 on, for a worker that repeats those whose answer was lost, and makes
                one after another. Default 0: it is not repeated.
        """

        def take() -> list[TaskGrant] | None:
            # It may live behind a cut and reach this process: its end is not noted a second time, so nothing would give
            # back what it takes now.
            if worker in self._lost_workers:
                return []
            last, granted = self._granted.get(worker, (0, []))
            if request and request < last:
                return []  # it was sent before one that has an answer, so nothing waits for this one
            # Else nothing would give back, before the end of their leases, the tasks of an answer that was lost.
            if request == last and (still := [one for one in granted if self._state.has_lease(one.lease)]):
                return still
            grants = [] if self._servers_missing else self._lease_tasks(worker, limit)
            if grants and request:
                self._granted[worker] = request, grants
            return grants or None

        return await self._when(take)

    def _lease_tasks(self, worker: str, limit: int) -> list[TaskGrant]:
        grants: list[TaskGrant] = []
        while len(grants) < limit:
            lease = self._state.take_task(worker, trio.current_time())
            if isinstance(lease, NoTask):
                break
            task, attempt = lease.task, self._state.attempts_of(lease.task)
            is_validation = task.epoch == VALIDATION
            row = self._validation_rows[task.row] if is_validation else self._row(task.row)
            ids = lease.number, task.task_id, task.group_id
            version = self._state.record.weights.rollout.number
            grants.append(TaskGrant(*ids, attempt, row, task.samples, is_validation, version))
        return grants

    def _row(self, index: int) -> dict[str, Any]:
        added: Any = self._state.record.added_rows
        return self._rows[index] if index < len(self._rows) else added[index - len(self._rows)].content

    async def add_rows(self, key: str, rows: Sequence[dict[str, Any]], in_front: bool) -> None:
        """Add rows to those that are to be rolled out.

        Args:
            key: name of this request, which may be repeated.
            rows: the rows.
            in_front: of the tasks that wait; else behind them.

        Raises:
            InvalidRequest: no further update will be done.
        """
        if self._state.is_done:
            raise InvalidRequest("no row can be added: no further update will be done")
        for number, row in enumerate(rows):
            self._add_row(f"{key}/{number}", row, in_front)
        self._wake()

    def _add_row(self, key: str, row: dict[str, Any], in_front: bool) -> None:
        index = len(self._rows) + self._state.record.added
        self._state.add_row(index, in_front=in_front, key=key, content=row)

    async def put_results(self, results: Sequence[TaskResult]) -> list[str]:
        """Accept what tasks brought; return ``success``, ``fail`` or ``re-rollout`` for each (see `PutAnswer`)."""
        answers = [self._put(result) for result in results]
        for result in results:
            self._posts.add(result.posts)
            self._left_out.update(result.left_out)
        self._wake()
        return answers

    async def note_slowest(self, worker: str, lease: str, does: str) -> None:
        """Note what the oldest episode of a worker does, for the status."""
        self._slowest[worker] = (lease, does)

    async def begin_worker(self, worker: str) -> None:
        """Note that an incarnation of a rollout process begins; what earlier ones had is given back."""
        self._state.begin_worker(worker)
        self._wake()

    async def lose_worker(self, worker: str) -> None:
        """Give back the tasks of a worker that was lost; it gets no further ones, should it live."""
        self._lost_workers.add(worker)
        self._slowest.pop(worker, None)
        self._granted.pop(worker, None)
        self._state.lose_worker(worker)
        self._wake()

    async def wait_for_routes(self, known: int) -> tuple[int, list[ServerRoute]]:
        """Return number and entries of the table of servers, when its number is not ``known``."""
        return await self._when(lambda: (self._routes_number, self._routes) if self._routes_number != known else None)

    # Trainer

    async def next_batch(self, line: int) -> TrainingBatch | None:
        """Return the batch of the next update; wait until its samples are there. None if there will be none.

        Args:
            line: incarnation of the trainer, as in the names of its versions.

        Raises:
            InvalidRequest: another trainer has taken over.
        """

        def take() -> tuple[TrainingBatch | None] | None:
            self._check_line(line)
            if self._requests.is_stopping and self._state.record.training is None:
                return (None,)
            # A batch whose answer was lost is given again.
            groups = self._state.record.training or self._state.next_batch()
            if groups is None:
                return (None,) if self._state.is_done else None
            # In the order of the tasks, and not as they came: an update is the same when it is repeated.
            ordered = sorted(groups, key=lambda group: min(sample.task for sample in group.samples))
            contents = tuple(
                tuple(sample.content for sample in sorted(group.samples, key=lambda one: (one.task, one.run)))
                for group in ordered
            )
            return (TrainingBatch(self._state.record.weights.line.number + 1, contents),)

        (batch,) = await self._when(take)
        self._wake()
        return batch

    async def stop(self) -> None:
        """Give the trainer no further batch; the one that it has is trained."""
        self._keep(evolve(self._requests, is_stopping=True))
        self._wake()

    def _keep(self, requests: KeptRequests) -> None:
        self._requests = requests
        if self._journal is not None:
            self._journal.keep_requests(requests)

    async def finish_update(
        self, line: int, number: int, without_effect: str = ""
    ) -> tuple[VersionName, bool, VersionName]:
        """Note that an update was done.

        Args:
            line: incarnation of the trainer.
            number: of the update.
            without_effect: reason why the weights are as before; empty: they are new.

        Returns:
            the version that it made, whether servers shall receive it, now or when a validation ends, and the version
            that they shall have now.

        Raises:
            InvalidRequest: another trainer has taken over.
        """
        self._check_line(line)
        weights = self._state.record.weights
        if weights.line.number < number:
            self._state.finish_update(without_effect)
            self._wake()
        return weights.line.current, weights.is_due, weights.target

    async def skip_update(self, line: int, number: int, reason: str) -> None:
        """Note that the batch of an update was not trained. Raises InvalidRequest as `finish_update`."""
        self._check_line(line)
        if self._state.record.training is not None and self._state.record.weights.line.number + 1 == number:
            self._state.skip_update(reason)
            self._wake()

    async def save_record(self, directory: Location, facts: dict[str, Any]) -> None:
        """Write the state as it is now into a directory that becomes a checkpoint."""
        # What a request for tasks has loaded that still waits: the entry would be read again after the record has it.
        self._write()
        record = self._state.snapshot()
        if self._journal is not None:
            self._journal.begin(record)
        await trio.to_thread.run_sync(self._save, directory, record, facts)

    def _save(self, location: Location, record: RunRecord, facts: dict[str, Any]) -> None:
        with directory_to_write(location) as directory:
            write_state(directory, record, facts)
        if self._copy is not None and self._journal is not None:
            number = record.weights.line.number
            self._copy.upload(self._journal.files(self._copied + 1, number))
            self._copied = number

    async def rewind(self, checkpoint: Location | None, after: int) -> VersionName:
        """Go back to a checkpoint, whose weights are to be sent to all servers; return the name of that version.

        Args:
            checkpoint: None for the beginning of the run.
            after: the incarnation of the trainer that was lost; if another has taken over already, nothing changes.
        """
        record = RunRecord.new(self._plan)
        if checkpoint is not None:
            record = await trio.to_thread.run_sync(_read_record, checkpoint)
        line = self._state.record.weights.line
        if line.current.incarnation == after:
            record.continue_with(self._plan)
            # The incarnations of trainers that were lost since then are not to be used again.
            record.weights.line.forks += [record.weights.line.number] * (after + 1 - len(record.weights.line.forks))
            added = self._state.record.added_rows[record.added :]
            # From the journal: one that is counted here would be that of the next coordinator, too.
            incarnation = self._state.incarnation + 1 if self._journal is None else self._journal.next_incarnation()
            self._state = RunState.rewind(record, incarnation)
            if self._journal is not None:
                self._journal.rewind(self._state.record)
            for one in added:  # since the checkpoint
                self._add_row(one.key, one.content, one.in_front)
            self._copied = record.weights.line.number
            self._wake()
        return self._state.record.weights.line.current

    # Servers

    async def finish_sync(self, version: VersionName) -> bool:
        """Note that servers have a version. False if it is not the one to be sent any more."""
        is_current = self._state.sync(version)
        self._wake()
        return is_current

    async def wait_for_target(self, known: VersionName | None) -> VersionName:
        """Return the version that servers shall have, when it is not ``known``."""

        def find() -> VersionName | None:
            target = self._state.record.weights.target
            return target if target != known else None

        return await self._when(find)

    async def set_routes(self, routes: Sequence[ServerRoute], missing: str = "") -> None:
        """Replace the table of the servers that answer requests.

        Args:
            missing: text about the servers that are missing, if no task shall be given out without them.
        """
        self._servers_missing = missing
        self._routes, self._routes_number = list(routes), self._routes_number + 1
        self._wake()

    # Validation

    async def next_validation(self) -> ValidationResult:
        """Return the scores of the validation that is complete; wait for it.

        It is returned again until `end_validation`.
        """

        def find() -> ValidationResult | None:
            round_ = self._state.complete_validation
            return None if round_ is None else ValidationResult(round_.version, round_.metrics())

        return await self._when(find)

    async def wait_for_last_validation(self) -> None:
        """Return when no further version is validated: the last one was, or the run is asked to stop."""
        if self._plan.validation is not None:
            await self._when(lambda: True if self._requests.is_stopping or self._state.is_finished else None)

    async def end_validation(self, version: VersionName) -> None:
        """Let the servers take versions after the one that was validated."""
        self._state.end_validation(version)
        self._wake()

    # What it is

    async def wait_for_posts(self, handled: int) -> tuple[int, FetchedPosts]:
        """Return what workers have posted to the trackers of the run, and its number; wait until there is any.

        What was returned is returned again until it is known to be handled: its reader may have been lost.

        Args:
            handled: number of the posts that the caller has handled; 0: none.
        """
        return await self._when(lambda: self._unhandled_posts(handled))

    async def fetch_posts(self, handled: int) -> tuple[int, FetchedPosts]:
        """Return what there is of them now; arguments as of `wait_for_posts`."""
        return self._unhandled_posts(handled) or (handled, NO_POSTS)

    def _unhandled_posts(self, handled: int) -> tuple[int, FetchedPosts] | None:
        number, sent = self._sent_posts
        if handled == number:
            sent = NO_POSTS
        if sent == NO_POSTS and self._posts:
            number, sent = number + 1, self._posts.fetch()
        self._sent_posts = number, sent
        return None if sent == NO_POSTS else self._sent_posts

    async def wait_for_failures(self, known: int) -> FailureReport:
        """Return the episodes that failed, when there are others than ``known``."""
        return await self._when(lambda: self._failure_report() if self._state.failures.total != known else None)

    async def wait_for_stop(self) -> FailureReport:
        """Return the episodes that failed, when the run must end because of them."""
        return await self._when(lambda: self._failure_report() if self._state.failures.stop_reason else None)

    def _failure_report(self) -> FailureReport:
        failures = self._state.failures
        return FailureReport(failures.total, dict(failures.reasons), self._last_failure, failures.stop_reason)

    async def standing(self) -> RunStanding:
        """Return what a controller needs to know to take over the run."""
        weights = self._state.record.weights
        return RunStanding(weights.line.current, weights.target, self._requests.servers, self._requests.is_stopping)

    async def want_servers(self, number: int) -> None:
        """Note how many servers the run shall have, for the next controller."""
        self._keep(evolve(self._requests, servers=number))

    async def ping(self) -> None:
        """Return: the process answers. For health checks."""

    async def status(self) -> RunStatus:
        """Return what the run does and waits for."""
        state, counts = self._state, self._state.record.counts
        missing = "" if state.is_finished else self._servers_missing
        return RunStatus(
            missing or state.wait_reason(trio.current_time(), dict(self._slowest.values())),
            state.record.weights.line.current,
            state.record.weights.rollout,
            counts.issued,
            counts.trained,
            counts.validated,
            state.open_samples,
            {reason: count for reason, count in counts.dropped.items() if count},
            {reason: count for reason, count in counts.repeated.items() if count},
            self._last_failure,
            dict(self._left_out),
            {reason: count for reason, count in state.record.skipped.items() if count and reason != COLLECTED},
        )

    # Decisions are the state's; here is what they need

    def _put(self, result: TaskResult) -> str:
        if not result.is_attempt:
            self._state.roll_out_again(result.lease, result.failure)
            return "re-rollout"
        if result.failure:
            self._last_failure = f"{result.failure}: {result.detail}" if result.detail else result.failure
            self._note_failure(result)
            self._state.fail(result.lease, result.failure, is_final=result.is_final)
            return "fail"
        lease = self._state.lease(result.lease)
        if lease is None:
            return "fail"
        samples = [
            Sample(lease.task, run, sample.segments, sample.rewards, sample.content, sample.score)
            for run, sample in enumerate(result.samples)
        ]
        answer = self._state.put(result.lease, samples, [sample.key for sample in result.samples])
        if answer is PutAnswer.SUCCESS and not self._state.is_done:
            for number, (row, in_front) in enumerate(result.added):
                self._add_row(f"{result.lease}/{number}", row, in_front)
        return answer.value

    def _note_failure(self, result: TaskResult) -> None:
        lease = self._state.lease(result.lease)
        if self._journal is not None and lease is not None:
            number = self._state.record.weights.line.number + 1
            self._journal.note_failure(number, lease.task.task_id, result.failure, result.detail)

    def _check_line(self, line: int) -> None:
        current = self._state.record.weights.line.current.incarnation
        if line != current:
            raise InvalidRequest(f"trainer {line} has been replaced by trainer {current}")

    async def _when(self, find: Callable[[], T | None]) -> T:
        """Return what ``find`` returns, as soon as that is not None."""
        while (found := find()) is None:
            await self._changed.wait()
        self._write()
        return found

    def _wake(self) -> None:
        """Write what was decided, and wake those that wait."""
        self._write()
        self._changed.set()
        self._changed = trio.Event()

    def _write(self) -> None:
        entries, self._state.entries = self._state.entries, []
        if not entries:
            return
        self._state.record.counts.check(self._state.open_samples)
        if self._journal is not None:
            self._journal.append(entries, self._state.record.weights.line.number)


def _read_record(location: Location) -> RunRecord:
    with directory_to_read(location) as directory:
        return load_record(directory)
