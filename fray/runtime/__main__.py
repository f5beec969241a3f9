"""Main module of an attempt's process, called by `fray.node.job_process.bootstrap`.

Contract: sync user code runs on the main thread, with the loop in a thread beside it, started when it is first needed;
async user code runs under `trio.run` on the main thread. A request to end reaches async code as cancellation and sync
code as KeyboardInterrupt, after which Python programs already clean up.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import trio
from attrs import evolve

from fray.errors import FrayError
from fray.model.specs import BLOB_LIMIT_BYTES, AttemptSpec, EntryKind
from fray.net.codec import Bytes, to_json
from fray.net.tls.identity import take_identity
from fray.net.transports.tls_listener import TlsServer
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime import tracing
from fray.runtime.actors import lifecycle
from fray.runtime.actors.methods import has_async_methods
from fray.runtime.actors.server import ACTOR_HOST
from fray.runtime.process import attempt, current_job, end_requests, stack_dump
from fray.runtime.process.attempt import AttemptResult
from fray.runtime.runtime import Runtime, set_process_runtime
from fray.runtime.serialization import pickling
from fray.runtime.serialization.values import LargeValue
from fray.runtime.threads.executor import ThreadExecutor
from fray.runtime.threads.loop_thread import LoopThread

INTERRUPTED_WITHIN_S = 0.2
"""Seconds to wait until the main thread has been interrupted; in foreign code the interrupt comes later."""
KILLED_WITHIN_S = 0.5
"""Seconds for the ``finally`` blocks of a method that has exceeded ``kill_after_s``, before the process exits."""
CLOSE_WITHIN_S = 2.0
"""Seconds that the loop beside sync code may take to close."""


def main(attempt_spec: AttemptSpec, outcome_fd: int, control_fd: int) -> None:
    """Run the attempt, write its record to ``outcome_fd``, and return when the process may exit."""
    # One actor at most in this process, so plain threads can be attributed to it.
    lifecycle.track_process_actors()
    # Before user code is imported, which may be what hangs.
    stack_dump.enable_stack_dumps(attempt_spec.directory)
    current_job.bind_process(attempt_spec)
    # In this process, and not in the zygote, which must have no threads; before user code, which may set up its own.
    tracing.configure(attempt_spec)
    end_requests.bind_control(control_fd)
    if attempt_spec.members:
        from fray.runtime.process import jax_distributed  # only gangs need it

        jax_distributed.install()
    # After the loop has ended: nothing else is running that the write could hold up.
    ended = attempt.store_if_large(attempt_spec, _run(attempt_spec, control_fd, outcome_fd))
    # Before the record: the shim ends the process soon after it has read the outcome.
    tracing.flush()
    _flush()
    _write_record(outcome_fd, ended)


def _run(attempt_spec: AttemptSpec, control_fd: int, outcome_fd: int) -> AttemptResult:
    try:
        # In the user's process and nowhere else: unpickling runs code (P8).
        with end_requests.interrupted_by_end():
            work = attempt.open_payload(_read_payload(attempt_spec))
    except BaseException as error:  # noqa: BLE001  # unpickling runs the user's imports: its error is the outcome
        return attempt.failed(error)
    is_async = has_async_methods if attempt_spec.spec.entry is EntryKind.ACTOR else attempt.is_async
    if is_async(work[0]):
        return trio.run(_run_in_loop, attempt_spec, work, control_fd)
    if attempt_spec.spec.entry is EntryKind.ACTOR:
        return _run_sync_actor(attempt_spec, work, control_fd, outcome_fd)
    return _run_sync_callable(attempt_spec, work, control_fd)


def _read_payload(attempt_spec: AttemptSpec) -> Bytes:
    if attempt_spec.payload_path is None:
        raise FrayError("the node passed no payload", attempt_id=attempt_spec.attempt_id)
    with open(attempt_spec.payload_path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= BLOB_LIMIT_BYTES:
            return file.read()
        # Large arrays stay where the node has stored them, until the job writes to a page of them.
        return memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))


def _write_record(outcome_fd: int, ended: AttemptResult) -> None:
    """Write the outcome with the hash or size of its value, so that a value cut off by a kill is detected."""
    # The outcome first, then the value: a kill in between leaves a readable outcome without its value.
    with open(outcome_fd, "wb") as file:
        if isinstance(ended.value, LargeValue):
            file.write(to_json(evolve(ended.outcome, value_bytes=len(ended.value))).encode() + b"\n")
            # From where it is: the memory of the job may have no room for a copy.
            for view in ended.value.views:
                file.write(view)
        else:
            value = None if ended.value is None else pickling.blob_name(ended.value)
            file.write(to_json(evolve(ended.outcome, value=value)).encode() + b"\n" + (ended.value or b""))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # closed by user code, or by the reader


def _network_of(attempt_spec: AttemptSpec) -> WebSocketNetwork:
    return WebSocketNetwork(names=(attempt_spec.advertise,), tls_server=TlsServer(take_identity()))


# Async user code -----------------------------------------------------------------------------------------------------


async def _run_in_loop(attempt_spec: AttemptSpec, work: attempt.Work, control_fd: int) -> AttemptResult:
    async def run(runtime: Runtime) -> AttemptResult:
        # For threads that user code starts: they do not inherit context variables.
        set_process_runtime(lambda: runtime)
        return await attempt.run_work(attempt_spec, work, runtime, attempt.NoSyncRunner())

    async with trio.open_nursery() as nursery:
        cancel = trio.CancelScope()
        nursery.start_soon(_handle_commands, control_fd, cancel)
        network = _network_of(attempt_spec)
        result = await attempt.run_in_runtime(attempt_spec, network, random.SystemRandom(), cancel, run)
        # The task for commands never ends by itself.
        nursery.cancel_scope.cancel()
    return result or attempt.stopped()


async def _handle_commands(control_fd: int, cancel: trio.CancelScope) -> None:
    """Handle the shim's commands: ``c``: cancel; ``t``: write the tree of tasks; ``p``: preemption notice."""
    while True:
        # A pipe that the loop waits for, so no thread is needed beside async code.
        await trio.lowlevel.wait_readable(control_fd)
        word = end_requests.read_command(control_fd)
        if word is None:
            continue  # read in the constructor of the actor, which has begun since
        if word == b"c":
            cancel.cancel()
        elif word == b"t":
            stack_dump.write_tasks(stack_dump.tasks_text())
        elif word == b"p":
            current_job.set_preemption_notice()
        else:
            await trio.sleep_forever()  # closed: the shim ends the process by signals


