"""The jobs this process launches and follows: a record of each, which follows its job to the end."""

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
from fray.model.monitoring.attempt_metrics import AttemptMetrics
from fray.model.specs import JobInfo, JobSpec, JobState
from fray.net.codec import Bytes
from fray.runtime.controller_client.request import SendRequest


class JobRecord:
    """What this process knows of one job; `ended` is set once, with ``info`` final and ``value`` there."""

    def __init__(self, info: JobInfo) -> None:
        self.info = info
        self.value: bytes | None = None
        self.ended = trio.Event()
        self.changed = trio.Event()
        self.asked_to_end = False
        """This process itself has asked for the job's end: no error of the scope then."""
        self.accepted = True
        """False while the launch has not been answered: the controller may not know the job yet."""
        self.lost: FrayError | None = None
        """Set instead of an outcome when the conversation itself has ended."""
        self.callbacks: list[Callable[[], object]] = []
        """Called once, in the loop, when it has ended."""

    def update(self, info: JobInfo, value: bytes | None) -> None:
        if self.ended.is_set():
            return
        self.info = info
        if info.state.finished:
            self.value = value
            self._end()
        self.changed.set()
        self.changed = trio.Event()

    def update_metrics(self, vitals: Sequence[AttemptMetrics]) -> None:
        """What is measured of it has changed."""
        if not self.ended.is_set():
            self.info = self.info.with_metrics({vital.attempt_id: vital for vital in vitals})
            self.changed.set()
            self.changed = trio.Event()

    def lose(self, error: FrayError) -> None:
        if not self.ended.is_set():
            self.lost = error
            self._end()
            self.changed.set()

    def _end(self) -> None:
        self.ended.set()
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class JobTracker:
    """Of one conversation with the controller. A record is here as long as anybody has it."""

    def __init__(self, send: SendRequest) -> None:
        self._send = send
        self._records: WeakValueDictionary[JobId, JobRecord] = WeakValueDictionary()
        self.secret_of: Callable[[str], str | None] = os.environ.get
        """What this process knows of secrets."""
        self._secrets: dict[JobId, dict[str, str]] = {}
        """Values brought for living jobs."""

    async def launch(
        self, specs: Sequence[JobSpec], payloads: Sequence[bytes], group: JobGroupSpec | None = None
    ) -> list[JobRecord]:
        """Launch all or none, of a ``group`` all its members; the records follow the jobs to their end.

        A record is of another job than its spec's where that asked for one that is there already.
        """
        records = [
            self._record(JobInfo(job_id=spec.job_id, name=spec.name, state=JobState.PENDING, namespace=spec.namespace))
            for spec in specs
        ]
        for record in records:
            record.accepted = False

        def accepted(reply: Any, blobs: Sequence[Bytes]) -> None:
            for record in records:
                record.accepted = True
            records[:] = self._learn_all(reply, blobs, keep=True)

        secrets = self._known_secrets(specs)
        self._secrets.update((spec.job_id, secrets) for spec in specs if spec.secrets)
        try:
            message = Launch(jobs=tuple(specs), secrets=secrets, group=group)
            await self._send(message, payloads, on_answer=accepted)
        except FrayError:
            for spec in specs:
                self._secrets.pop(spec.job_id, None)
            raise
        return records

    def _known_secrets(self, specs: Sequence[JobSpec]) -> dict[str, str]:
        """Of those the jobs ask for, what this process's own environment has under their names."""
        names = {name for spec in specs for name in spec.secrets.values()}
        values = {name: self.secret_of(name) for name in sorted(names)}
        return {name: value for name, value in values.items() if value is not None}

    async def _bring_secrets(self) -> None:
        """The controller may be another one, which never knew them."""
        if self._secrets:
            try:
                await self._send(ProvideSecrets(secrets=dict(self._secrets)))
            except FrayError:
                pass  # the conversation has ended (`on_end` tells everybody)

    async def terminate(self, message: Terminate) -> tuple[JobId, ...]:
        """Ask for the end of jobs; those that end by this are no error of their scopes here."""

        def asked(reply: Any, blobs: Sequence[Bytes]) -> None:
            for record in self.known(reply.jobs):
                record.asked_to_end = True

        reply = await self._send(message, on_answer=asked)
        assert isinstance(reply[0], TerminateResult)
        return reply[0].jobs

    async def find_by_name(self, name: str, namespace: Namespace | None) -> JobRecord | None:
        """The record of the job that has, or had, this name."""
        found: list[JobRecord] = []

        def learnt(reply: Any, blobs: Sequence[Bytes]) -> None:
            found.extend(self._learn_all(reply, blobs, keep=True))

        await self._send(FindJob(name=name, namespace=namespace), on_answer=learnt)
        return found[0] if found else None

    async def watch(self, job_ids: Sequence[JobId]) -> list[JobRecord]:
        """Records of these jobs, whoever launched them.

        Raises:
            NoSuchJob: the cluster knows one of them not (or no more).
        """
        unknown = [job_id for job_id in job_ids if job_id not in self._records]
        held = [record for job_id in job_ids if (record := self._records.get(job_id)) is not None]
        if unknown:

            def known(reply: Any, blobs: Sequence[Bytes]) -> None:
                held.extend(self._learn_all(reply, blobs, keep=True))

            await self._send(WatchJobs(jobs=tuple(unknown)), on_answer=known)
        by_id = {record.info.job_id: record for record in held}
        missing = [job_id for job_id in job_ids if job_id not in by_id]
        if missing:
            raise NoSuchJob(f"the cluster knows no job {missing[0]!r}", job_id=missing[0])
        return [by_id[job_id] for job_id in job_ids]

    def get_or_add(self, job_id: JobId, name: str) -> tuple[JobRecord, bool]:
        """The record of a job that somebody else named, and whether it is new here: then `find` must fill it."""
        record = self._records.get(job_id)
        if record is not None:
            return record, False
        return self._record(JobInfo(job_id=job_id, name=name, state=JobState.PENDING)), True

    async def find(self, record: JobRecord) -> None:
        """Follow the job of this record, which ends as lost when the cluster does not know it."""
        try:
            await self._send(WatchJobs(jobs=(record.info.job_id,)), on_answer=self._learn_all)
        except FrayError as error:
            record.lose(error)

    def known(self, job_ids: Sequence[JobId]) -> list[JobRecord]:
        """The records this process already has of these jobs."""
        return [record for job_id in job_ids if (record := self._records.get(job_id)) is not None]

    def _record(self, info: JobInfo) -> JobRecord:
        record = self._records.get(info.job_id)
        if record is None:
            record = self._records[info.job_id] = JobRecord(info)
        return record

    def on_measured(self, message: JobMeasured) -> None:
        """A notice of the controller's."""
        if (record := self._records.get(message.job_id)) is not None:
            record.update_metrics(message.metrics)

    def lose_all(self, error: FrayError) -> None:
        """The conversation has ended."""
        for record in list(self._records.values()):
            record.lose(error)

    def on_job_changed(self, info: JobInfo, value: Bytes | None) -> None:
        """What the controller says of a job."""
        if info.state.finished:
            self._secrets.pop(info.job_id, None)
        record = self._records.get(info.job_id)
        if record is not None:
            record.update(info, None if value is None else bytes(value))

    def _learn_all(self, reply: Any, blobs: Sequence[Bytes], keep: bool = False) -> list[JobRecord]:
        """Attachments stand in the order of the jobs that name a value."""
        assert isinstance(reply, Jobs)
        values = iter(blobs)
        records = []
        for info in reply.jobs:
            value = next(values, None) if info.value is not None else None
            if keep:
                records.append(self._record(info))
            self.on_job_changed(info, value)
        return records

    async def resubscribe(self) -> None:
        """The controller has forgotten us, or is another one: bring what it never knew, follow whatever lives."""
        await self._bring_secrets()
        waiting = [job_id for job_id, record in self._records.items() if record.accepted and not record.ended.is_set()]
        for job_id in waiting:
            try:
                await self._send(WatchJobs(jobs=(job_id,)), on_answer=self._learn_all)
            except NoSuchJob as gone:
                self._lose_job(job_id, gone)
            except FrayError:
                return  # ended meanwhile: `on_end` has told the waiters

    def _lose_job(self, job_id: JobId, error: FrayError) -> None:
        record = self._records.get(job_id)
        if record is not None:
            record.lose(error)
