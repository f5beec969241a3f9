"""`NexRLController` of the guide: a run from its configuration."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import trio
from attrs import evolve

from fray.api.cluster import Cluster
from fray.api.jobs.job import Job
from fray.api.open import default_spec, open_cluster
from fray.errors import InvalidRequest
from fray.rl.core.run_record import EQUAL_REWARDS
from fray.rl.messages import RunStatus
from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy, ExperimentLogger
from fray.rl.nexrl.data_loader import BaseDataLoader, MockDataLoader, TorchDataLoader
from fray.rl.nexrl.experiment_posts import ExperimentPost
from fray.rl.nexrl.guide_run import CHECKPOINTS, copy_checkpoint, run_of_guide
from fray.rl.nexrl.nexrl_module import NexRLModule
from fray.rl.nexrl.trajectory_pool import TrajectoryPool
from fray.rl.nexrl.validator import Validator
from fray.rl.nexrl.weight_sync_controller import WeightSyncController
from fray.rl.nexrl_types import ModelTag, NexRLRole
from fray.rl.recipe.guide_config import GuideConfig, guide_config
from fray.rl.recipe.run_recipe import source_env_file
from fray.rl.recipe.sources import Source, read_settings
from fray.rl.recipe.typed import expected_one_of, invalid
from fray.rl.recipe.user_files import load_object
from fray.rl.records.run_log import RunResult, tracked_run_of
from fray.rl.records.trackers import TRACKERS, TrackerSet, check_trackers
from fray.rl.rollout_worker import (
    AgentRolloutWorker,
    BaseRolloutWorker,
    DefaultNexAURolloutWorker,
    MockRolloutWorker,
    PigLatinRolloutWorker,
    SimpleRolloutWorker,
    SingleTurnMathRolloutWorker,
)
from fray.rl.run import Run
from fray.rl.run_cluster import check_model_of_spec
from fray.rl.run_parts import RunParts
from fray.rl.trainer import (
    BaseTrainer,
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
)
from fray.runtime.runtime import current_or_none

logger = logging.getLogger("fray.rl")
STOP_S = 10.0
"""Seconds that `NexRLController._stop` waits for work in progress."""
DROPPED = "dropped/"
"""Prefix of the metrics with the numbers of samples that were dropped, by reason."""
NO_ERRORS = {f"{DROPPED}{reason}" for reason in ("stale", EQUAL_REWARDS, "collected", "PromptTooLong")}
OWN_LOGGERS = ("console", "jsonl")
"""Backends of ``logger`` that each run has: lines on standard error, and ``metrics.jsonl``."""
OF_THIS_PROCESS = (
    *("activity_tracker", "_activity_tracker", "experiment_logger"),
    *("result", "_token", "_cancel_scope", "_run", "_trackers"),
)
"""Attributes of a controller that do not go to the job of its run."""
CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")
SECTIONS = {
    NexRLRole.ROLLOUT_WORKER: "rollout_worker",
    NexRLRole.TRAINER: "trainer",
    NexRLRole.TRAJECTORY_POOL: "trajectory_pool",
    NexRLRole.DATA_LOADER: "data",
    NexRLRole.VALIDATE_DATALOADER: "validate.data",
    NexRLRole.WEIGHT_SYNC_CONTROLLER: "weight",
    NexRLRole.VALIDATOR: "validate.eval",
}
"""Section of the configuration with the ``type`` of a role."""
CUSTOM = {
    NexRLRole.ROLLOUT_WORKER: ("custom_rollout_worker", BaseRolloutWorker),
    NexRLRole.TRAINER: ("custom_trainer", BaseTrainer),
    NexRLRole.DATA_LOADER: ("custom_data_loader", BaseDataLoader),
    NexRLRole.VALIDATE_DATALOADER: ("custom_data_loader", BaseDataLoader),
}
"""Prefix of the keys that name a class of the user, and its base class."""


class NexRLController(NexRLModule):
    """Run of a configuration of NexRL's guide, on the parts of `fray.rl.Run`.

    Args:
        config: a DictConfig, a mapping or a YAML file. ``launch_mode``: ``local`` runs in processes of this machine,
            ``cluster`` (and ``ray``) on the cluster of ``FRAY_CLUSTER_SPEC`` or ``fray login``. Beside a file
            ``NAME.yaml``, ``NAME.env.sh`` is run first.
        env_vars: variables of the environment of all processes. Default: those of ``NAME.env.sh``.

    Raises:
        InvalidRequest: a key or value is wrong, or a file of the user cannot be loaded; nothing was started.
    """

    MODULE_REGISTRY: ClassVar[dict[NexRLRole, dict[str, type]]] = {
        NexRLRole.ROLLOUT_WORKER: {
            "mock": MockRolloutWorker,
            "simple": SimpleRolloutWorker,
            "agent": AgentRolloutWorker,
            "nexau": DefaultNexAURolloutWorker,
            "pig_latin": PigLatinRolloutWorker,
            "single_turn_math": SingleTurnMathRolloutWorker,
        },
        NexRLRole.TRAINER: {
            "self_hosted": SelfHostedTrainer,
            "self_hosted_grpo": SelfHostedGrpoTrainer,
            "remote_api_grpo": RemoteApiGrpoTrainer,
            "remote_api_cross_entropy": RemoteApiCrossEntropyTrainer,
        },
        NexRLRole.WEIGHT_SYNC_CONTROLLER: {"default": WeightSyncController},
        NexRLRole.VALIDATOR: {"default": Validator},
        NexRLRole.TRAJECTORY_POOL: {"default": TrajectoryPool},
        NexRLRole.DATA_LOADER: {"mock": MockDataLoader, "torch": TorchDataLoader},
        NexRLRole.VALIDATE_DATALOADER: {"mock": MockDataLoader, "torch": TorchDataLoader},
    }
    """Classes by role and ``type``; a class that is added here may be named in configurations."""

    def __init__(self, config: Source, *, env_vars: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.set_module_name("controller")
        if env_vars is None and isinstance(config, str | os.PathLike):
            env_vars = source_env_file(Path(config))
        self._env_vars = dict(env_vars or {})
        types = {SECTIONS[role]: tuple(known) for role, known in self.MODULE_REGISTRY.items()}
        if not isinstance(config, GuideConfig):
            config = guide_config(read_settings(config), types=types)
        self._config: GuideConfig = config
        self._open_activities()
        self._dropped: dict[str, float] = {}
        self._validations: list[dict[str, float]] = []
        self._run = self._make_run()
        self.parts: RunParts = self._run.parts
        """Parts of the run: what its processes are, and how it decides."""
        self._trackers = self._open_loggers()

    @property
    def config(self) -> GuideConfig:
        """The configuration, checked, its paths absolute."""
        return self._config

    def _open_activities(self) -> None:
        self.activity_tracker = ActivityTracker(self._config)
        self.set_activity_tracker(ActivityTrackerProxy(self.activity_tracker))
        self.activity_tracker.register_module("controller", self)
        self.experiment_logger: ExperimentLogger = self.activity_tracker.experiment_logger
        self.result: RunResult | None = None
        """Result of the run, when it has ended."""
        self._token: trio.lowlevel.TrioToken | None = None
        self._cancel_scope: trio.CancelScope | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what the job of the run needs, in which this object receives what the run reports."""
        return {name: value for name, value in vars(self).items() if name not in OF_THIS_PROCESS}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._open_activities()
        self._trackers = self._open_loggers()

    def run(self) -> None:
        """Run to the end, and wait for it. Ctrl-C and SIGTERM end it as `Run.main`. Raises as `run_async`."""
        trio.run(self.run_async)

    async def run_async(self) -> None:
        """Run to the end, in a Trio program.

        In the main thread, Ctrl-C and SIGTERM end it after the update under way, which is saved, as `Run.main`. Raises
        as `Run.run_on`.

        Raises:
            InvalidRequest: ``launch_mode`` is ``cluster``, and no cluster is named; the directory of the model is
                missing on this machine, which is the cluster; or a name of ``logger.backend`` is
                neither a tracker nor among ``experiment_logger.sinks``.
        """
        self._check_loggers()
        self._token = trio.lowlevel.current_trio_token()
        copy_checkpoint(self._config)
        work = self.activity_tracker.start(self.get_module_name(), "runs")
        try:
            with trio.CancelScope() as self._cancel_scope:
                self.check_model()
                async with open_cluster(self._spec()) as cluster:
                    self.result = await self._run.run_on(cluster, handle_signals=True)
        except Exception as error:
            self.activity_tracker.report_exception(self.get_module_name(), "run", error)
            raise
        finally:
            self.activity_tracker.end(work)
            self._cancel_scope = None

    async def submit(self, cluster: Cluster) -> Job[RunStatus]:
        """Launch the run as a job of its own, whatever ``launch_mode`` is; see `Run.submit`.

        Raises:
            InvalidRequest: as `Run.submit`; or ``trainer.checkpoint_path`` is missing, or ``logger.backend`` names a
                sink of this process.
        """
        self._check_loggers(is_job=True)
        if self.parts.output is None:
            problem = "it is missing; a run as a job needs a directory that all machines of the cluster can write"
            raise invalid("config", [("trainer.checkpoint_path", problem)])
        await trio.to_thread.run_sync(copy_checkpoint, self._config)
        return await self._run.submit(cluster)

    def check_model(self) -> None:
        """Check that the directory of the model is there, where ``launch_mode`` is ``local``. Raises InvalidRequest."""
        if self._config.launch_mode == "local":
            check_model_of_spec(self.parts.model, self._spec())

    # Methods of the guide

    def _get_module_class_for_role(self, role: NexRLRole, config: Mapping[str, Any]) -> Any:
        """Return the class of a role: that of ``custom_..._module_path``, else that of ``type``.

        Raises:
            InvalidRequest: the class cannot be loaded, or has another base class; or the type is unknown.
        """
        section: Any = config
        for name in SECTIONS[role].split("."):
            section = section[name]
        prefix, base = CUSTOM.get(role, ("", object))
        if prefix and section.get(f"{prefix}_class_name"):
            path, name = section[f"{prefix}_module_path"], section[f"{prefix}_class_name"]
            key = f"{SECTIONS[role]}.{prefix}_class_name"
            try:
                found = load_object(f"{path}:{name}", self._config.directory)
            except InvalidRequest as error:
                raise invalid("config", [(key, str(error))]) from error.__cause__
            if not isinstance(found, type) or not issubclass(found, base):
                raise InvalidRequest(f"invalid {key} {name!r}: expected a class of {base.__name__}")
            return found
        return self.MODULE_REGISTRY[role][section["type"]]

    def _check_finish(self) -> bool:
        """Return whether the run has done its updates, or has ended."""
        trainer = self.parts.trainer
        steps = None if trainer is None else trainer.steps
        return self.result is not None or (steps is not None and self.activity_tracker.get_training_step() >= steps)

    def _check_module_liveness(self, timeout: float = 5.0) -> bool:
        """Return whether all registered modules answer. The runtime watches the processes of a run by itself."""
        return self.activity_tracker.check_module_liveness(timeout)

    def _check_module_exceptions(self) -> bool:
        """Return False if errors were reported at which ``runtime_monitor.exception_handling.policy`` stops."""
        handling = self._config.runtime_monitor.exception_handling
        health = self.activity_tracker.get_error_health_status()
        level = {"stop_on_error": "error_level_count", "stop_on_critical": "critical_level_count"}.get(handling.policy)
        return not handling.enabled or level is None or not health[level]

    def _stop(self) -> None:
        """End the run, and wait for work in progress, at most `STOP_S`. For other threads and signal handlers."""
        scope, token = self._cancel_scope, self._token
        if scope is None or token is None:
            return
        token.run_sync_soon(scope.cancel)
        try:
            trio.lowlevel.current_trio_token()
        except RuntimeError:  # not in the loop, which has to end the run meanwhile
            if not self.activity_tracker.wait_quiescent(STOP_S):
                logger.warning("still in progress: %s", self.activity_tracker.get_running_status_summary())

    def _find_latest_checkpoint(self, checkpoint_folder: str) -> str | None:
        """Return the path of the ``global_step_N`` with the highest N in a directory; None if there is none."""
        folder = Path(checkpoint_folder)
        found = [path for path in (folder.iterdir() if folder.is_dir() else ()) if CHECKPOINT_NAME.fullmatch(path.name)]
        latest = max(found, key=lambda path: int(path.name.rpartition("_")[2]), default=None)
        return None if latest is None else str(latest)

    def _load_initial_checkpoint(self) -> str | None:
        """Return the checkpoint from which `run` begins; None: the weights of the model."""
        return None if self._config.resume.mode == "disable" else self._load_resume_checkpoint()

    def _load_resume_checkpoint(self) -> str | None:
        """Return the checkpoint that ``resume`` names: the given one, or with ``auto`` the latest; None without."""
        resume = self._config.resume
        if resume.mode == "from_path":
            return resume.resume_path
        output = self.parts.output
        return None if output is None else self._find_latest_checkpoint(str(output / CHECKPOINTS))

    def _run_validate(self, model_tag: ModelTag) -> dict[str, float] | None:
        """Return the metrics of the last validation of the run; None before the first.

        A run validates by itself: ``validate.validate_before_train``, ``weight.validate_freq``.
        """
        return self._validations[-1] if self._validations else None

    def _start_validate(self, model_tag: ModelTag) -> None:
        """Log that a validation begins."""
        logger.info("validation of %s begins", model_tag)

    def _end_validate(self, model_tag: ModelTag) -> None:
        """Send the metrics of the last validation to the loggers. Called by the run when a validation is complete."""
        metrics = self._run_validate(model_tag)
        if metrics is not None:
            self._post(metrics)

    # The run

    def _make_run(self) -> Run:
        config = self._config
        validate = None
        if config.validate.data is not None:
            validate = self._get_module_class_for_role(NexRLRole.VALIDATE_DATALOADER, config)
        return run_of_guide(
            config,
            self._get_module_class_for_role(NexRLRole.ROLLOUT_WORKER, config),
            self._get_module_class_for_role(NexRLRole.DATA_LOADER, config),
            validate,
            self._get_module_class_for_role(NexRLRole.TRAINER, config),
            on_step=self._on_step,
            on_validation=self._on_validation,
            on_post=self._on_post,
            on_end=self._on_end,
            env_vars=self._env_vars,
        )

    def _on_step(self, metrics: dict[str, float]) -> None:
        self.activity_tracker.set_training_step(int(metrics["step"]))
        for name, count in metrics.items():
            # An episode out of attempts is an error; samples that became too old, or have equal rewards, are not.
            new = count - self._dropped.get(name, 0.0)
            if name.startswith(DROPPED) and name not in NO_ERRORS and new > 0:
                self._dropped[name] = count
                message = f"{new:.0f} samples were dropped: {name.removeprefix(DROPPED)}"
                self.activity_tracker.report_error("rollout_worker", f"step {metrics['step']:.0f}", message)
        self._post(metrics)

    def _on_validation(self, metrics: dict[str, float]) -> None:
        self._validations.append(metrics)
        self._end_validate(self._config.service.inference_service.model_tag)

    def _on_post(self, post: ExperimentPost) -> None:
        """Give a post of a worker or a trainer to its destination, whose error does not end the run."""
        try:
            self.activity_tracker.experiment_logger_post(post.backend, **post.values)
        except Exception as error:  # noqa: BLE001 (the program's own destinations may raise anything)
            logger.warning("a post to %s failed: %s: %s", post.backend, type(error).__name__, error)

    def _on_end(self) -> None:
        for tracker in self._trackers:
            tracker.finish()

    def _open_loggers(self) -> list[TrackerSet]:
        """Make the backends of ``logger`` destinations of metrics; each is opened with the first of them.

        Raises:
            InvalidRequest: a package is missing, or TensorBoard has no ``trainer.checkpoint_path``.
        """
        sinks, made = self.experiment_logger.sinks, []
        for name in self._config.logger.backend:
            if name in OWN_LOGGERS:
                sinks[name] = lambda **values: None
            elif name in TRACKERS:
                check_trackers([name], self.parts.output)
                run = evolve(tracked_run_of(self.parts), project=self._config.project_name)
                tracker = TrackerSet([name], evolve(run, name=self._config.experiment_name), logger.warning)
                made.append(tracker)
                sinks[name] = partial(self._track, name, tracker)
        return made

    def _check_loggers(self, is_job: bool = False) -> None:
        known = [*OWN_LOGGERS, *TRACKERS, *([] if is_job else self.experiment_logger.sinks)]
        for name in self._config.logger.backend:
            if name not in known:
                raise invalid("config", [("logger.backend", expected_one_of(name, dict.fromkeys(known)))])

    def _track(self, name: str, tracker: TrackerSet, **values: Any) -> None:
        """Give numbers to a tracker; anything else is a log line."""
        tracker.post(ExperimentPost(name, values), self.activity_tracker.get_training_step())

    def _post(self, metrics: Mapping[str, float]) -> None:
        for backend in self._config.logger.backend:
            self.activity_tracker.experiment_logger_post(backend, data=dict(metrics), step=int(metrics["step"]))

    def _spec(self) -> str | None:
        """Return the spec of the cluster of ``launch_mode``."""
        if self._config.launch_mode == "local":
            return "machine"
        runtime = current_or_none()
        is_job = runtime is not None and runtime.job_id is not None
        if not is_job and not os.environ.get("FRAY_CLUSTER_SPEC") and default_spec() == "local":
            raise InvalidRequest(
                f"launch_mode {self._config.launch_mode!r} needs a cluster: FRAY_CLUSTER_SPEC=fray://host:port, or "
                "fray login; expected launch_mode: local for processes of this machine"
            )
        return None
