"""The actors of the pipeline example: workers that pull tasks, and the coordinator that has them.

The coordinator sits in one call, `run_pipeline`, for the whole run, while the workers call it: so it needs a
``max_concurrency``. What travels by calls is which shard to do, and how many rows it had; never the rows. The worker
registers in its constructor, and a thread that it starts there does the work. The coordinator keeps one call open to
each worker, `sit`: it ends when the worker does, and that is how a loss is seen at once.
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
"""A worker's `pull` waits so long for a task; and so long after its end a worker's thread may go on."""
TICK_S = 0.05
"""How often the coordinator looks after its workers."""

Place: TypeAlias = tuple[str, int]
"""Machine and process."""


def this_place() -> Place:
    """The machine (with its processes' name space) and this process."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = os.uname().nodename
    return machine, os.getpid()


@dataclass(frozen=True)
class ExecutionHint:
    """How a plan is executed: where its shards are stored, and whether a worker shall die of its first shard."""

    output: str
    kill_worker: bool = False


class Told(Enum):
    """What a worker may hear in place of a task."""

    WAIT = "nothing to do now: ask again"
    REGISTER = "you were thought lost: register again"


@dataclass(frozen=True)
class Task:
    """One shard of one stage of one run: what to read, what to do with it, where to write it."""

    run: int
    output: str
    root: str
    stage: Stage
    shard: int
    attempt: int
    pieces: Sequence[Piece]
    die: bool = False


class Died(BaseException):
    """What takes the place of SIGKILL where a worker is no process of its own."""


# The worker ----------------------------------------------------------------------------------------------------------


class ZephyrWorker:
    """Does shards, one at a time, until it is ended. Its methods need a ``max_concurrency`` of two or more."""

    def __init__(self, coordinator: ActorHandle) -> None:
        self._coordinator, self._me = coordinator, current_actor()
        self._ended = threading.Event()
        self._name, self._boss = "", ("", 0)
        self._register()
        threading.Thread(target=self._work, name=f"work of {self._name}", daemon=True).start()

    def sit(self) -> None:
        """Returns when this worker does no more."""
        self._ended.wait()

    def run_stage(self, task: Task) -> int:
        """Do one shard; the number of rows written. Raises what the operations raise."""
        store = Store(task.output)
        die = self._die if task.die else lambda: None
        return run_shard(store, task.root, task.stage, task.shard, task.pieces, die)

    def _register(self) -> None:
        self._name, self._boss = self._coordinator.register(self._me.handle, self._me.index, this_place())

    def _work(self) -> None:
        try:
            while not self._me.shutdown_event.is_set():
                told = self._coordinator.pull(self._name)
                if told is Told.REGISTER:
                    self._register()
                elif told is not Told.WAIT:
                    self._do(told)
        except Died:
            self._me.terminate()
        except RuntimeError as error:  # of a call to the coordinator: it has ended, and so have we
            log.info("%s ends: %s", self._name, error)
        finally:
            self._ended.set()

    def _do(self, task: Task) -> None:
        about = (self._name, (task.run, task.stage.name), task.shard, task.attempt)
        try:
            rows = self.run_stage(task)
        except Exception:  # noqa: BLE001 (whatever the operations raise is the coordinator's to judge)
            self._coordinator.fail(*about, traceback.format_exc())
        else:
            self._coordinator.succeed(*about, rows)

    def _die(self) -> None:
        """``--kill-worker``: with the shard written, and not named."""
        if this_place() != self._boss:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Died


# The coordinator -----------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A worker as its coordinator has it."""

    handle: ActorHandle
    index: int
    place: Place
    sitting: Any = None

    def gone(self) -> bool:
        """Whether it does no more, or cannot be reached: either way, others do its shards."""
        try:
            self.sitting = self.sitting or self.handle.sit.remote()
            self.sitting.result(timeout=0)
        except TimeoutError:
            return False
        except Exception as error:  # noqa: BLE001 (there is no answer from it)
            log.info("worker %s is lost: %s", self.index, error)
        return True


class Coordinator:
    """Deals out shards, stage by stage. One plan at a time."""

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

    # What workers call

    def register(self, handle: ActorHandle, index: int, place: Place) -> tuple[str, Place]:
        """A worker is there, perhaps again: then its former self is not. Its name, and where the coordinator is."""
        with self._changed:
            for name in [name for name, known in self._workers.items() if known.index == index]:
                self._lose(name)
            self._comings[index] = self._comings.get(index, 0) + 1
            again = self._comings[index]
            name = f"worker-{index}" + (f" (come {again} times)" if again > 1 else "")
            self._workers[name] = Watched(handle, index, place)
            return name, this_place()

    def pull(self, worker: str) -> Task | Told:
        """The next task; waits for one a little while."""
        give_up_at = time.monotonic() + POLL_S
        with self._changed:
            while worker in self._workers:
                if (task := self._task_for(worker)) is not None:
                    return task
                if not self._changed.wait(give_up_at - time.monotonic()):
                    return Told.WAIT
        return Told.REGISTER

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
        """A shard is written."""
        with self._changed:
            if self._ledger is not None and of == (self._run, self._ledger.stage):
                self._ledger.succeed(shard, rows)
            self._changed.notify_all()

    def fail(self, worker: str, of: tuple[int, str], shard: int, attempt: int, reason: str) -> None:
        """A shard's operations raised."""
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

    # What the driver calls

    def run_pipeline(self, plan: Plan, hint: ExecutionHint, workers: ActorGroup) -> dict[str, Any]:
        """All of it; returns what happened. Shards that are finished already are not done again.

        Raises:
            ShardFailed: a shard was given up.
            RuntimeError: all workers have ended.
            OtherPlan: the output is that of another plan.
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
                raise RuntimeError("the coordinator was ended; what is finished stays, run it again")
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
        """Calls of workers are made without the lock: they may have to wait for one that is just being made."""
        with self._changed:
            known = dict(self._workers)
        gone = [name for name, watched in known.items() if watched.gone()]
        with self._changed:
            for name in gone:
                if self._workers.get(name) is known[name]:
                    self._lose(name)
            alone = not self._workers
        if alone and workers.is_done():
            raise RuntimeError("all workers of the pipeline have ended; what is finished stays, run it again")

    def _show(self, ledger: Ledger, last: bool) -> None:
        """To the board; if it has not seen the former yet, only what is last."""
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
