"""Base class of NexRL's rollout workers.

In a run, `fray.rl.rollout_worker.episodes` calls `step` for each task, and the references of the worker are those of
that task. By itself, a worker has a thread that takes tasks from a data loader.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from fray.errors import InvalidRequest
from fray.rl.inference.service_client import LLMServiceClient
from fray.rl.nexrl.nexrl_module import NexRLModule
from fray.rl.nexrl_types import Trajectory
from fray.rl.recipe.user_files import load_object
from fray.rl.rollout_worker.evaluation import BaseEvaluationTarget, Evaluator
from fray.rl.rollout_worker.made_trajectories import RecordedReply, with_evaluation, with_tokens

SUCCESS, FAIL, RE_ROLLOUT = "success", "fail", "re-rollout"
IDLE_S = 0.02
"""Seconds between two questions to a loader that has no item: the guide's has no way to wait."""
ATTEMPTS = "fray_attempts"
"""Key of an item with the number of its failed attempts."""

NeededKeys: TypeAlias = Sequence[str | Sequence[str]]
READ_ROWS = ("step", "run_agent", "format_task_query")
"""Methods that read the keys of a row."""


class TrajectorySink(Protocol):
    """Pool or validator, as workers use it."""

    def put_trajectory(self, trajectory: Trajectory) -> str: ...


class TaskSource(Protocol):
    """Data loader, as workers use it."""

    def get_next_item(self) -> dict[str, Any] | None: ...
    def add_item_front(self, item: dict[str, Any]) -> None: ...


