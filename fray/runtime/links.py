"""This process's conversation with the controller: requests, and the subscriptions that survive any interruption.

The law: whatever this process has subscribed to is a set kept here. When the controller (or its next life) does not
remember us, `on_reset` marks the whole set as owed and one task subscribes again; requests without an answer are sent
again by `fray.net.requests`. So a controller restart is a pause, nothing more.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, WeakValueDictionary

import trio
from attrs import evolve

from fray.errors import ChannelClosed, FrayError, NoSuchJob, Unreachable
from fray.model.ids import JobId, Namespace
from fray.model.lines import LogLine
from fray.model.messages.client import (
    BringSecrets,
    ClientHello,
    ControllerHello,
    Ended,
    EndSession,
    FindJob,
    FollowLogs,
    JobChanged,
    JobMeasured,
    Jobs,
    Launch,
    LogLines,
    LogMoved,
    Names,
    Register,
    Terminate,
    Unwatch,
    Watch,
    WatchJobs,
    WatchLogs,
)
from fray.model.specs import JobInfo, JobSpec, JobState
from fray.model.vitals import Vital, complete
from fray.net.channel import Channel, RedialPolicy, run_dialled
from fray.net.codec import Bytes, Kind, decode_message, encode_message
from fray.net.requests import Requests, again
from fray.net.transport import Credential, Network
from fray.net.tunnel import Tunnels

OnNames: TypeAlias = Callable[[Names, Sequence[Bytes]], None]
OnLog: TypeAlias = Callable[[Sequence[LogLine]], None]
"""Told of lines of one attempt."""


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

    def measure(self, vitals: Sequence[Vital]) -> None:
        """What is measured of it has changed."""
        if not self.ended.is_set():
            self.info = complete(self.info, {vital.attempt_id: vital for vital in vitals})
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


class ReadsLogs(Protocol):
    """One who reads logs and follows."""

    watched: tuple[JobId, bool]
    """The job, and whether also all below it."""

    def on_moved(self, moved: LogMoved | None) -> None:
        """Told of an attempt that has printed; None: of any, as hints may have been lost."""


class _NamesWatch:
    def __init__(self) -> None:
        self.latest: tuple[Names, Sequence[Bytes]] | None = None
        self.listeners: list[OnNames] = []


class ControllerLink:
    """The channel to the controller and all that rides on it."""

    def __init__(self, hello: ClientHello, *, on_log: OnLog | None = None, tunnels: Tunnels | None = None) -> None:
        self.hello = hello
        self.on_log = on_log
        self.tunnels = tunnels
        """What is relayed over this conversation."""
        self.controller: ControllerHello | None = None
        self.ended: FrayError | None = None
        self.ready = trio.Event()
        """Set when the controller first answered, or the conversation ended before."""
        self._channel: Channel | None = None
        self._requests: Requests | None = None
        self._jobs: WeakValueDictionary[JobId, JobRecord] = WeakValueDictionary()
        self.secret_of: Callable[[str], str | None] = os.environ.get
        """What this process knows of secrets."""
        self._secrets: dict[JobId, dict[str, str]] = {}
        """Values brought for living jobs."""
        self._names: dict[str, _NamesWatch] = {}
        self._follow: dict[JobId | None, bool] = {}
        self._not_printed: Counter[JobId] = Counter()
        self._log_readers: WeakSet[ReadsLogs] = WeakSet()
        self._owed = trio.Event()
        self._resets = 0
        self._settled = False
        """Something of this session has been accepted."""
        self.over = trio.Event()
        """Set when the conversation has ended, for whatever reason."""
        self.is_closing = False
        """This side has begun to say goodbye: what ends from now on is nobody's error."""

    # The channel's handler -------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if self._requests is not None and self._requests.on_frame(kind, flags, target, ref, body):
            return
        if self.tunnels is not None and self.tunnels.on_frame(kind, flags, target, ref, body):
            return
        if kind == Kind.NOTICE:
            message, blobs = decode_message(body)
            self._notice(message, blobs)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: Bytes) -> None:
        message, _ = decode_message(greeting)
        assert isinstance(message, ControllerHello)
        self.controller = message
        if self._requests is not None:
            self._requests.on_reset()
        if self.tunnels is not None:
            self.tunnels.on_reset()
        self._resets += 1
        self._tell_readers(None)
        self._owed.set()
        self.ready.set()

    def on_suspended(self, why: str) -> None:
        pass

    def on_resumed(self) -> None:
        pass

    def on_end(self, error: FrayError) -> None:
        self.ended = error
        if self._requests is not None:
            self._requests.on_end(error)
        if self.tunnels is not None:
            self.tunnels.on_end(error)
        for record in list(self._jobs.values()):
            record.lose(error)
        self._owed.set()
        self.ready.set()
        self.over.set()

    def _notice(self, message: Any, blobs: Sequence[Bytes]) -> None:
        if isinstance(message, JobChanged):
            self._learn(message.job, blobs[0] if blobs else None)
        elif isinstance(message, JobMeasured):
            if (record := self._jobs.get(message.job_id)) is not None:
                record.measure(message.vitals)
        elif isinstance(message, Names):
            self._learn_names(message, blobs)
        elif isinstance(message, LogMoved):
            self._tell_readers(message)
        elif isinstance(message, LogLines) and self.on_log is not None and message.job_id not in self._not_printed:
            from fray.runtime.log_lines import told  # not every process prints logs

            self.on_log(told(message, blobs[0] if blobs else b""))

    def _tell_readers(self, moved: LogMoved | None) -> None:
        for reader in list(self._log_readers):
            reader.on_moved(moved)

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(
        self,
        network: Network,
        addresses: Sequence[str],
        credential: Credential | None,
        *,
        policy: RedialPolicy,
        rng: random.Random,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Hold the conversation until it ends; reports started at once, before the controller answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_subscribed)
            task_status.started()
            await run_dialled(
                network,
                addresses,
                credential,
                greeting=self._greeting,
                handler=self._opened,
                incarnation=self.hello.session,
                policy=policy,
                rng=rng,
            )
            nursery.cancel_scope.cancel()

    def _greeting(self) -> bytes:
        return encode_message(evolve(self.hello, settled=self._settled, leaving=self.is_closing))

    def _opened(self, channel: Channel) -> ControllerLink:
        self._channel = channel
        self._requests = Requests(channel)
        if self.tunnels is not None:
            self.tunnels.attach(channel)
        return self

    async def wait_ready(self, within_s: float) -> ControllerHello:
        """The controller's greeting.

        Raises:
            ConnectionFailed: it refused us (the subclass says why), or nobody answered within ``within_s``.
        """
        with trio.move_on_after(within_s):
            await self.ready.wait()
        if self.ended is not None:
            raise self.ended
        if self.controller is None:
            raise Unreachable(f"no answer from the controller within {within_s:g} s; is fray-controller running there?")
        return self.controller

    async def close(self, reason: str, within_s: float) -> None:
        """Goodbye: end all this session owns, then the conversation. Bounded; shielded by the caller."""
        self.is_closing = True
        with trio.move_on_after(within_s):
            if self.ended is None and self.ready.is_set():
                try:
                    await self.request(EndSession(reason=reason))
                except FrayError:
                    pass  # the conversation ended first: the controller ends what we own by itself
        if self._channel is not None and self.ended is None:
            with trio.move_on_after(1):
                await self._channel.close(reason)

    # Requests --------------------------------------------------------------------------------------------------------

    async def request(self, message: Any, blobs: Sequence[Bytes] = (), *, timeout_s: float | None = None) -> Any:
        """Ask and wait for the reply (without its attachments); see `request_blobs`."""
        return (await self.request_blobs(message, blobs, timeout_s=timeout_s))[0]

    async def request_blobs(
        self,
        message: Any,
        blobs: Sequence[Bytes] = (),
        *,
        timeout_s: float | None = None,
        on_answer: Callable[[Any, Sequence[Bytes]], object] | None = None,
    ) -> tuple[Any, Sequence[Bytes]]:
        """Ask and wait for the reply with its attachments.

        What a reply says of things that change is learnt in ``on_answer``: a notice that came right behind it is heard
        before the task that awaits the reply runs, and must not be undone by it.

        Raises:
            FrayError: what the controller answered, DeadlineExceeded, or why the conversation ended.
        """
        await self.ready.wait()
        if self.ended is not None:
            raise again(self.ended)
        if self._requests is None:
            raise ChannelClosed("the conversation with the controller has not begun", reason="closed")
        answer = await self._requests.request(message, blobs, timeout_s=timeout_s, on_answer=on_answer)
        self._settled = self._settled or isinstance(message, Launch | Register)
        return answer

    # Jobs ------------------------------------------------------------------------------------------------------------

    async def launch(self, specs: Sequence[JobSpec], payloads: Sequence[bytes]) -> list[JobRecord]:
        """Launch all or none; the records follow the jobs to their end.

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
            await self.request_blobs(Launch(jobs=tuple(specs), secrets=secrets), payloads, on_answer=accepted)
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
                await self.request(BringSecrets(secrets=dict(self._secrets)))
            except FrayError:
                pass  # the conversation has ended (`on_end` tells everybody)

    async def terminate(self, message: Terminate) -> tuple[JobId, ...]:
        """Ask for the end of jobs; those that end by this are no error of their scopes here."""

        def asked(reply: Any, blobs: Sequence[Bytes]) -> None:
            for record in self.known(reply.jobs):
                record.asked_to_end = True

        reply = await self.request_blobs(message, on_answer=asked)
        assert isinstance(reply[0], Ended)
        return reply[0].jobs

    async def find_by_name(self, name: str, namespace: Namespace | None) -> JobRecord | None:
        """The record of the job that has, or had, this name."""
        found: list[JobRecord] = []

        def learnt(reply: Any, blobs: Sequence[Bytes]) -> None:
            found.extend(self._learn_all(reply, blobs, keep=True))

        await self.request_blobs(FindJob(name=name, namespace=namespace), on_answer=learnt)
        return found[0] if found else None

    async def watch_jobs(self, job_ids: Sequence[JobId]) -> list[JobRecord]:
        """Records of these jobs, whoever launched them.

        Raises:
            NoSuchJob: the cluster knows one of them not (or no more).
        """
        unknown = [job_id for job_id in job_ids if job_id not in self._jobs]
        held = [record for job_id in job_ids if (record := self._jobs.get(job_id)) is not None]
        if unknown:

            def known(reply: Any, blobs: Sequence[Bytes]) -> None:
                held.extend(self._learn_all(reply, blobs, keep=True))

            await self.request_blobs(WatchJobs(jobs=tuple(unknown)), on_answer=known)
        by_id = {record.info.job_id: record for record in held}
        missing = [job_id for job_id in job_ids if job_id not in by_id]
        if missing:
            raise NoSuchJob(f"the cluster knows no job {missing[0]!r}", job_id=missing[0])
        return [by_id[job_id] for job_id in job_ids]

    def expect(self, job_id: JobId, name: str) -> tuple[JobRecord, bool]:
        """The record of a job that somebody else named, and whether it is new here: then `find_job` must fill it."""
        record = self._jobs.get(job_id)
        if record is not None:
            return record, False
        return self._record(JobInfo(job_id=job_id, name=name, state=JobState.PENDING)), True

    async def find_job(self, record: JobRecord) -> None:
        """Follow the job of this record, which ends as lost when the cluster does not know it."""
        try:
            await self.request_blobs(WatchJobs(jobs=(record.info.job_id,)), on_answer=self._learn_all)
        except FrayError as error:
            record.lose(error)

    def known(self, job_ids: Sequence[JobId]) -> list[JobRecord]:
        """The records this process already has of these jobs."""
        return [record for job_id in job_ids if (record := self._jobs.get(job_id)) is not None]

    def _record(self, info: JobInfo) -> JobRecord:
        record = self._jobs.get(info.job_id)
        if record is None:
            record = self._jobs[info.job_id] = JobRecord(info)
        return record

    def _learn(self, info: JobInfo, value: Bytes | None) -> None:
        if info.state.finished:
            self._secrets.pop(info.job_id, None)
        record = self._jobs.get(info.job_id)
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
            self._learn(info, value)
        return records

    # Names -----------------------------------------------------------------------------------------------------------

    def watch(self, key: str, on_names: OnNames) -> Callable[[], None]:
        """Call back with all endpoints under ``key`` (see `Watch`): as known now, then at each change."""
        entry = self._names.get(key)
        if entry is None:
            entry = self._names[key] = _NamesWatch()
            self._owed.set()
        entry.listeners.append(on_names)
        if entry.latest is not None:
            on_names(*entry.latest)

        def unwatch() -> None:
            if on_names in entry.listeners:
                entry.listeners.remove(on_names)
            if not entry.listeners and self._names.get(key) is entry:
                del self._names[key]
                self._forget_names(key)

        return unwatch

    def _forget_names(self, key: str) -> None:
        if self._channel is not None and self.ended is None and self.ready.is_set():
            try:
                self._channel.notice(Unwatch(key=key))
            except FrayError:
                pass  # full or ending: the controller forgets with the session

    def _learn_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        entry = self._names.get(names.key)
        if entry is not None:
            entry.latest = (names, [bytes(blob) for blob in blobs])
            for listener in list(entry.listeners):
                listener(*entry.latest)

    def _learn_answer(self, reply: Any, blobs: Sequence[Bytes]) -> None:
        if isinstance(reply, Names):
            self._learn_names(reply, blobs)

    def follow_logs(self, job: JobId | None, on: bool = True) -> None:
        """Have `on_log` called with lines of one job, or (None) of all this session owns."""
        self._follow[job] = on
        self._owed.set()

    def prints(self, job: JobInfo) -> bool:
        """Whether what this job writes is told to `on_log` without being asked for."""
        return self.on_log is not None and job.owner == self.hello.session

    @contextmanager
    def not_printing(self, job: JobId) -> Iterator[None]:
        """Somebody else prints the lines of this job meanwhile."""
        self._not_printed[job] += 1
        try:
            yield
        finally:
            self._not_printed[job] -= 1
            self._not_printed += Counter()  # without those that are 0

    def join_readers(self, reader: ReadsLogs) -> None:
        """Have its `on_moved` called with every `LogMoved` of whatever is watched, as long as it is there."""
        self._log_readers.add(reader)

    async def leave_readers(self, reader: ReadsLogs) -> None:
        """No more; the last one to watch a job says so to the controller. Takes at most a second."""
        self._log_readers.discard(reader)
        if any(other.watched == reader.watched for other in self._log_readers) or self.ended is not None:
            return
        job_id, tree = reader.watched
        with trio.move_on_after(1, shield=True):
            try:
                await self.request(WatchLogs(job=job_id, tree=tree, follow=False))
            except FrayError:
                pass  # it has ended, or the job is forgotten: nobody is told of it then

    # Subscribing again -----------------------------------------------------------------------------------------------

    async def _keep_subscribed(self) -> None:
        """Tell the controller every subscription it does not know, again after each reset."""
        await self.ready.wait()
        told: dict[str, _NamesWatch] = {}
        told_follow: dict[JobId | None, bool] = {}
        resets = 0
        while self.ended is None:
            self._owed = trio.Event()
            if resets != self._resets:
                if resets:
                    await self._bring_secrets()
                    await self._rewatch_jobs()
                resets, told, told_follow = self._resets, {}, {}
            told = {key: watch for key, watch in told.items() if self._names.get(key) is watch}
            owed = {key: watch for key, watch in self._names.items() if key not in told}
            owed_logs = {job: on for job, on in self._follow.items() if told_follow.get(job) != on}
            if not owed and not owed_logs:
                await self._owed.wait()
                continue
            await self._subscribe(tuple(owed), owed_logs)
            told |= owed
            told_follow |= owed_logs

    async def _subscribe(self, keys: Sequence[str], logs: dict[JobId | None, bool]) -> None:
        async def one(message: Any) -> None:
            try:
                await self.request_blobs(message, on_answer=self._learn_answer)
            except FrayError:
                return  # the conversation has ended (`on_end` tells everybody) or the controller knows no such key

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(one, Watch(key=key))
            for job, on in logs.items():
                nursery.start_soon(one, FollowLogs(job=job, on=on))

    async def _rewatch_jobs(self) -> None:
        waiting = [job_id for job_id, record in self._jobs.items() if record.accepted and not record.ended.is_set()]
        for job_id in waiting:
            try:
                await self.request_blobs(WatchJobs(jobs=(job_id,)), on_answer=self._learn_all)
            except NoSuchJob as gone:
                self._lose_job(job_id, gone)
            except FrayError:
                return  # ended meanwhile: `on_end` has told the waiters

    def _lose_job(self, job_id: JobId, error: FrayError) -> None:
        record = self._jobs.get(job_id)
        if record is not None:
            record.lose(error)
