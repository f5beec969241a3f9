"""Execution of one attempt of a job: opens its runtime, runs the user's code, returns the outcome.

Used by a job's own process (`fray.runtime.__main__`) and, within one process, by `fray.deploy.local` and the
simulator; they differ only in the `SyncRunner` they pass.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias

import trio
from attrs import evolve, frozen

from fray.errors import CancelIgnored, FrayError, RemoteError
from fray.model.environment import WORKSPACE_NAME
from fray.model.ids import split_attempt
from fray.model.messages.client import Role
from fray.model.messages.large_values import SIZE_LIMIT_BYTES
from fray.model.monitoring.health import HealthCheck
from fray.model.monitoring.progress_protocol import AttemptReport
from fray.model.specs import BLOB_LIMIT_BYTES, ActorConfig, AttemptSpec, EndReason, EntryKind, Outcome
from fray.net.transport import Bytes, Credential, Network
from fray.runtime import tracing
from fray.runtime.actors.checkpoints import Checkpoints, check_class
from fray.runtime.actors.endpoints import make_endpoint, registrations_of
from fray.runtime.actors.lifecycle import (
    ActorLifecycle,
    actor_of_process,
    construct,
    lifecycle_var,
)
from fray.runtime.actors.methods import has_async_methods
from fray.runtime.actors.server import host_of
from fray.runtime.actors.shutdown import serve_until_shutdown
from fray.runtime.background import open_background_nursery
from fray.runtime.cancellation import split_cancelled
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.process import current_job
from fray.runtime.process.end_requests import interrupted_by_end
from fray.runtime.process.progress import IN_PROCESS_REPORTER, InProcessReporter, reporter_of
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.values import LargeValue, Value, loads_value, value_of
from fray.runtime.threads.executor import SerialExecutor, ThreadExecutor
from fray.tracebacks import traceback_text


class SyncRunner(Protocol):
    """Interface that runs the user's sync code: on the main thread, on another thread, or inline (simulation)."""

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` to its end off the loop; cancellation is passed on to it as far as possible."""

    def executor(self, runtime: Runtime) -> SerialExecutor | None:
        """Return the executor for an actor without async methods; None: the actor server makes one."""


class NoSyncRunner:
    """Runner for async entry points, which have no sync code to run."""

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        raise AssertionError("sync code of a job's own process runs on its main thread")

    def executor(self, runtime: Runtime) -> SerialExecutor | None:
        return None


@frozen
class ExistingThreadRunner:
    """Runner that uses a thread which exists already."""

    thread: SerialExecutor

    async def run_sync(self, fn: Callable[[], Any]) -> Any:
        return await self.thread.run(fn)

    def executor(self, runtime: Runtime) -> SerialExecutor | None:
        return self.thread


@frozen
class AttemptResult:
    """Result of an attempt's code: the outcome, and the pickled value or error."""

    outcome: Outcome
    value: Value | None = None
    ignores_cancel: bool = False
    """Flag: a method on a thread still runs although it was cancelled, so the process must not wait for it."""


Work: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Unpickled payload: callable or class, arguments, keyword arguments."""

CALLS_EVERY_S = 5.0
"""Pause between two reports of the calls of an actor's process, in seconds."""
# The message is part of the job's row, which is sent with every list of jobs; the whole text is in the error.
MESSAGE_LIMIT_CHARS = 64_000
"""Maximum length of the message of an outcome; a longer one is cut in the middle."""


def succeeded(value: Any, what: str) -> AttemptResult:
    """Return the result of a callable that returned ``value``; if that cannot be pickled, a failure."""
    try:
        data = value_of(pickling.pack(value, f"the result of {what}"))
    except FrayError as error:
        # The code has succeeded, but its author waits for a value that will never come.
        return failed(error)
    return AttemptResult(Outcome(cause=EndReason.SUCCEEDED, exit_code=0), data)


def failed(error: BaseException, *, constructing: bool = False) -> AttemptResult:
    """Return the result of a callable, or of an actor's constructor, that raised ``error``."""
    code = _exit_code(error)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = _shorten(message, MESSAGE_LIMIT_CHARS)
    # `sys.exit()` is a success, as for a program.
    if code == 0:
        return AttemptResult(Outcome(cause=EndReason.SUCCEEDED, exit_code=0), pickling.dumps(None, "None"))
    # Exit rules of a retry policy are about codes that the code chose; an exception has none, though Python exits with
    # 1.
    raised = not isinstance(error, SystemExit)
    # Errors are shown on the command line and stored by the controller, so no secret may be in them.
    data, redacted = errors.dump_error(error), current_job.make_redactor()
    if current_job.contains_secret(data):  # the type of the error is lost, but the value of the secret stays here
        text = redacted(traceback_text(error))
        data = errors.dump_error(RemoteError(redacted(message), type=type(error).__name__, traceback=text))
    message = redacted(message)
    outcome = Outcome(
        cause=EndReason.FAILURE, exit_code=code, message=message, raised=raised, constructing=constructing
    )
    return AttemptResult(outcome, data)


def _shorten(text: str, limit_chars: int) -> str:
    half = limit_chars // 2
    return text if len(text) <= limit_chars else f"{text[:half]} [... {len(text):,} characters ...] {text[-half:]}"


def store_if_large(attempt_spec: AttemptSpec, result: AttemptResult) -> AttemptResult:
    """Write a large value to the job's storage, if it has one, which may take a while; refuse one above the limit."""
    value = result.value
    if value is None or not is_large(value):
        return result
    sendable = isinstance(value, LargeValue) and len(value) <= SIZE_LIMIT_BYTES
    if sendable and not attempt_spec.spec.result_storage:
        return result
    from fray.runtime.controller_client.large_results import write_result  # late: most values are small

    outcome, sent = write_result(attempt_spec, result.outcome, value)
    return evolve(result, outcome=outcome, value=sent)


def is_large(value: Value) -> bool:
    """Return whether ``value`` is too large for a message: a result, or the pickle of an error."""
    return len(value) > BLOB_LIMIT_BYTES


def stopped(message: str = "ended on request") -> AttemptResult:
    return AttemptResult(Outcome(cause=EndReason.STOPPED, message=message))


def _exit_code(error: BaseException) -> int:
    """Return the exit code the interpreter would use: ``sys.exit(3)`` is 3, ``sys.exit()`` 0, any other error 1."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


def open_attempt_runtime(
    attempt_spec: AttemptSpec, network: Network, rng: random.Random
) -> AbstractAsyncContextManager[Runtime]:
    """Open the attempt's own runtime. User code does not wait until the controller has answered."""
    has_workspace = attempt_spec.spec.environment.bundle is not None
    return open_runtime(
        network,
        [attempt_spec.controller],
        # The key of this attempt alone: a job never has the cluster's token.
        Credential(f"attempt:{attempt_spec.attempt_id}", attempt_spec.key),
        RuntimeConfig(
            role=Role.JOB,
            attempt_id=attempt_spec.attempt_id,
            job_name=attempt_spec.spec.name,
            namespace=attempt_spec.spec.namespace,
            user=attempt_spec.spec.user,
            node=attempt_spec.node,
            bundle=attempt_spec.spec.environment.bundle or "",
            environment=attempt_spec.spec.environment,
            # Resolved, since paths of children are compared with it (`fray.runtime.workspaces.upload`).
            workspace=os.path.realpath(f"{attempt_spec.directory}/{WORKSPACE_NAME}") if has_workspace else "",
            host_directory=lambda: attempt_spec.sockets or attempt_spec.directory,
            advertise=attempt_spec.advertise,
            finds_address=attempt_spec.finds_address,
            networked=attempt_spec.networked,
        ),
        rng=rng,
    )


def open_payload(content: Bytes) -> Work:
    """Unpickle ``(callable or class, args, kwargs)``, which runs imports of the user's code.

    Arrays are views of ``content`` if that is writable, so nothing else may use it.
    """
    fn, args, kwargs = loads_value(content, owned=not memoryview(content).readonly)
    return fn, args, kwargs


async def run_callable(attempt_spec: AttemptSpec, work: Work, stage: SyncRunner) -> AttemptResult:
    """Run a job's callable within the current runtime."""
    fn, args, kwargs = work
    what = f"job {attempt_spec.spec.name!r}"
    try:
        # Only a declared coroutine function is awaited here: a sync function would block the loop before it shows what
        # it returns.
        if is_async(fn):
            return succeeded(await fn(*args, **kwargs), what)
        return succeeded(await stage.run_sync(lambda: fn(*args, **kwargs)), what)
    except BaseException as error:  # any error of user code is its outcome
        _, rest = split_cancelled(error)
        if rest is None:
            raise
        return failed(rest)


def is_async(fn: Any) -> bool:
    """Return whether a call of ``fn`` returns a coroutine, also for ``functools.partial`` and callable objects."""
    # A plain function may have an attribute `func` of its own.
    while hasattr(fn, "func") and not inspect.isfunction(fn):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


async def run_actor(attempt_spec: AttemptSpec, work: Work, runtime: Runtime, stage: SyncRunner) -> AttemptResult:
    """Construct the actor and serve it under its job's id and name until it ends, or the attempt is cancelled.

    An error of the constructor is the error of each call, not only the cause of an `ActorDied`: it says what to fix,
    and callers catch it by its type.
    """
    cls, args, kwargs = work
    spec, config = attempt_spec.spec, attempt_spec.spec.actor or ActorConfig()
    job_id = runtime.job_id or ""
    life = ActorLifecycle(job_id, spec.name, cls, incarnation=runtime.session, group=spec.group, index=spec.index)
    # Set before the constructor, whose code may ask for its actor.
    lifecycle_var.set(life)
    constructing = False
    # The constructor, all calls and the cleanup share one thread: some objects may only be used where they were made.
    with actor_of_process(life), _thread_for(cls, config, runtime, stage) as thread:
        try:
            # Before the constructor, which may give away its own handle.
            await host_of(runtime).listen()
            # The distinction decides what callers see: the constructor's own error, or the death of an actor that
            # served.
            constructing = True
            # Without a thread it blocks the loop, which reads the requests otherwise.
            with interrupted_by_end() if thread is None else nullcontext():
                instance = await construct(life, args, kwargs, thread)
            constructing = False
            # Here and not before the launch: the class is known only where it is unpickled.
            if check_class(cls, config):
                life.checkpoints = checkpoints = Checkpoints(runtime, life, instance, thread, config)
                # The first generation has nothing to restore, and asking costs a round trip.
                if split_attempt(attempt_spec.attempt_id)[1] > 0:
                    await checkpoints.restore()
        except BaseException as error:  # the constructor's error is the actor's outcome
            _, rest = split_cancelled(error)
            if rest is None:
                raise
            return failed(rest, constructing=constructing)
        # More threads only now, with the context variables that the constructor has set in the first one.
        if isinstance(thread, ThreadExecutor) and life.context is not None:
            life.context.run(thread.ensure_threads, config.max_concurrency or 1)
        number = host_of(runtime).register(
            instance,
            spec.name,
            actor_id=job_id,
            max_concurrency=config.max_concurrency,
            concurrency_groups=config.concurrency_groups,
            executor=thread,
            lifecycle=life,
            kill_after_s=config.kill_after_s,
        )
        # Announced after it is registered at the host: the address leads to an actor that is there.
        async with open_background_nursery() as nursery:
            nursery.start_soon(_announce, runtime, spec.name, number)
            if attempt_spec.spec.health is not None and attempt_spec.spec.health.actor is not None:
                nursery.start_soon(_run_health_checks, runtime, number, attempt_spec.spec.health)
            # Jobs in the process of their cluster, as in simulations, do not wake every few seconds for this.
            if runtime.services.find(IN_PROCESS_REPORTER) is None:
                nursery.start_soon(_report_calls, runtime)
            if isinstance(life.checkpoints, Checkpoints) and config.checkpoint_every_s is not None:
                nursery.start_soon(life.checkpoints.take_every, config.checkpoint_every_s)
            ending = await serve_until_shutdown(host_of(runtime), number, life, config)
        if ending.error is None:
            return AttemptResult(
                Outcome(cause=EndReason.SUCCEEDED, exit_code=0, message=ending.text), pickling.dumps(None, "None")
            )
        return evolve(failed(ending.error), ignores_cancel=isinstance(ending.error, CancelIgnored))


@contextmanager
def _thread_for(cls: type, config: ActorConfig, runtime: Runtime, stage: SyncRunner) -> Iterator[SerialExecutor | None]:
    """Yield the executor of an all-sync class, also for constructor and cleanup; None if it has async methods."""
    if has_async_methods(cls):
        yield None
        return
    thread = stage.executor(runtime)
    if thread is not None:
        yield thread
        return
    # Of the actor server, which in the simulation makes one without threads.
    thread = host_of(runtime).make_executor(runtime.job_name, config.max_concurrency or 1)
    try:
        yield thread
    finally:
        thread.stop()


async def _run_health_checks(runtime: Runtime, number: int, check: HealthCheck) -> None:
    from fray.runtime.process.health_method import run_health_checks  # late: few actors have checks

    reporter = reporter_of(runtime)
    if reporter is not None:
        await run_health_checks(host_of(runtime).actors[number], check, reporter)


async def _report_calls(runtime: Runtime) -> None:
    """Report the calls of the process's actors while they change, until cancelled."""
    host = host_of(runtime)
    reported = host.calls()
    while True:
        await trio.sleep(CALLS_EVERY_S)
        served = host.calls()
        # Not before there is a report: in a zygote's warm-up, which ends earlier, it would be found that there is no
        # pipe, and that is remembered.
        if served != reported and (reporter := reporter_of(runtime)) is not None:
            reported = served
            reporter.report_calls(served)


async def _announce(runtime: Runtime, name: str, number: int) -> None:
    endpoint = make_endpoint(runtime, runtime.job_id or "", name, number)
    # The scheduler checked the uniqueness of the name when the job was accepted.
    await registrations_of(runtime).add(endpoint)


async def run_work(attempt_spec: AttemptSpec, work: Work, runtime: Runtime, stage: SyncRunner) -> AttemptResult:
    """Run the unpickled payload within the current runtime."""
    with tracing.attempt_span(attempt_spec) as ended:
        if attempt_spec.spec.entry is EntryKind.ACTOR:
            result = await run_actor(attempt_spec, work, runtime, stage)
        else:
            result = await run_callable(attempt_spec, work, stage)
        ended(result.outcome)
    return result


async def run_in_runtime(
    attempt_spec: AttemptSpec,
    network: Network,
    rng: random.Random,
    cancel: trio.CancelScope,
    work: Callable[[Runtime], Awaitable[AttemptResult]],
) -> AttemptResult | None:
    """Run ``work`` within the attempt's own runtime; None if ``cancel`` ended it.

    The runtime of a cancelled actor stays open during its cleanup, which may still call other actors.
    """
    # Where the scope lies is the difference: around the actor only, or around the runtime as well.
    if attempt_spec.spec.entry is EntryKind.ACTOR:
        async with open_attempt_runtime(attempt_spec, network, rng) as runtime:
            with cancel:
                return await work(runtime)
            return None
    with cancel:
        async with open_attempt_runtime(attempt_spec, network, rng) as runtime:
            return await work(runtime)
    return None


async def run_attempt(
    attempt_spec: AttemptSpec,
    content: Bytes,
    network: Network,
    stage: SyncRunner,
    *,
    rng: random.Random,
    cancel: trio.CancelScope,
    on_report: Callable[[AttemptReport], object] = lambda report: None,
) -> AttemptResult:
    """Run the whole attempt inside this loop. If it is cancelled, the outcome is STOPPED.

    Args:
        on_report: receives the progress and health reports of the attempt.
    """
    # Context variables and not globals or `os.environ`: in one process several attempts run at once.
    current_job.bind_task(attempt_spec)
    result: AttemptResult | None = None

    async def work(runtime: Runtime) -> AttemptResult:
        nonlocal result
        runtime.services.provide(IN_PROCESS_REPORTER, lambda: InProcessReporter(runtime.token, on_report))
        try:
            opened = open_payload(content)
        # A result, so that an import error is reported like an error of the code.
        except BaseException as error:  # noqa: BLE001  # unpickling runs the user's imports
            result = failed(error)
        else:
            result = await run_work(attempt_spec, opened, runtime, stage)
        return result

    try:
        result = await run_in_runtime(attempt_spec, network, rng, cancel, work)
    # Its code may raise while it is being cancelled. Then STOPPED would hide an error, and a finished result must not
    # get lost.
    except Exception as error:  # noqa: BLE001  # what user code raised while it was being cancelled
        result = result or failed(error)
    if result is not None and result.value is not None and is_large(result.value):
        # After the runtime is closed: writing to storage may take minutes, and nothing of the attempt has to wait for
        # it.
        return await trio.to_thread.run_sync(store_if_large, attempt_spec, result)
    return result or stopped()
