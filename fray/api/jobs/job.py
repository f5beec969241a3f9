"""Handle of one job: state, result, ports, logs and end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from html import escape
from typing import TYPE_CHECKING, Any, Generic

import trio
from attrs import frozen

from fray.api import job_html
from fray.errors import FrayError, InvalidRequest, JobFailed, JobStopped, failures_in
from fray.missing_names import JOB_LINES, ExplainsMissing
from fray.model import job_text
from fray.model.ids import AttemptId, JobId
from fray.model.messages.client import GetStacks, Stacks, Terminate
from fray.model.specs import EndReason, JobInfo, JobState
from fray.runtime import waits
from fray.runtime.controller_client import large_results
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.process.current_job import CurrentJob as CurrentJob
from fray.runtime.process.current_job import current_job as current_job
from fray.runtime.runtime import Runtime, current, current_or_none
from fray.runtime.serialization import errors
from fray.runtime.serialization.values import loads_value
from fray.tracebacks import short_tracebacks
from fray.type_variables import T_co

if TYPE_CHECKING:
    from fray.runtime.logs.reader import LogReader


def error_of(record: JobRecord) -> BaseException:
    """Return the error of a job's end: the user's exception with its remote traceback, or `JobFailed`/`JobStopped`."""
    if record.lost is not None:
        return record.lost
    info = record.info
    if record.value is not None and info.cause is EndReason.FAILURE:
        error = errors.load_error(record.value)
        for each in failures_in(error):
            _add_step_of_path(each, info)
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


def _add_step_of_path(error: BaseException, info: JobInfo) -> None:
    """Say in its `RemoteTraceback` that the error came by this job, and in notes how this ended, if it raised it."""
    remote = errors.remote_traceback_of(error)
    runtime = current_or_none()
    here = runtime.job_name if runtime is not None and runtime.job_id is not None else "driver"
    machines = job_text.machines_text(info).replace(" on ", " on machine ", 1)
    if remote is not None and remote.path:
        remote.path = (here, info.name, *remote.path[1:])
        return
    if remote is not None:
        remote.path = (here, f"{info.name}{machines}")
    error.add_note(f"raised in job {info.job_id}{job_text.machines_text(info)}")
    if len(info.attempts) > 1:
        error.add_note(info.error_message or "")


@short_tracebacks
class Job(ExplainsMissing, Generic[T_co]):
    """Handle of one job, which returns a ``T_co``; ``await job`` is ``await job.wait()``. Picklable: wherever it
    arrives in the cluster it is a handle of the same job.
    """

    _meant = JOB_LINES

    def __init__(self, runtime: Runtime, record: JobRecord) -> None:
        self._here: Runtime | None = runtime
        self._known: JobRecord | None = record
        self._names = record.info.job_id, record.info.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_job, self._names

    @property
    def _runtime(self) -> Runtime:
        """Runtime of the job; an unpickled job belongs to the cluster of the code that uses it."""
        if self._here is None:
            self._here = current()
        return self._here

    @property
    def _record(self) -> JobRecord:
        if self._known is None:
            client = self._runtime.client
            self._known, is_new = client.jobs.get_or_add(*self._names)
            if is_new:
                self._runtime.token.run_sync_soon(self._runtime.nursery.start_soon, client.jobs.find, self._known)
        return self._known

    @property
    def id(self) -> JobId:
        return self._names[0]

    @property
    def name(self) -> str:
        return self._names[1]

    @property
    def info(self) -> JobInfo:
        """Latest state known here."""
        return self._record.info

    async def wait(self) -> T_co:
        """Return the result of the callable (None for a program), once the job has ended.

        Raises:
            BaseException: the callable's own exception, with the remote traceback as its cause.
            JobFailed: it ended for another reason: killed, exit code, lost machine; JobStopped: it was ended on
                request.
            FrayError: its result cannot be fetched: it was dropped, or its ``result_storage`` is not readable here.
            ConnectionFailed: the connection to the controller has ended.
        """
        await self.wait_ended()
        if self._record.value is None:
            if large_results.is_elsewhere(self._record) and self.info.state is JobState.SUCCEEDED:
                fetched: T_co = await large_results.fetch_result(self._runtime.client, self._record)
                return fetched
            await large_results.fetch(self._record)
        return self.result()

    def done(self) -> bool:
        """Return whether the job has ended, as far as is known here."""
        return self._record.ended.is_set()

    def exception(self) -> BaseException | None:
        """Return the error that `wait` raises, of a job that is `done`; None if it raises none."""
        try:
            self.result()
        except BaseException as error:  # noqa: BLE001 - it is the return value
            return error
        return None

    def add_done_callback(self, callback: Callable[[Job[T_co]], object]) -> None:
        """Call ``callback(job)`` in the loop when it has ended; at once if it has. In the loop only."""
        if self.done():
            callback(self)
        else:
            self._record.callbacks.append(_Callback(self, callback))

    def remove_done_callback(self, callback: Callable[[Job[T_co]], object]) -> None:
        """Remove a callback that `add_done_callback` has added."""
        entry = _Callback(self, callback)
        if entry in self._record.callbacks:
            self._record.callbacks.remove(entry)

    def result(self) -> T_co:
        """Return or raise what `wait` does, of a job that is `done`; on any thread.

        A result in ``result_storage``, or above 8 MiB, is read during this call.

        Raises:
            FrayError: the job has not ended: await it; or it ended so long ago that its result has been dropped; or it
                is above 8 MiB, and this is the loop's thread, in which only ``await job`` can fetch it.
        """
        if not self.done():
            raise FrayError(f"{self!r} has not ended: await it")
        if self._record.lost is not None or self.info.state is not JobState.SUCCEEDED:
            raise error_of(self._record)
        if self._record.value is None and self.info.error_message is not None:
            raise FrayError(f"job {self.id}: {self.info.error_message}")
        value = self._record.value
        if value is None and self.info.stored is None and large_results.is_elsewhere(self._record):
            fetched: T_co = self._fetch_from_thread()
            return fetched
        if self.info.stored is not None:
            value = large_results.read_now(self._record)
        result: Any = None if value is None else loads_value(value)
        return result  # type: ignore[no-any-return]

    def _fetch_from_thread(self) -> Any:
        runtime = self._runtime
        if trio.lowlevel.in_trio_run():
            raise FrayError(f"the result of job {self.id} is large and not in this process yet: write `await job`")
        return trio.from_thread.run(large_results.fetch_result, runtime.client, self._record, trio_token=runtime.token)

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self.wait().__await__()

    async def wait_ended(self) -> JobInfo:
        """Wait for the end, however it came; raises only if the connection to the controller has ended."""
        with waits.waiting():
            await self._record.ended.wait()
        if self._record.lost is not None:
            raise self._record.lost
        return self._record.info

    async def wait_running(self) -> JobInfo:
        """Wait until every process of the job runs, or the job has ended."""
        record = self._record
        with waits.waiting():
            while record.info.state is JobState.PENDING and not record.ended.is_set():
                await record.changed.wait()
        if record.lost is not None:
            raise record.lost
        return record.info

    async def wait_port(self, name: str, member: int = 0) -> str:
        """Return ``host:port`` of a port of the job, once all its members run; they may not listen on it yet.

        Args:
            name: an element of `JobRequest.ports`, or ``"coordinator"`` for a gang.
            member: rank of the member whose port it is.

        Raises:
            InvalidRequest: it has no such port, or no such member.
            BaseException: it has ended: as `wait` (`JobFailed` also if it has succeeded).
        """
        info = await self.wait_running()
        if self.done():
            self.result()
            raise JobFailed(f"job {self.id} has ended; its port {name!r} is closed", job_id=self.id)
        attempt = info.members[member] if 0 <= member < len(info.members) else None
        if attempt is None or name not in attempt.ports:
            if attempt is None:
                raise InvalidRequest(f"job {self.id} has no member {member}; expected 0 to {len(info.members) - 1}")
            ports = ", ".join(info.ports) or "none"
            raise InvalidRequest(
                f"job {self.id} has no port {name!r} (its ports: {ports}): request it with "
                f"JobRequest(ports=[{name!r}]), or `fray run --port {name}`"
            )
        return attempt.addresses[name]

    async def terminate(self, reason: str = "terminated by its owner") -> None:
        """Request the end of the job and of everything below it; returns when the controller has recorded the
        request.
        """
        self._record.end_requested = True
        await self._runtime.client.request(Terminate(jobs=(self.id,), reason=reason))

    async def stacks(self) -> dict[str, str]:
        """Return the stacks of its processes: see `Cluster.stacks`."""
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
        """Return a reader of its output, each line a `LogLine`: ``async for line in job.logs()``. As `Cluster.logs`."""
        from fray.runtime.logs.reader import LogQuery, LogReader  # imported here: most processes read no logs

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
        return LogReader(self._runtime.client, query)

    def __repr__(self) -> str:
        """Return the state known here, and its reason: ``<Job train-k3x9 pending: waits for 8 h100>``."""
        return f"<Job {self.id} {job_text.summary_text(self._known.info) if self._known else 'elsewhere'}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: state, machines, and the reason or a bar of the progress."""
        known = self._known.info if self._known is not None else None
        return job_html.job_html(known) if known is not None else f"<div>{escape(repr(self))}</div>"


async def stacks_of(runtime: Runtime, job_id: JobId) -> dict[str, str]:
    """Return the stacks of a job: see `Cluster.stacks`."""
    reply = await runtime.client.request(GetStacks(job=job_id))
    assert isinstance(reply, Stacks)
    return dict(reply.stacks)


@frozen
class _Callback:
    job: Job
    callback: Callable[[Job], object]

    def __call__(self) -> None:
        self.callback(self.job)


def _unpickle_job(job_id: JobId, name: str) -> Job:
    job = Job.__new__(Job)
    job._here, job._known, job._names = None, None, (job_id, name)
    return job


def job_id_of(job: Job | JobId) -> JobId:
    """Return the id of a `Job`, or the id itself, as a plain string.

    Raises:
        InvalidRequest: neither.
    """
    if isinstance(job, Job):
        return job.id
    if isinstance(job, str):
        return str(job)  # a `fray.blocking.Job` is a string too: messages have plain ones
    raise InvalidRequest(f"{job!r} is neither a Job nor a job id")
