"""Tracker of the jobs this process launches and follows, with one record per job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import trio

from fray.errors import FrayError, NoSuchJob
from fray.model.ids import JobId, Namespace
from fray.model.job_groups import JobGroupSpec
from fray.model.messages.client import (
    FindJob,
    JobMeasured,
    Jobs,
    Launch,
    ProvideSecrets,
    Terminate,
    TerminateResult,
    WatchJobs,
)
from fray.model.messages.people import GetLaunchUsers
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.specs import JobInfo, JobSpec, JobState
from fray.net.codec import Bytes
from fray.runtime.controller_client.request import SendRequest
from fray.runtime.user_warning import warn_user


class JobRecord:
    """Last known state of one job; `ended` is set once, when ``info`` is final and ``value`` has arrived."""

    def __init__(self, info: JobInfo) -> None:
        self.info = info
        self.value: bytes | None = None
        self.ended = trio.Event()
        self.changed = trio.Event()
        self.end_requested = False
        """Flag: this process has requested the end of the job, which is then not an error of its scope."""
        self.accepted = True
        """Flag: the launch was answered; until then the controller may not have the job yet."""
        self.lost: FrayError | None = None
        """Error set instead of an outcome when the session itself has ended."""
        self.callbacks: list[Callable[[], object]] = []
        """Functions called once, in the loop, when the job has ended."""

    def update(self, info: JobInfo, value: bytes | None) -> None:
        # An outcome is committed once. A later state would be of a repeated notice.
        if self.ended.is_set():
            return
        self.info = info
        if info.state.finished:
            # Before `ended` is set: a waiter reads the value at once.
            self.value = value
            self._end()
        self.changed.set()
        self.changed = trio.Event()

    def update_metrics(self, metrics: Sequence[AttemptMetrics]) -> None:
        if not self.ended.is_set():
            self.info = self.info.with_metrics({entry.attempt_id: entry for entry in metrics})
            self.changed.set()
            self.changed = trio.Event()

    def lose(self, error: FrayError) -> None:
        if not self.ended.is_set():
            self.lost = error
            self._end()
            self.changed.set()

    def _end(self) -> None:
        self.ended.set()
        # Swapped first: a callback may drop itself.
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class JobTracker:
    """Records of the jobs of one session. A record is tracked as long as some code refers to it."""

    def __init__(self, send: SendRequest) -> None:
        self._send = send
        # Weak: a driver that launches a million jobs keeps only those it has handles of.
        self._records: WeakValueDictionary[JobId, JobRecord] = WeakValueDictionary()
        self.secret_of: Callable[[str], str | None] = os.environ.get
        """Lookup of secret values by name: the environment of this process."""
        self._secrets: dict[JobId, dict[str, str]] = {}
        """Secret values of the living jobs that this process has launched."""
        self.pending: dict[JobId, None] = {}
        """Jobs that were pending when they were last heard of, in the order in which they became so."""
        self.became_pending = trio.Event()
        """Event set when a job is added to ``pending``."""

    async def launch(
        self,
        specs: Sequence[JobSpec],
        payloads: Sequence[bytes],
        group: JobGroupSpec | None = None,
        on_behalf_of: str = "",
    ) -> list[JobRecord]:
        """Launch all jobs or none (of a ``group``: all its members) and return their records.

        A record belongs to another job than its spec's if the spec attaches to an existing one.

        Args:
            on_behalf_of: their user, where it is another one than that of this process; empty: it is not.
        """
        # Made before the request: a notice of a fast job may arrive before the reply is handled.
        records = [
            self._record(JobInfo(job_id=spec.job_id, name=spec.name, state=JobState.PENDING, namespace=spec.namespace))
            for spec in specs
        ]
        for record in records:
            # Until the reply, a reset repeats the request itself; watching the job as well would report it as unknown.
            record.accepted = False

        warned: list[str] = []

        def accepted(reply: Any, blobs: Sequence[Bytes]) -> None:
            warned.extend(reply.warnings)
            for record in records:
                record.accepted = True
            records[:] = self._apply_reply(reply, blobs, keep=True)

        secrets = self._own_secrets(specs)
        # Before the request, for a controller that restarts in between. Kept as long as the job lives: the controller
        # stores none.
        self._secrets.update((spec.job_id, secrets) for spec in specs if spec.secrets)
        try:
            if on_behalf_of:
                # An older controller, which would launch the jobs for the user of this process, refuses this.
                await self._send(GetLaunchUsers())
            message = Launch(jobs=tuple(specs), secrets=secrets, group=group, on_behalf_of=on_behalf_of)
            await self._send(message, payloads, on_answer=accepted)
        except FrayError:
            for spec in specs:
                self._secrets.pop(spec.job_id, None)
            raise
        for spec, record in zip(specs, records, strict=True):
            if record.info.job_id != spec.job_id:
                values = self._secrets.pop(spec.job_id, None)
                # An actor that an earlier attempt of this job has launched: from now on its secrets come from here.
                if values is not None and spec.owned_by_job:
                    self._secrets[record.info.job_id] = values
        # In the task that launches, whose callers are lines of the user's program.
        for text in warned:
            warn_user(text)
        return records

    def _own_secrets(self, specs: Sequence[JobSpec]) -> dict[str, str]:
        """Return the secrets the jobs need, as far as this process's environment has them."""
        names = {name for spec in specs for name in spec.secrets.values()}
        values = {name: self.secret_of(name) for name in sorted(names)}
        # A missing one is not an error here: the node's own environment may have it.
        return {name: value for name, value in values.items() if value is not None}

    async def _provide_secrets(self) -> None:
        """Send the secrets of living jobs again: a restarted controller does not have them."""
        if self._secrets:
            try:
                await self._send(ProvideSecrets(secrets=dict(self._secrets)))
            except FrayError:
                pass  # the session has ended (`on_end` notifies all waiters)

    async def terminate(self, message: Terminate) -> tuple[JobId, ...]:
        """Request the end of jobs, which is then not an error of their scopes in this process."""

        def mark_requested(reply: Any, blobs: Sequence[Bytes]) -> None:
            for record in self.known(reply.jobs):
                # Set in `on_answer`: the end of a job may arrive right behind this reply.
                record.end_requested = True

        reply = await self._send(message, on_answer=mark_requested)
        assert isinstance(reply[0], TerminateResult)
        return reply[0].jobs

    async def find_by_name(self, name: str, namespace: Namespace | None) -> JobRecord | None:
        """Return the record of the job that has, or had, this name."""
        found: list[JobRecord] = []

        def learnt(reply: Any, blobs: Sequence[Bytes]) -> None:
            found.extend(self._apply_reply(reply, blobs, keep=True))

        await self._send(FindJob(name=name, namespace=namespace), on_answer=learnt)
        return found[0] if found else None

    async def watch(self, job_ids: Sequence[JobId], *, read_reasons: bool = False) -> list[JobRecord]:
        """Return the records of these jobs, no matter which process launched them.

        Args:
            read_reasons: ask again for those that wait: their reasons change with the cluster, and are otherwise
                up to seconds old.

        Raises:
            NoSuchJob: the cluster does not have one of them (any more).
        """
        unknown = [job_id for job_id in job_ids if self._is_unknown(job_id, read_reasons)]
        held = [record for job_id in job_ids if (record := self._records.get(job_id)) is not None]
        if unknown:

            def known(reply: Any, blobs: Sequence[Bytes]) -> None:
                held.extend(self._apply_reply(reply, blobs, keep=True))

            # One request for all of them.
            await self._send(WatchJobs(jobs=tuple(unknown)), on_answer=known)
        by_id = {record.info.job_id: record for record in held}
        missing = [job_id for job_id in job_ids if job_id not in by_id]
        if missing:
            raise NoSuchJob(f"no such job: {missing[0]!r}", job_id=missing[0])
        return [by_id[job_id] for job_id in job_ids]

    def _is_unknown(self, job_id: JobId, read_reasons: bool) -> bool:
        record = self._records.get(job_id)
        if record is None:
            return True
        return read_reasons and record.info.state is JobState.PENDING and not record.ended.is_set()

    def get_or_add(self, job_id: JobId, name: str) -> tuple[JobRecord, bool]:
        """Return the record of a job with an id from elsewhere, and whether it is new: then `find` must fill it."""
        record = self._records.get(job_id)
        if record is not None:
            return record, False
        return self._record(JobInfo(job_id=job_id, name=name, state=JobState.PENDING)), True

    async def find(self, record: JobRecord) -> None:
        """Follow the job of this record, which is marked as lost if the cluster does not have it."""
        try:
            await self._send(WatchJobs(jobs=(record.info.job_id,)), on_answer=self._apply_reply)
        except FrayError as error:
            record.lose(error)

    def infos(self) -> list[JobInfo]:
        """Return the states of all jobs (and actors) that some code of this process refers to, in order of launch."""
        # References, whose list is made in one step: a thread of sync code may call this while the loop adds jobs.
        return [record.info for each in self._records.valuerefs() if (record := each()) is not None]

    def known(self, job_ids: Sequence[JobId]) -> list[JobRecord]:
        """Return the records this process already has of these jobs."""
        return [record for job_id in job_ids if (record := self._records.get(job_id)) is not None]

    def _record(self, info: JobInfo) -> JobRecord:
        # One record for each job, so that all its handles see the same end.
        record = self._records.get(info.job_id)
        if record is None:
            record = self._records[info.job_id] = JobRecord(info)
        return record

    def on_measured(self, message: JobMeasured) -> None:
        """Handle a notice of the controller."""
        if (record := self._records.get(message.job_id)) is not None:
            record.update_metrics(message.metrics)

    def lose_all(self, error: FrayError) -> None:
        """Mark all jobs as lost: the session has ended."""
        for record in list(self._records.values()):
            record.lose(error)

    def on_job_changed(self, info: JobInfo, value: Bytes | None) -> None:
        """Handle the state of a job in a notice or reply of the controller."""
        if info.state.finished:
            self._secrets.pop(info.job_id, None)
        record = self._records.get(info.job_id)
        if record is None:
            self.pending.pop(info.job_id, None)
            return
        record.update(info, None if value is None else bytes(value))
        if record.info.state is JobState.PENDING:
            self.pending[info.job_id] = None
            self.became_pending.set()
        else:
            self.pending.pop(info.job_id, None)

    def pending_infos(self) -> list[JobInfo]:
        """Return the states of the pending jobs that some code of this process refers to."""
        found = [(job_id, self._records.get(job_id)) for job_id in self.pending]
        for job_id, record in found:
            # Dropped, or lost with the session: nothing removes these otherwise.
            if record is None or record.ended.is_set():
                del self.pending[job_id]
        return [record.info for _, record in found if record is not None and not record.ended.is_set()]

    def _apply_reply(self, reply: Any, blobs: Sequence[Bytes], keep: bool = False) -> list[JobRecord]:
        """Update the records from a reply, whose attachments are in the order of the jobs that have a value."""
        assert isinstance(reply, Jobs)
        values = iter(blobs)
        records = []
        for info in reply.jobs:
            # An iterator, since only jobs with a value have an attachment.
            value = next(values, None) if info.value is not None else None
            if keep:
                records.append(self._record(info))
            self.on_job_changed(info, value)
        return records

    async def resubscribe(self) -> None:
        """Send secrets and subscriptions again: the controller has dropped the session, or was restarted."""
        # First: attempts that need a secret wait for it, at most 60 s.
        await self._provide_secrets()
        waiting = [job_id for job_id, record in self._records.items() if record.accepted and not record.ended.is_set()]
        # One by one: with a request for all, a single forgotten job would fail them all.
        for job_id in waiting:
            try:
                await self._send(WatchJobs(jobs=(job_id,)), on_answer=self._apply_reply)
            except NoSuchJob as error:
                if (record := self._records.get(job_id)) is not None:
                    # It ended so long ago that the controller has forgotten it.
                    record.lose(error)
            except FrayError:
                return  # ended meanwhile: `on_end` has notified the waiters