class BaseRolloutWorker(NexRLModule):
    """Rollout worker: `step` makes trajectories of one task. Subclasses define `step`, plain or ``async``.

    Args:
        config: of the worker: ``inference_service`` (for the client of the model), ``evaluator_module_path``
            (``file.py:Class``; gives a reward to trajectories without one), ``max_attempts`` (default 3).

    Raises:
        InvalidRequest: the evaluator cannot be loaded, or is not an `Evaluator`.
    """

    needed_keys: ClassVar[NeededKeys] = ()
    """Keys that the data needs: a run refuses rows without one before it starts. Several in a tuple: one of them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Which keys code of its own reads is unknown, unless it says so.
        if "needed_keys" not in vars(cls) and any(name in vars(cls) for name in READ_ROWS):
            cls.needed_keys = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._config = config
        self._llm_client = LLMServiceClient(config)
        self._llm: Any = None
        """Model of the task at hand, a `fray.rl.LLM`, for ``async`` steps."""
        self._replies: Sequence[RecordedReply] = ()
        """Replies that the model gave in this step."""
        evaluator = evaluator_class(config)
        self._evaluator = None if evaluator is None else evaluator()
        self._trajectory_pool: TrajectorySink | None = None
        self._validator: TrajectorySink | None = None
        self._dataloader: TaskSource | None = None
        self._validate_dataloader: TaskSource | None = None
        self._weight_sync_controller: Any = None
        self._is_running_validate = False
        """True while the task at hand is one of a validation."""
        self._validates_next = False
        self._current_task: dict[str, Any] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Check what the configuration of workers names: before a run starts a process. Overrides check more.

        Raises:
            InvalidRequest: a file or an object in it is missing, raises, or is of another kind.
        """
        evaluator_class(config)

    def set_module_references(
        self,
        trajectory_pool: TrajectorySink,
        dataloader: TaskSource,
        weight_sync_controller: Any = None,
        validate_dataloader: TaskSource | None = None,
        validator: TrajectorySink | None = None,
    ) -> None:
        """Set the sources of tasks and the sinks of trajectories, for training and for validation."""
        self._trajectory_pool, self._dataloader = trajectory_pool, dataloader
        self._validate_dataloader, self._validator = validate_dataloader, validator
        self._weight_sync_controller = weight_sync_controller
        if weight_sync_controller is not None:
            self._llm_client.set_weight_sync_controller(weight_sync_controller)

    @abstractmethod
    def step(self, task: dict[str, Any]) -> Any:
        """Roll out one task.

        Returns:
            ``"success"``: its trajectories are put. ``"re-rollout"``: roll it out again with the current weights.
            ``"fail"`` or None: one attempt of the task has failed. May be ``async``, and return one of them.
        """

    # A worker by itself

    def run(self) -> None:
        """Start a thread that rolls out the tasks of the data loader.

        Raises:
            RuntimeError: it runs already, or has no references to modules.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self._module_name} runs already")
        if self._dataloader is None or self._trajectory_pool is None:
            raise RuntimeError("no references to modules: call set_module_references before run")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._work, name=self._module_name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, and wait for it."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def begin_validate(self) -> None:
        """Take the next tasks from the validation's loader. The task at hand stays one of training."""
        self._validates_next = True

    def end_validate(self) -> None:
        """Take the next tasks from the training's loader."""
        self._validates_next = False

    def _work(self) -> None:
        while not self._stopping.is_set():
            # The question is part of the work: a task must not be taken while all workers look idle.
            with self._activity_tracker.track(self._module_name, "rolls out a task"):
                is_validation = self._validates_next
                task = self._get_validate_task() if is_validation else self._get_rollout_task()
                if task is not None:
                    self._handle(task, is_validation)
            if task is None:
                self._stopping.wait(IDLE_S)

    def _handle(self, task: dict[str, Any], is_validation: bool) -> None:
        """Roll out a task, and put it back unless it has succeeded or is out of attempts."""
        try:
            answer = self._roll_out(task, is_validation)
        except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
            self._activity_tracker.report_exception(self._module_name, "step", error)
            answer = None
        if answer == SUCCESS:
            return
        attempts = task.get(ATTEMPTS, 0) + (answer != RE_ROLLOUT)
        if attempts < int(self._config.get("max_attempts", 3)):
            self._put_back({**task, ATTEMPTS: attempts}, is_validation)

    def _roll_out(self, task: dict[str, Any], is_validation: bool) -> Any:
        """Call `step` with a task at hand."""
        self._current_task, self._is_running_validate = task, is_validation
        try:
            return self.step(task)
        finally:
            self._current_task, self._is_running_validate = None, False

    # What steps use

    def _get_rollout_task(self) -> dict[str, Any] | None:
        """Return the next task of training; None if there is none at the moment."""
        return None if self._dataloader is None else self._dataloader.get_next_item()

    def _get_validate_task(self) -> dict[str, Any] | None:
        """Return the next task of validation. Within a step for one, return that task: none is lost."""
        if self._is_running_validate:
            return self._current_task
        return None if self._validate_dataloader is None else self._validate_dataloader.get_next_item()

    def _put_rollout_task(self, task: dict[str, Any]) -> bool:
        """Return a task to the source that it is from; False if there is none."""
        return self._put_back(task, self._is_running_validate)

    def _put_back(self, task: dict[str, Any], is_validation: bool) -> bool:
        source = self._validate_dataloader if is_validation else self._dataloader
        if source is None:
            return False
        source.add_item_front(task)
        return True

    def _put_trajectory(self, trajectory: Trajectory) -> str:
        """Hand in a trajectory of the task at hand.

        One without ``tokens`` gets tokens, logprobs and versions of the reply of the model that it quotes in
        ``response``; one without ``reward`` gets that of the evaluator. Whether it is one of training or of validation
        is decided by the task, in `_put_validate_trajectory`, too.

        Returns:
            ``"success"``, ``"re-rollout"``, or ``"fail"``, whose reason is among the errors of the activity tracker.
        """
        sink = self._validator if self._is_running_validate else self._trajectory_pool
        try:
            if sink is None:
                raise ValueError("no references to modules: call set_module_references before step")
            return sink.put_trajectory(self._completed(trajectory))
        except (TypeError, ValueError) as error:
            self._activity_tracker.report_exception(self._module_name, "puts a trajectory", error)
            return FAIL

    def _put_validate_trajectory(self, trajectory: Trajectory) -> str:
        """Hand in a trajectory of the validation task at hand, as `_put_trajectory`."""
        return self._put_trajectory(trajectory)

    def _completed(self, trajectory: Trajectory) -> Trajectory:
        if self._replies:
            trajectory = with_tokens(trajectory, self._replies)
        if self._evaluator is None or "reward" in trajectory:
            return trajectory
        target = self._evaluation_target(trajectory)
        return with_evaluation(trajectory, self._evaluator.evaluate(dict(self._current_task or {}), target))

    def _evaluation_target(self, trajectory: Trajectory) -> BaseEvaluationTarget:
        return BaseEvaluationTarget(str(trajectory.get("response", "")))


def base_directory(config: Mapping[str, Any]) -> Path:
    """Return the directory to which paths of a worker refer: that of the recipe, or the working directory."""
    return Path(config.get("directory") or ".").absolute()


def evaluator_class(config: Mapping[str, Any]) -> type[Evaluator] | None:
    """Return the class that ``evaluator_module_path`` of a worker's configuration names; None without one.

    Raises:
        InvalidRequest: it cannot be loaded, or is not an `Evaluator`.
    """
    reference = config.get("evaluator_module_path")
    if not reference:
        return None
    problem = f"invalid rollout_worker.evaluator_module_path {reference!r}"
    try:
        found = load_object(str(reference), base_directory(config))
    except InvalidRequest as error:
        raise InvalidRequest(f"{problem}: {error}") from error.__cause__
    if not isinstance(found, type) or not issubclass(found, Evaluator):
        raise InvalidRequest(f"{problem}: expected an Evaluator class")
    return found
