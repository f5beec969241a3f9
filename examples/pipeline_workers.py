"""Actors of the pipeline example: workers that pull tasks, and the coordinator that assigns them.

The coordinator is in one call, `run_pipeline`, for the whole run, while the workers call it: so it needs a
``max_concurrency``. Calls carry shards and numbers of rows, never the rows. The worker registers in its constructor,
and a thread that it starts there does the work. The coordinator has one open call to each worker, `sit`, which ends
when the worker does, so that a loss is seen at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from fray.v2 import ActorGroup, ActorHandle, current_actor
from pipeline_ledger import Ledger, ShardFailed
from pipeline_plan import Piece, Plan, Stage
from pipeline_shards import Store, finished_shards, open_output, rows_in, run_shard

log = logging.getLogger("pipeline")

POLL_S = 0.5
"""Seconds that `pull` waits for a task, and that a worker's thread may run after the worker's end."""
TICK_S = 0.05
"""Seconds between two checks of the workers by the coordinator."""

Place: TypeAlias = tuple[str, int]
"""Machine and process."""


def this_place() -> Place:
    """Return the machine (with its process namespace) and this process."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = os.uname().nodename
    return machine, os.getpid()


@dataclass(frozen=True)
class ExecutionHint:
    """Options of an execution: where its shards are stored, and whether a worker shall die during its first shard."""

    output: str
    kill_worker: bool = False


class NoTask(Enum):
    """Answer to a worker in place of a task."""

    WAIT = "no task now: call again"
    REGISTER = "considered lost: register again"


@dataclass(frozen=True)
class Task:
    """Shard of a stage of a run: its input, operations and output."""

    run: int
    output: str
    root: str
    stage: Stage
    shard: int
    attempt: int
    pieces: Sequence[Piece]
    die: bool = False


class Died(BaseException):
    """Replacement of SIGKILL where workers are threads."""


# The worker ----------------------------------------------------------------------------------------------------------


class ZephyrWorker:
    """Computes shards, one at a time, until it is ended. Its methods need a ``max_concurrency`` of two or more."""

    def __init__(self, coordinator: ActorHandle) -> None:
        self._coordinator, self._me = coordinator, current_actor()
        self._ended = threading.Event()
        self._name, self._boss = "", ("", 0)
        self._register()
        threading.Thread(target=self._work, name=f"work of {self._name}", daemon=True).start()

    def sit(self) -> None:
        """Return when this worker has ended."""
        self._ended.wait()

    def run_stage(self, task: Task) -> int:
        """Compute a shard; return the number of rows written. Raises what the operations raise."""
        store = Store(task.output)
        die = self._die if task.die else lambda: None
        return run_shard(store, task.root, task.stage, task.shard, task.pieces, die)

    def _register(self) -> None:
        self._name, self._boss = self._coordinator.register(self._me.handle, self._me.index, this_place())

    def _work(self) -> None:
        try:
            while not self._me.shutdown_event.is_set():
                task = self._coordinator.pull(self._name)
                if task is NoTask.REGISTER:
                    self._register()
                elif task is not NoTask.WAIT:
                    self._do(task)
        except Died:
            self._me.terminate()
        except RuntimeError as error:  # of a call to the coordinator: it has ended, so the worker ends
            log.info("%s ends: %s", self._name, error)
        finally:
            self._ended.set()

    def _do(self, task: Task) -> None:
        about = (self._name, (task.run, task.stage.name), task.shard, task.attempt)
        try:
            rows = self.run_stage(task)
        except Exception:  # noqa: BLE001 (the coordinator decides about errors of operations)
            self._coordinator.fail(*about, traceback.format_exc())
        else:
            self._coordinator.succeed(*about, rows)

    def _die(self) -> None:
        """End for ``--kill-worker``, after the shard is written and before it has its name."""
        if this_place() != self._boss:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Died


# The coordinator -----------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """State of a worker in its coordinator."""

    handle: ActorHandle
    index: int
    place: Place
    sitting: Any = None

    def gone(self) -> bool:
        """True if the worker has ended or cannot be reached; other workers get its shards."""
        try:
            self.sitting = self.sitting or self.handle.sit.remote()
            self.sitting.result(timeout=0)
        except TimeoutError:
            return False
        except Exception as error:  # noqa: BLE001 (any error means that it does not answer)
            log.info("worker %s is lost: %s", self.index, error)
        return True


