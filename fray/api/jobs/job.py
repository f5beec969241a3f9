"""Handle of one job: state, result, ports, logs and end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from attrs import frozen

from fray.errors import FrayError, InvalidRequest, JobFailed, JobStopped
from fray.model import job_text
from fray.model.ids import AttemptId, JobId
from fray.model.messages.client import GetStacks, Stacks, Terminate
from fray.model.specs import EndReason, JobInfo, JobState
from fray.runtime.controller_client import large_results
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.process.current_job import CurrentJob as CurrentJob
from fray.runtime.process.current_job import current_job as current_job
from fray.runtime.runtime import Runtime, current
from fray.runtime.serialization import errors, pickling

if TYPE_CHECKING:
    from fray.runtime.logs.reader import LogReader


def error_of(record: JobRecord) -> BaseException:
    """The error a job's end is: the user's own exception with its remote traceback, or `JobFailed`/`JobStopped`."""
    if record.lost is not None:
        return record.lost
    info = record.info
    if record.value is not None and info.cause is EndReason.FAILURE:
        error = errors.load_error(record.value)
        error.add_note(f"raised in job {info.job_id}{job_text.machines_text(info)}")
        if len(info.attempts) > 1:
            error.add_note(info.error_message or "")
        return error
    cls = JobStopped if info.state is JobState.STOPPED else JobFailed
    return cls(
        f"job {info.job_id} {job_text.end_text(info)}",
        job_id=info.job_id,
        name=info.name,
        cause=info.cause,
        exit_code=info.exit_code,
        signal=info.signal,
        nodes=job_text.last_machines(info),
        attempts=job_text.run_count(info),
        ended_by=info.ended_by,
    )


class Job:
    """One job of the cluster, seen from here. ``await job`` is ``await job.wait()``. Picklable: it means the same job
    wherever it arrives in the cluster."""

    def __init__(self, runtime: Runtime, record: JobRecord) -> None:
        self._place: Runtime | None = runtime
        self._known: JobRecord | None = record
        self._names = record.info.job_id, record.info.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived_job, self._names

    @property
    def _runtime(self) -> Runtime:
        """A job that came by pickle belongs to the cluster of the code that uses it."""
        if self._place is None:
            self._place = current()
        return self._place

    @property
    def _record(self) -> JobRecord:
        if self._known is None:
            link = self._runtime.link
            self._known, is_new = link.jobs.get_or_add(*self._names)
            if is_new:
                self._runtime.token.run_sync_soon(self._runtime.nursery.start_soon, link.jobs.find, self._known)
        return self._known

    @property
    def id(self) -> JobId:
        return self._names[0]

    @property
    def name(self) -> str:
        return self._names[1]

    @property
    def info(self) -> JobInfo:
        """The latest state known here."""
        return self._record.info

    async def wait(self) -> Any:
        """What the callable returned (None for a program).

        Raises:
            BaseException: the callable's own exception, with the remote traceback as its cause.
            JobFailed: it ended for another reason: killed, exit code, lost machine; JobStopped: somebody ended it.
            FrayError: its value is in ``result_storage`` and cannot be read here.
            ConnectionFailed: the conversation with the controller has ended.
        """
        await self.wait_ended()
        if self._record.info.stored is not None:
            await large_results.fetch(self._record)
        return self.result()

    def done(self) -> bool:
        """Whether it has ended, as far as is known here."""
        return self._record.ended.is_set()

    def exception(self) -> BaseException | None:
        """What `wait` raises, of a job that is `done`; None when it raises nothing."""
        try:
            self.result()
        except BaseException as error:  # noqa: BLE001 - it is the answer
            return error
        return None

    def add_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Call ``callback(job)`` in the loop when it has ended; at once if it has. In the loop only."""
        if self.done():
            callback(self)
        else:
            self._record.callbacks.append(_Callback(self, callback))

    def remove_done_callback(self, callback: Callable[[Job], object]) -> None:
        """Do not call it after all."""
        told = _Callback(self, callback)
        if told in self._record.callbacks:
            self._record.callbacks.remove(told)

    def result(self) -> Any:
        """What `wait` returns or raises, of a job that is `done`; for any thread.

        One that is in ``result_storage`` is read here and now, unless the job was awaited before.

        Raises:
            FrayError: it has not ended: await it; or it ended so long ago that its result is no longer kept.
        """
        if not self.done():
            raise FrayError(f"{self!r} has not ended: await it")
        if self._record.lost is not None or self.info.state is not JobState.SUCCEEDED:
            raise error_of(self._record)
        if self._record.value is None and self.info.error_message is not None:
            raise FrayError(f"job {self.id}: {self.info.error_message}")
        value = large_results.read_now(self._record)
        return None if value is None else pickling.loads(value)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.wait().__await__()

    async def wait_ended(self) -> JobInfo:
        """Wait for the end, whatever it is; raises only when the conversation with the controller has ended."""
        await self._record.ended.wait()
        if self._record.lost is not None:
            raise self._record.lost
        return self._record.info

    async def wait_running(self) -> JobInfo:
        """Wait until every process of the job runs, or the job has ended."""
        record = self._record
        while record.info.state is JobState.PENDING and not record.ended.is_set():
            await record.changed.wait()
        if record.lost is not None:
            raise record.lost
        return record.info

    async def wait_port(self, name: str, member: int = 0) -> str:
        """``host:port`` of a port of the job, as soon as all its members run; they may not listen there yet.

        Args:
            name: one of `JobRequest.ports`, or ``"coordinator"`` of a gang.
            member: whose, by rank.

        Raises:
            InvalidRequest: it has no such port, or no such member.
            BaseException: it has ended: what `wait` raises (`JobFailed` also for one that has succeeded).
        """
        info = await self.wait_running()
        if self.done():
            self.result()
            raise JobFailed(f"job {self.id} has ended: nobody is at its port {name!r} any more", job_id=self.id)
        attempt = info.members[member] if 0 <= member < len(info.members) else None
        if attempt is None or name not in attempt.ports:
            if attempt is None:
                raise InvalidRequest(f"job {self.id} has no member {member}: write 0 to {len(info.members) - 1}")
            ports = ", ".join(info.ports) or "none"
            raise InvalidRequest(
                f"job {self.id} has no port {name!r} (its ports: {ports}): ask for it by JobRequest(ports=[{name!r}]), "
                f"or `fray run --port {name}`"
            )
        return attempt.addresses[name]

    async def terminate(self, reason: str = "terminated by its owner") -> None:
        """Ask for its end and that of everything below it; returns when the controller has noted it."""
        self._record.asked_to_end = True
        await self._runtime.link.request(Terminate(jobs=(self.id,), reason=reason))

    async def stacks(self) -> dict[str, str]:
        """Look into its processes: see `Cluster.stacks`."""
        return await stacks_of(self._runtime, self.id)

    def logs(
        self,
        *,
        tail: int | None = None,
        since_s: float | None = None,
        follow: bool = False,
        attempt: AttemptId | int | None = None,
        stream: str = "",
        contains: str = "",
        tree: bool = False,
    ) -> LogReader:
        """What it has printed, each line a `LogLine`: ``async for line in job.logs()``. As `Cluster.logs`."""
        from fray.runtime.logs.reader import LogQuery, LogReader  # not every process reads logs

        query = LogQuery(
            job_id=self.id,
            tail=tail,
            since_s=since_s,
            follow=follow,
            attempt=attempt,
            stream=stream,
            contains=contains,
            tree=tree,
        )
        return LogReader(self._runtime.link, query)

    def __repr__(self) -> str:
        """What is known here of its state, and why: ``<Job train-k3x9 pending: waits for 8 h100>``."""
        return f"<Job {self.id} {job_text.summary_text(self._known.info) if self._known else 'elsewhere'}>"


async def stacks_of(runtime: Runtime, job_id: JobId) -> dict[str, str]:
    """See `Cluster.stacks`."""
    reply = await runtime.link.request(GetStacks(job=job_id))
    assert isinstance(reply, Stacks)
    return dict(reply.stacks)


@frozen
class _Callback:
    job: Job
    callback: Callable[[Job], object]

    def __call__(self) -> None:
        self.callback(self.job)


def _arrived_job(job_id: JobId, name: str) -> Job:
    job = Job.__new__(Job)
    job._place, job._known, job._names = None, None, (job_id, name)
    return job


def job_id_of(job: Job | JobId) -> JobId:
    """The id of a `Job`, or the id itself.

    Raises:
        InvalidRequest: neither.
    """
    if isinstance(job, Job):
        return job.id
    if isinstance(job, str):
        return str(job)  # a `fray.blocking.Job` is a string too: messages have plain ones
    raise InvalidRequest(f"{job!r} is neither a Job nor a job id")