# Sync user code ------------------------------------------------------------------------------------------------------


class _JobLoop:
    """Loop beside sync user code, in a thread of its own; `runtime` starts it."""

    def __init__(self, attempt_spec: AttemptSpec) -> None:
        self._attempt_spec = attempt_spec
        self._thread = LoopThread(self._run_loop, lambda error: self.at_end())
        self._runtime: Runtime | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._cancel = trio.CancelScope()
        self._cancelled = False
        self.task: Callable[[Runtime], Any] | None = None
        """Async function of the runtime to run in the loop; its end ends the loop."""
        self.result: Any = None
        self.at_end: Callable[[], None] = lambda: None
        """Function called on the loop's thread when the loop has ended."""

    def runtime(self) -> Runtime:
        """Return the runtime of this process; starts the loop at the first call."""
        self._thread.start()
        assert self._runtime is not None
        return self._runtime

    def close(self) -> None:
        """End the loop, bounded."""
        # A job that never used the cluster has no loop to end.
        if self._token is not None:
            self.cancel()
            self._thread.join(CLOSE_WITHIN_S)

    def show_tasks(self) -> None:
        """Write the tree of the loop's tasks; from any thread."""
        if self._token is None:
            stack_dump.write_tasks("")
            return
        try:
            self._token.run_sync_soon(lambda: stack_dump.write_tasks(stack_dump.tasks_text()))
        except trio.RunFinishedError:
            stack_dump.write_tasks("")

    def end_calls(self) -> None:
        """Answer the calls in progress now: errors their thread raises from now on come from the interrupt."""
        host = self._runtime.services.get(ACTOR_HOST) if self._runtime is not None else None
        if self._token is not None and host is not None:
            try:
                self._token.run_sync_soon(host.end_calls)
            except trio.RunFinishedError:
                pass

    def cancel(self) -> None:
        """Cancel the loop's task; from any thread."""
        # For a loop that has not been started yet: it is cancelled as soon as it begins.
        self._cancelled = True
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._cancel.cancel)
            except trio.RunFinishedError:
                pass

    async def _run_loop(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        if self._cancelled:
            self._cancel.cancel()
        network = _network_of(self._attempt_spec)
        await attempt.run_in_runtime(self._attempt_spec, network, random.SystemRandom(), self._cancel, self._run)

    async def _run(self, runtime: Runtime) -> AttemptResult:
        self._runtime = runtime
        self._thread.set_ready()
        # Beside a callable the loop only serves the main thread, until `close`.
        if self.task is None:
            await trio.sleep_forever()
        assert self.task is not None
        result: AttemptResult = await self.task(runtime)
        self.result = result
        return result


class _Interrupter:
    """Thread for the shim's commands, which turns a request to end into KeyboardInterrupt on the main thread."""

    def __init__(self, show_tasks: Callable[[], None], before: Callable[[], None], also: Callable[[], None]) -> None:
        self.requested = False
        self._show_tasks = show_tasks
        self._before = before
        self._also = also
        self._taken = threading.Event()
        self._main = threading.main_thread().ident

    def start(self, control_fd: int) -> None:
        """Start the thread; from now on KeyboardInterrupt may be raised in the calling thread, the main one."""
        # After the user's imports, which may have changed the handler. One that is installed later replaces this one,
        # as in any program.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A thread and not a signal handler for the commands: the main thread may be in foreign code for minutes.
        threading.Thread(target=self._listen, args=(control_fd,), name="fray-control", daemon=True).start()

    def _listen(self, control_fd: int) -> None:
        while word := os.read(control_fd, 1):
            if word == b"t":
                self._show_tasks()
            elif word == b"p":
                current_job.set_preemption_notice()
            # A second KeyboardInterrupt could hit the cleanup of the first one.
            elif word == b"c" and not self.requested:
                self._end()

    def _end(self) -> None:
        self.requested = True
        # Calls are answered first, so that their callers see the end of the actor and not KeyboardInterrupt.
        self._before()
        self.interrupt()
        self._taken.wait(INTERRUPTED_WITHIN_S)  # before the loop has work for that thread which must not be hit
        self._also()

    def on_interrupted(self) -> None:
        """Note that the main thread has been interrupted."""
        self._taken.set()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the main thread."""
        assert self._main is not None
        # A real signal and not `PyThreadState_SetAsyncExc`: it also interrupts a blocking system call.
        signal.pthread_kill(self._main, signal.SIGINT)


def _run_sync_callable(attempt_spec: AttemptSpec, work: attempt.Work, control_fd: int) -> AttemptResult:
    loop = _JobLoop(attempt_spec)
    set_process_runtime(loop.runtime)
    interrupter = _Interrupter(loop.show_tasks, lambda: None, lambda: None)
    fn, args, kwargs = work
    with tracing.attempt_span(attempt_spec) as on_ended:
        try:
            interrupter.start(control_fd)
            ended = attempt.succeeded(fn(*args, **kwargs), f"job {attempt_spec.spec.name!r}")
        except BaseException as error:  # noqa: BLE001  # any error of user code is its outcome
            # What the code raises after the interrupt is a consequence of the request.
            ended = attempt.stopped() if interrupter.requested else attempt.failed(error)
        _until_done(loop.close)
        on_ended(ended.outcome)
    return ended


def _run_sync_actor(attempt_spec: AttemptSpec, work: attempt.Work, control_fd: int, outcome_fd: int) -> AttemptResult:
    """Run an actor whose methods run on the main thread, called by the loop beside it."""
    # On the main thread, since signal handlers and some libraries work only there.
    executor = ThreadExecutor()
    loop = _JobLoop(attempt_spec)

    async def serve(runtime: Runtime) -> AttemptResult:
        try:
            return await attempt.run_actor(attempt_spec, work, runtime, attempt.ExistingThreadRunner(executor))
        finally:
            executor.stop()
            # The interrupt is sent only while a method runs; later it would hit the exit of the process.
            if executor.is_running and not interrupter.requested:
                interrupter.interrupt()  # the actor has ended, but its method still runs

    left = threading.Event()

    def end_of_loop() -> None:
        """Exit the process if a method still runs after it was cancelled and interrupted. Loop's thread."""
        executor.stop()
        ended = loop.result
        # The method was interrupted and still runs, so the main thread will never write the record.
        if ended is not None and ended.ignores_cancel and not interrupter.requested and not left.wait(KILLED_WITHIN_S):
            _flush()
            _write_record(outcome_fd, attempt.store_if_large(attempt_spec, ended))
            # Not `sys.exit`, which would wait for the main thread.
            os._exit(1)

    loop.task, loop.at_end = serve, end_of_loop
    set_process_runtime(loop.runtime)
    interrupter = _Interrupter(loop.show_tasks, loop.end_calls, loop.cancel)
    # On this thread, whose context variables the constructor and all calls see.
    with tracing.attempt_span(attempt_spec) as on_ended:
        try:
            interrupter.start(control_fd)
            # Started here: the loop hands the constructor and all calls to this thread.
            loop.runtime()
            executor.run_on_this_thread()
        except KeyboardInterrupt:  # requested to end, perhaps in the middle of a call
            # The cleanup hook is bounded by its own limit and must not be interrupted again.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            interrupter.on_interrupted()
            executor.run_on_this_thread(only_functions=True)  # the cleanup hook
        left.set()
        _until_done(loop.close)
        ended: AttemptResult = attempt.stopped() if loop.result is None or interrupter.requested else loop.result
        on_ended(ended.outcome)
    return ended


def _until_done(step: Callable[[], None]) -> None:
    """Run the last step without interrupts: a request to end that arrives now must not abort it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    step()
