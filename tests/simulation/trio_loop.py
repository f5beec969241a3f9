"""Trio's loop without what no simulation uses: sockets, instruments, a host's loop, a clock that jumps by itself.

Tasks run in the same order as in Trio's own, and see the same.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import trio
from outcome import Error, Value

_trio_run: Any = trio._core._run
_SHIELDED_CHECKPOINT: Any = trio._core._traps.CancelShieldedCheckpoint

PASSES_LIMIT = 200_000
"""Turns of the loop without any time passing, after which it counts as an endless loop."""
POLL_TURNS = 1000
"""Turns of the loop after which it looks at its sockets in any case."""


@contextmanager
def plain_loop(stuck: trio.CancelScope) -> Iterator[None]:
    """Use the loop of this module for `trio.run` in this thread while entered.

    Args:
        stuck: cancelled after `PASSES_LIMIT` turns without any time passing.
    """
    original, reschedule, thread_id = _trio_run.unrolled_run, _trio_run.Runner.reschedule, threading.get_ident()

    def run_tasks(runner: Any, main: Any, args: Any, *options: Any, **more: Any) -> Any:
        if threading.get_ident() != thread_id:
            return original(runner, main, args, *options, **more)
        return _turns(runner, main, args, stuck)

    def reschedule_plainly(runner: Any, task: Any, next_send: Any = _NOTHING) -> None:
        # Loops of other threads.
        if runner.is_guest or runner.instruments:
            reschedule(runner, task, next_send)
            return
        assert task._next_send_fn is None
        task._next_send_fn = task.coro.send
        task._next_send = next_send
        task._abort_func = task.custom_sleep_data = None
        runner.runq.append(task)

    with (
        mock.patch.object(_trio_run, "unrolled_run", run_tasks),
        mock.patch.object(_trio_run.Runner, "reschedule", reschedule_plainly),
    ):
        yield


class _Nothing:
    """Result of a wait that has none. (An `outcome.Value` can be used only once.)"""

    def unwrap(self) -> None:
        pass


_NOTHING = _Nothing()


def _number_of(task: Any) -> int:
    return int(task._counter)


@trio.lowlevel.enable_ki_protection
def _turns(runner: Any, main: Any, args: Any, stuck: trio.CancelScope) -> Generator[float, Any, None]:
    """Run all tasks, as `unrolled_run` does; yield when the system is to be asked for events.

    Finalizers and signals (Ctrl-C) wake the loop by a socket.
    """
    context, clock, deadlines = _trio_run.GLOBAL_RUN_CONTEXT, runner.clock, runner.deadlines
    entries, queue = runner.entry_queue, runner.runq
    time, passes, turns = -1.0, 0, 0
    try:
        entries.wakeup.wakeup_on_signals()
        clock.start_clock()
        runner.init_task = runner.spawn_impl(runner.init, (main, args), None, "<init>", system_task=True)
        while runner.tasks:
            if not queue:
                clock.deadline_to_sleep_time(deadlines.next_deadline())
            now = clock.now
            passes = passes + 1 if now == time else 0
            time = now
            if passes > PASSES_LIMIT:
                stuck.cancel()
            turns += 1
            if entries.queue or entries.idempotent_queue or turns % POLL_TURNS == 0:
                events = yield 0.0
                runner.io_manager.process_events(events)
            heap = deadlines._heap
            if heap and heap[0][0] <= now:
                deadlines.expire(now)
            batch = list(queue)
            queue.clear()
            if len(batch) > 1:
                batch.sort(key=_number_of)
                _trio_run._r.shuffle(batch)
            while batch:
                context.task = task = batch.pop()
                send, value = task._next_send_fn, task._next_send
                task._next_send_fn = task._next_send = None
                message = ended = None
                try:
                    message = task.context.run(send, value)
                except StopIteration as stop:
                    ended = Value(stop.value)
                except BaseException as error:  # noqa: BLE001  # its nursery gets it
                    ended = _failure(error)
                if ended is not None:
                    runner.task_exited(task, ended)
                else:
                    task._schedule_points += 1
                    if message is _SHIELDED_CHECKPOINT:
                        runner.reschedule(task)
                    else:
                        task._cancel_points += 1
                        task._abort_func = message.abort_func
                        if runner.ki_pending and task is runner.main_task:
                            task._attempt_delivery_of_pending_ki()
                        task._attempt_delivery_of_any_pending_cancel()
                del context.task
                # What has ended would otherwise live until the next task runs.
                del task, send, value, message, ended
    except (GeneratorExit, trio.TrioInternalError):
        raise
    except BaseException as error:
        raise trio.TrioInternalError("internal error in Trio, or in its loop of simulations") from error
    finally:
        runner.close()
        context.__dict__.clear()
        if runner.ki_pending:
            runner.main_task_outcome = Error(KeyboardInterrupt())


def _failure(error: BaseException) -> Error:
    """Return the outcome of a task, with a traceback that begins in the task."""
    traceback = error.__traceback__
    for _ in range(1 + _trio_run.CONTEXT_RUN_TB_FRAMES):
        traceback = traceback and traceback.tb_next
    return Error(error.with_traceback(traceback))