class Coordinator:
    """Assigns shards, stage by stage. One plan at a time."""

    def __init__(self, board: ActorHandle | None = None) -> None:
        self._board, self._me = board, current_actor()
        self._shown: Any = None
        self._changed = threading.Condition()
        self._workers: dict[str, Watched] = {}
        self._comings: dict[int, int] = {}
        self._run = 0
        self._plan: Plan | None = None
        self._stage: Stage | None = None
        self._ledger: Ledger | None = None
        self._hint = ExecutionHint("")
        self._to_die = False
        self._lost: list[dict[str, Any]] = []
        self._failure: ShardFailed | None = None

    # Called by workers

    def register(self, handle: ActorHandle, index: int, place: Place) -> tuple[str, Place]:
        """Register a worker; if it has restarted, its predecessor is lost. Return its name, and the coordinator's
        place."""
        with self._changed:
            for name in [name for name, known in self._workers.items() if known.index == index]:
                self._lose(name)
            self._comings[index] = self._comings.get(index, 0) + 1
            again = self._comings[index]
            name = f"worker-{index}" + (f" (start {again})" if again > 1 else "")
            self._workers[name] = Watched(handle, index, place)
            return name, this_place()

    def pull(self, worker: str) -> Task | NoTask:
        """Return the next task; wait for one up to `POLL_S` seconds."""
        give_up_at = time.monotonic() + POLL_S
        with self._changed:
            while worker in self._workers:
                if (task := self._task_for(worker)) is not None:
                    return task
                if not self._changed.wait(give_up_at - time.monotonic()):
                    return NoTask.WAIT
        return NoTask.REGISTER

    def _task_for(self, worker: str) -> Task | None:
        if self._ledger is None or self._failure is not None:
            return None
        taken = self._ledger.take(worker, self._workers)
        if taken is None:
            return None
        assert self._plan is not None
        assert self._stage is not None
        die, self._to_die = self._to_die, False
        pieces = self._plan.pieces(self._stage, taken[0])
        return Task(self._run, self._hint.output, self._plan.root, self._stage, *taken, pieces, die)

    def succeed(self, worker: str, of: tuple[int, str], shard: int, attempt: int, rows: int) -> None:
        """Record a finished shard."""
        with self._changed:
            if self._ledger is not None and of == (self._run, self._ledger.stage):
                self._ledger.succeed(shard, rows)
            self._changed.notify_all()

    def fail(self, worker: str, of: tuple[int, str], shard: int, attempt: int, reason: str) -> None:
        """Record that a shard's operations raised an error."""
        with self._changed:
            try:
                if self._ledger is not None and of == (self._run, self._ledger.stage):
                    self._ledger.fail(worker, shard, attempt, reason)
            except ShardFailed as failure:
                self._failure = self._failure or failure
            self._changed.notify_all()

    def _lose(self, name: str) -> None:
        watched = self._workers.pop(name)
        story = {"worker": name, "pid": watched.place[1], "shards": []}
        try:
            if self._ledger is not None:
                story["shards"] = [f"{self._ledger.stage} {shard}" for shard in self._ledger.lose(name)]
        except ShardFailed as failure:
            self._failure = self._failure or failure
        self._lost.append(story)
        self._changed.notify_all()

    # Called by the driver

    def run_pipeline(self, plan: Plan, hint: ExecutionHint, workers: ActorGroup) -> dict[str, Any]:
        """Execute a plan; return a summary. Finished shards are not computed again.

        Raises:
            ShardFailed: a shard failed too often.
            RuntimeError: all workers have ended.
            OtherPlan: the output belongs to another plan.
        """
        store, half_written = open_output(hint.output, plan)
        with self._changed:
            self._run += 1
            self._plan, self._hint, self._to_die, self._failure = plan, hint, hint.kill_worker, None
            self._lost.clear()
        try:
            stages = [self._run_stage(stage, store, workers) for stage in plan.stages]
        finally:
            with self._changed:
                self._ledger = None
        return {"stages": stages, "lost": list(self._lost), "half_written": half_written}

    def _run_stage(self, stage: Stage, store: Store, workers: ActorGroup) -> dict[str, Any]:
        began = time.monotonic()
        finished = finished_shards(store, stage)
        ledger = Ledger(stage.name, stage.shards, finished)
        with self._changed:
            self._stage, self._ledger = stage, ledger
            self._changed.notify_all()
        while not ledger.finished():
            if self._me.shutdown_event.is_set():
                raise RuntimeError("the coordinator was ended; run it again to continue from the finished shards")
            self._look_after(workers)
            self._show(ledger, False)
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(TICK_S)
        self._show(ledger, True)
        rows = sum(ledger.rows.values()) + sum(rows_in(store, stage.file(shard)) for shard in finished)
        seconds = round(time.monotonic() - began, 3)
        counts = {"shards": stage.shards, "skipped": ledger.skipped, "retried": ledger.retried, "rows": rows}
        return {"stage": stage.name, **counts, "seconds": seconds}

    def _look_after(self, workers: ActorGroup) -> None:
        """Find new and lost workers. Calls to workers are made without the lock, as they may wait for a new worker."""
        with self._changed:
            known = dict(self._workers)
        gone = [name for name, watched in known.items() if watched.gone()]
        with self._changed:
            for name in gone:
                if self._workers.get(name) is known[name]:
                    self._lose(name)
            alone = not self._workers
        if alone and workers.is_done():
            raise RuntimeError("all workers have ended; run it again to continue from the finished shards")

    def _show(self, ledger: Ledger, last: bool) -> None:
        """Send the progress to the board; skip it while the last one is on its way, except at the end."""
        if self._board is None or (not last and self._shown is not None and not _answered(self._shown)):
            return
        with self._changed:
            progress = {"stage": ledger.stage, "done": ledger.done, "shards": ledger.shards, "busy": ledger.busy}
            progress |= {"skipped": ledger.skipped, "retried": ledger.retried, "workers": len(self._workers)}
            progress |= {"lost": list(self._lost)}
        self._shown = self._board.show.remote(progress)
        if last:
            self._shown.result()


def _answered(future: Any) -> bool:
    try:
        future.result(timeout=0)
    except TimeoutError:
        return False
    return True
