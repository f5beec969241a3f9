"""A run as a job of its own, and the run that lives already when it is started again."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

import trio

from fray.api.cluster import Cluster, current_cluster
from fray.api.jobs.job import Job
from fray.errors import ConnectionFailed, InvalidRequest, NameInUse, NoSuchJob
from fray.model.environment import EnvironmentConfig
from fray.model.requests import Entrypoint, JobRequest
from fray.model.resources import ResourceConfig
from fray.model.specs import ExitRule
from fray.rl.messages import RunStatus
from fray.rl.records.run_files import RunRecorder, own_job_id, read_state
from fray.rl.records.run_owner import LIVING, OutputLock, differences, follow_lines
from fray.rl.run_parts import RunParts
from fray.runtime.process.progress import progress
from fray.tracebacks import single_errors

RETRIES = 100
"""Restarts of a run's job after its process was killed."""
FAILED_CODE = 70
"""Exit code of a run that failed by an error, which it would do again."""
LOCK_PERIOD_S = 0.2
WAIT_NOTE_S = 10.0
"""Seconds of waiting for another process after which a line says so."""
LEAST_STALL_S = 60.0
"""Least seconds without progress after which a run's job is taken for frozen: imports are among them."""
HEARTBEATS = 4
"""Reports of progress within the time after which a run is taken for frozen."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class SubmittedRun(Protocol):
    """Run to submit: `fray.rl.Run`."""

    parts: RunParts
    data: Any
    validation_data: Any
    output: Any
    on_step: Callable[[dict[str, float]], object] | None

    async def run_on(self, cluster: Cluster, *, job: str) -> Any: ...


def texts_of(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings as texts that are equal in every process; a function has a digest of its source in its text."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= texts_of(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _text(value: Any) -> str:
    if not callable(value) or not hasattr(value, "__qualname__"):
        return _ADDRESS.sub("", str(value))
    try:
        return f"{value.__qualname__} (source {digest(inspect.getsource(value))})"
    except (OSError, TypeError):  # typed into an interpreter, or of a module that cannot be found by its name
        return str(value.__qualname__)


def digest(text: str) -> str:
    """Return a short name of a text by its content."""
    return sha256(text.encode()).hexdigest()[:8]


# The one that lives already ------------------------------------------------------------------------------------------


async def follow_living(cluster: Cluster, parts: RunParts, lock: OutputLock, say: Callable[[str], None]) -> bool:
    """Follow the run that lives in the output, in a job or in another process, until it has ended.

    Args:
        say: called with each line for the console.

    Returns:
        True once it has ended. False: there is none, or its process was lost, and this process has the lock.

    Raises:
        InvalidRequest: its settings are others.
    """
    output = parts.output
    if output is None:
        return False
    while True:
        job = await living_job(cluster, parts)
        if job is None and lock.try_acquire():
            return False
        check_same(parts)
        say(f"{living_text(parts)}: follows it; Ctrl-C leaves it running, fray rl stop {parts.name} ends it")

        async def is_living(job: Job | None = job) -> bool:
            if job is not None:
                return not (await cluster.poll(job)).state.finished
            with OutputLock(output) as probe:
                return not probe.try_acquire()

        await follow_lines(output, is_living, say)
        if read_state(output).get("state") not in LIVING:
            return True
        say("its process was lost: continues here")


async def living_job(cluster: Cluster, parts: RunParts) -> Job | None:
    """Return the living job of the run in the output; None if it has none, or is the job of this process."""
    assert parts.output is not None
    status = read_state(parts.output)
    job_id = status.get("job") if status.get("state") in LIVING else None
    if not job_id or job_id == own_job_id():
        return None
    try:
        job = await cluster.get_job(job_id, "*")
    except NoSuchJob:
        return None
    return None if job.info.state.finished else job


def check_same(parts: RunParts) -> None:
    """Raise InvalidRequest if the living run in the output has other settings."""
    assert parts.output is not None
    if found := differences(parts.output, parts.settings):
        listed = "; ".join(found)
        raise InvalidRequest(
            f"{living_text(parts)}, with other settings: {listed}. End it first (fray rl stop {parts.name}), "
            "or choose another name and output"
        )


def living_text(parts: RunParts) -> str:
    """Return that the run in the output is going, and where."""
    assert parts.output is not None
    status = read_state(parts.output)
    where = f"process {status.get('pid')} on {status.get('host')}"
    return f"run {parts.name} is running already in {f'job {job}' if (job := status.get('job')) else where}"


async def acquire(lock: OutputLock, parts: RunParts, say: Callable[[str], None]) -> None:
    """Get the lock of the output. The job of a run waits for it: the process before it may be ending.

    Raises:
        InvalidRequest: in other processes, if another one has it.
    """
    began = noted_at = time.monotonic()
    while not lock.try_acquire():
        if not own_job_id():
            raise InvalidRequest(f"{living_text(parts)}, and a directory is the output of one run at a time")
        if time.monotonic() - noted_at >= WAIT_NOTE_S:
            noted_at = time.monotonic()
            say(f"waits for {noted_at - began:.0f} s for another process that has the lock of {parts.output}")
        await trio.sleep(LOCK_PERIOD_S)


# A job of its own ----------------------------------------------------------------------------------------------------


async def submit(run: SubmittedRun, cluster: Cluster) -> Job[RunStatus]:
    """Launch a run as a job, or return its living one. Raises as `fray.rl.Run.submit`."""
    parts = run.parts
    if parts.output is None:
        raise InvalidRequest("a run as a job needs output=, a directory that all machines of the cluster can write")
    with OutputLock(parts.output) as lock:
        living = await living_job(cluster, parts)
        if living is not None:
            check_same(parts)
            return living
        if not lock.try_acquire():
            check_same(parts)
            raise InvalidRequest(f"{living_text(parts)}, and no job of this cluster runs it: end it first")
        try:
            job: Job[RunStatus] = await cluster.launch(_request(run))
        except NameInUse as error:
            text = f"{error}; the run of that job has another output, or is of another cluster's directory"
            raise InvalidRequest(f"the name {parts.name!r} of the run is taken: {text}") from None
        # The job waits for the lock: its own status comes after this one.
        RunRecorder(parts, job.id).write_pending()
    return job


def _request(run: SubmittedRun) -> JobRequest[Any]:
    parts = run.parts
    shipped = copy.copy(run)
    # The rows that were checked here, and paths that do not depend on the current directory.
    shipped.data, shipped.output = parts.rows, parts.output
    shipped.validation_data = parts.validation_rows or None
    return JobRequest(
        name=parts.name,
        entrypoint=Entrypoint.from_callable(run_as_job, args=(shipped, _stall_s(parts))),
        # A controller that waits for a machine would hold nothing up but its run.
        resources=parts.resources.get("controller") or ResourceConfig(cpu=0, memory=0),
        environment=EnvironmentConfig.create(env_vars=parts.env_vars),
        detached=True,
        max_retries_failure=RETRIES,
        max_retries_preemption=-1,
        exit_codes={FAILED_CODE: ExitRule.FAIL},
        stall_s=_stall_s(parts),
        on_stall="restart",
    )


def _stall_s(parts: RunParts) -> float:
    return max(parts.liveness_s, LEAST_STALL_S)


async def run_as_job(run: SubmittedRun, stall_s: float) -> RunStatus | None:
    """Run in the job of this process, and report progress, by which the cluster sees that it is not frozen.

    Args:
        run: the run.
        stall_s: seconds without a report after which the cluster starts the job again.

    Raises:
        ConnectionFailed: the connection to the cluster has ended; a new attempt of the job continues.
        SystemExit: the run failed; its error is in the output of the job.
    """
    done, trainer, on_step = 0.0, run.parts.trainer, run.on_step

    def count(metrics: dict[str, float]) -> None:
        nonlocal done
        done = metrics["step"]
        if on_step is not None:
            on_step(metrics)

    async def report() -> None:
        while True:
            progress(done, None if trainer is None else trainer.steps, "updates")
            await trio.sleep(stall_s / HEARTBEATS)

    run.on_step = count
    with single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            try:
                result = await run.run_on(current_cluster(), job=own_job_id())
            except ConnectionFailed:
                raise
            except Exception:  # noqa: BLE001 (the code of the user, too)
                traceback.print_exc()
                sys.exit(FAILED_CODE)
            nursery.cancel_scope.cancel()
    status: RunStatus | None = result.status
    return status
