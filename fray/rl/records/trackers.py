"""Trackers of experiments that get the metrics of a run: TensorBoard, wandb, trackio, MLflow.

Each is a package of its own, loaded when a run asks for it. A tracker that fails while the run is under way is not used
any more, and the run continues: its metrics are in ``metrics.jsonl``, too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from fray.errors import InvalidRequest
from fray.model.text import near_text
from fray.rl.nexrl.experiment_posts import ExperimentPost

logger = logging.getLogger("fray.rl")
PROJECT = "fray"
STEP = "step"
"""Name of the number of an update among its metrics; trackers have it as the step."""


class Tracker(Protocol):
    """Destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of an update."""

    def finish(self) -> None:
        """Write what is left."""


@frozen
class TrackedRun:
    """The run whose metrics are tracked: its name, its output directory, settings to be shown, and its project."""

    name: str
    output: Path | None
    settings: Mapping[str, Any]
    project: str = PROJECT
    """Group of runs, for those that know groups."""


class _TensorBoard:
    """Writes event files to ``tensorboard`` in the output directory."""

    def __init__(self, run: TrackedRun) -> None:
        assert run.output is not None
        self._writer: Any = import_module("tensorboard.summary").Writer(str(run.output / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _Wandb:
    """Logs to Weights & Biases, as its own variables say; ``WANDB_PROJECT`` replaces the project."""

    def __init__(self, run: TrackedRun) -> None:
        project = os.environ.get("WANDB_PROJECT", run.project)
        self._run: Any = import_module("wandb").init(project=project, name=run.name, config=dict(run.settings))
        # Its own steps must not decrease: it ignores what is logged later, such as the validation of a version before
        # the last, or an update that is done again by a trainer that has continued.
        self._run.define_metric("*", step_metric=STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, STEP: step})

    def finish(self) -> None:
        self._run.finish()


class _Trackio:
    """Logs to a local trackio project."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio: Any = import_module("trackio")
        self._trackio.init(project=run.project, name=run.name, config=dict(run.settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._trackio.finish()


class _MLflow:
    """Logs to MLflow, where ``MLFLOW_TRACKING_URI`` says; ``MLFLOW_EXPERIMENT_NAME`` replaces the project."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project))
        self._mlflow.start_run(run_name=run.name)
        self._mlflow.log_params(dict(run.settings))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # Its names of metrics have no other characters than these.
        self._mlflow.log_metrics({name.replace(":", "."): value for name, value in metrics.items()}, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _MLflow,
}
"""Adapters by the name of their package."""


def check_trackers(names: Sequence[str], output: object) -> None:
    """Check trackers before a run starts.

    Args:
        output: of the run; None if it has none.

    Raises:
        InvalidRequest: one is unknown, its package is missing, or it needs the output directory.
    """
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(map(repr, TRACKERS))
            raise InvalidRequest(f"invalid tracker {name!r}; expected one of {known}{near_text(str(name), TRACKERS)}")
        if find_spec(name) is None:
            raise InvalidRequest(f"trackers=[{name!r}] needs the package {name}: pip install 'fray[{name}]'")
        if name == "tensorboard" and output is None:
            raise InvalidRequest("trackers=['tensorboard'] writes to the output directory: write output='./out'")


class TrackerSet:
    """The trackers of a run; each is opened with the first metrics.

    Args:
        names: of `TRACKERS`.
        run: what is tracked.
        note: called with a line about a tracker that failed.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, note: Callable[[str], None]) -> None:
        self._names, self._run, self._note = list(names), run, note
        self._open: dict[str, Tracker] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give the metrics of an update to all."""
        metrics = {name: value for name, value in metrics.items() if name != STEP}
        for name in list(self._names):
            self._attempt(name, lambda tracker: tracker.log(metrics, step))

    def post(self, post: ExperimentPost, step: int) -> None:
        """Give the numbers of a post to the tracker that is its backend; the rest of it is a log line.

        Args:
            step: of a post that names none.
        """
        values = dict(post.values)
        data, named = values.pop("data", None), values.pop("step", None)
        if post.backend in self._names and isinstance(data, Mapping):
            numbers = {name: value for name, value in data.items() if isinstance(value, int | float) and name != STEP}
            at = int(named) if isinstance(named, int | float) else step
            self._attempt(post.backend, lambda tracker: tracker.log(numbers, at))
        elif data is not None:
            values["data"] = data
        if values:
            logger.info("%s: %s", post.backend, values)

    def finish(self) -> None:
        """Close all."""
        for name in list(self._open):
            self._attempt(name, lambda tracker: tracker.finish())

    def _attempt(self, name: str, use: Callable[[Tracker], None]) -> None:
        try:
            if name not in self._open:
                self._open[name] = TRACKERS[name](self._run)
            use(self._open[name])
        except Exception as error:  # noqa: BLE001 (a library's error, or its server's, must not end the run)
            self._names.remove(name)
            self._open.pop(name, None)
            self._note(f"tracker {name} failed and is not used any more: {type(error).__name__}: {error}")
