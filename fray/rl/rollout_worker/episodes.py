"""Episodes of a run whose steps are those of NexRL's rollout workers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import trio

from fray.errors import InvalidRequest
from fray.rl.data import lack_text
from fray.rl.inference.client import LLM
from fray.rl.inference.service_client import EpisodeBackend
from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy
from fray.rl.nexrl.experiment_posts import episode_posts
from fray.rl.nexrl_types import Trajectory
from fray.rl.rollout.scores import AttemptEnded, MadeTrajectories
from fray.rl.rollout_worker.base_rollout_worker import RE_ROLLOUT, SUCCESS, BaseRolloutWorker
from fray.rl.rollout_worker.made_trajectories import missing_key

WorkerClass: TypeAlias = Callable[[Mapping[str, Any]], BaseRolloutWorker]
ALWAYS_NEEDED = ("tokens", "loss_mask")
NAMED_LATER = ("group_id", "run_id", "task_id")
"""Keys that a rollout process adds."""


class WorkerEpisode:
    """Episode of a run: one step of a worker. Each worker has one task at a time.

    Args:
        worker_class: makes workers.
        config: of the workers.
        needs: keys that the trainer needs in each trajectory, beside tokens and mask.
    """

    def __init__(self, worker_class: WorkerClass, config: Mapping[str, Any], needs: Sequence[str] = ()) -> None:
        self._worker_class, self._config = worker_class, config
        self._needs = tuple(dict.fromkeys([*ALWAYS_NEEDED, *(key for key in needs if key not in NAMED_LATER)]))
        self._idle: list[BaseRolloutWorker] = []
        self._made = 0
        # As many threads as there are episodes, which the rollout process limits.
        self._threads: trio.CapacityLimiter | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the workers."""
        return self._config

    def check(self, rows: Sequence[Mapping[str, Any]], validation_rows: Sequence[Mapping[str, Any]]) -> None:
        """Check configuration and data.

        Raises:
            InvalidRequest: as `BaseRolloutWorker.check_config`, or `check_rows`.
        """
        if isinstance(self._worker_class, type) and issubclass(self._worker_class, BaseRolloutWorker):
            self._worker_class.check_config(self._config)
        self.check_rows(rows, "data")
        self.check_rows(validation_rows, "validation_data")

    def check_rows(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Check that each row has `BaseRolloutWorker.needed_keys`.

        Args:
            rows: the rows.
            name: of the setting, for the message.

        Raises:
            InvalidRequest: one lacks a key; the message has its number from 0, its keys, and those that look like it.
        """
        needed = getattr(self._worker_class, "needed_keys", ())
        for number, row in enumerate(rows):
            for names in ((one,) if isinstance(one, str) else one for one in needed):
                if not any(name in row for name in names):
                    kind = getattr(self._worker_class, "__qualname__", "")
                    raise InvalidRequest(
                        f"invalid {name}: {kind} cannot use row {number}, which {lack_text(row, names)}"
                    )

    def needing(self, needs: Sequence[str]) -> WorkerEpisode:
        """Return the same with the keys that a trainer needs."""
        return WorkerEpisode(self._worker_class, self._config, needs)

    def __repr__(self) -> str:
        # The configuration may have keys of services.
        name = getattr(self._worker_class, "__qualname__", type(self._worker_class).__qualname__)
        config = sha256(repr(self._config).encode()).hexdigest()[:8]
        return f"WorkerEpisode({name}, configuration {config})"

    def __reduce__(self) -> Any:
        # Each process makes workers of its own.
        return WorkerEpisode, (self._worker_class, self._config, self._needs)

    async def __call__(self, task: dict[str, Any], llm: LLM) -> MadeTrajectories:
        """Roll out a task, and return its trajectories.

        Raises:
            AttemptEnded: the step did not succeed, or a trajectory lacks a key.
        """
        worker = self._idle.pop() if self._idle else await self._make_worker()
        sink = _EpisodeSink(self._needs, task)
        worker.set_module_references(sink, sink, None, sink, sink)
        tracker = ActivityTracker(self._config)
        if (posts := episode_posts.get()) is not None:
            tracker.experiment_logger.elsewhere = posts.queue.post
            tracker.set_training_step(posts.step)
        worker.set_activity_tracker(ActivityTrackerProxy(tracker))
        worker._llm_client.set_backend(EpisodeBackend(llm, trio.lowlevel.current_trio_token()))
        worker._llm, worker._replies = llm, llm.replies
        is_validation = bool(task.get("is_val"))
        if inspect.iscoroutinefunction(worker.step):
            worker._current_task, worker._is_running_validate = task, is_validation
            answer = await worker.step(task)
        else:
            answer = await self._in_thread(worker._roll_out, task, is_validation)
        # A worker whose step was cancelled may still be used by its thread: it gets no further task.
        self._idle.append(worker)
        if answer == RE_ROLLOUT or sink.is_put_back:
            raise AttemptEnded(RE_ROLLOUT, is_attempt=False)
        if answer != SUCCESS:
            why = tracker.get_error_health_status()
            detail = f"; {why['message']}" if why["status"] != "healthy" else ""
            raise AttemptEnded("step_failed", f"step returned {answer!r}{detail}")
        if not sink.trajectories:
            raise AttemptEnded("no_trajectory", "step returned 'success' without putting a trajectory")
        return MadeTrajectories(tuple(sink.trajectories), tuple(sink.added))

    async def _make_worker(self) -> BaseRolloutWorker:
        worker: BaseRolloutWorker = await self._in_thread(self._worker_class, self._config)
        worker.set_module_name(f"rollout_worker-{self._made}")
        self._made += 1
        return worker

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._threads = self._threads or trio.CapacityLimiter(math.inf)
        # Abandoned at the limit of the episode: a step that does not return must not hold the process.
        return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=self._threads)


class _EpisodeSink:
    """References of a worker for one task: its pool, loaders and validator."""

    def __init__(self, needs: Sequence[str], task: Mapping[str, Any]) -> None:
        self._needs, self._task = needs, task
        self.trajectories: list[Trajectory] = []
        self.is_put_back = False
        self.added: list[tuple[dict[str, Any], bool]] = []
        """Rows for the data of the run, and whether they go in front."""

    def put_trajectory(self, trajectory: Trajectory) -> str:
        if (problem := missing_key(trajectory, self._needs)) is not None:
            raise ValueError(problem)
        self.trajectories.append(trajectory)
        return SUCCESS

    def get_next_item(self) -> None:
        """Return None: a step has one task."""

    def add_item(self, item: dict[str, Any]) -> None:
        self.added.append((dict(item), False))

    add_item_back = add_item

    def add_item_front(self, item: dict[str, Any]) -> None:
        if item == self._task:
            self.is_put_back = True
        else:
            self.added.append((dict(item), True))
