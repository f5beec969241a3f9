"""Log of a run: its result, files, console, trackers and the functions of its user."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import define, field

from fray.rl.core.validation import PREFIX
from fray.rl.messages import RunStatus, ValidationResult
from fray.rl.nexrl.experiment_posts import ExperimentPost, FetchedPosts
from fray.rl.nexrl_types import Trajectory
from fray.rl.records.console_lines import is_validation, step_text, validation_text
from fray.rl.records.run_files import METRICS_FILE, read_rows, write_file
from fray.rl.records.run_owner import add_line
from fray.rl.records.trackers import TrackedRun, TrackerSet
from fray.rl.run_parts import RunParts
from fray.rl.trainer_process import TrainedStep
from fray.runtime.serialization.pickling import loads

LINE_PREFIX = "fray.rl: "
ROLLOUTS_FILE, ROLLOUTS_SIZE_FILE = "rollouts.jsonl", "rollouts.size"
"""Trajectories of a run without a trainer, and the bytes of the batches that were written to the end."""


@define
class RunResult:
    """Result of a run."""

    steps: list[dict[str, float]] = field(factory=list)
    """Metrics of each update."""
    validations: list[dict[str, float]] = field(factory=list)
    """Metrics of each validation: ``step``, and means with the prefix ``val/``."""
    trajectories: list[Trajectory] = field(factory=list)
    """Trajectories of a run without a trainer."""
    status: RunStatus | None = None


class RunLog(Protocol):
    """Receiver of what a run reports."""

    def add_step(self, step: TrainedStep, status: RunStatus) -> None:
        """Note an update."""

    def add_samples(self, groups: Sequence[Sequence[bytes]]) -> None:
        """Note the contents of a batch, if samples are collected."""

    def add_validation(self, found: ValidationResult) -> None:
        """Note the scores of a version that was validated; may be repeated for one version."""

    def add_posts(self, found: FetchedPosts) -> None:
        """Note what workers post to the trackers of the run."""

    def rewind(self, number: int) -> None:
        """Note that the run continues from the checkpoint after so many updates."""

    def take_over(self, number: int) -> None:
        """Note that the run has worked on in the meantime, and has done so many updates."""

    def note(self, text: str) -> None:
        """Note a line for the console."""


class LoggedRun(Protocol):
    """Part of `fray.rl.Run` that its log needs."""

    parts: RunParts
    trackers: Sequence[str]
    progress: bool
    on_step: Callable[[dict[str, float]], object] | None
    on_validation: Callable[[dict[str, float]], object] | None
    on_post: Callable[[ExperimentPost], object] | None
    on_end: Callable[[], object] | None


def tracked_run_of(parts: RunParts) -> TrackedRun:
    """Return what trackers of experiments show of a run."""
    settings = {} if parts.trainer is None else parts.trainer.as_dict()
    return TrackedRun(parts.name, parts.output, {"model": str(parts.model), **settings})


class StepLog:
    """Writes what a run reports: to its result, to files, to standard error and to the user's function."""

    def __init__(self, result: RunResult, run: LoggedRun) -> None:
        self._result, self._run, self._began = result, run, time.monotonic()
        self._directory = run.parts.output
        self._continued_after = -1
        self._reported: set[tuple[float | None, ...]] = set()
        """Updates that a process before this one has reported of a run that has worked on since."""
        self._validated: set[float] = set()
        """Updates whose validation was reported, by this process or one before it."""
        self._trackers = TrackerSet(run.trackers, tracked_run_of(run.parts), self.note)
        self._collected: set[str] = set()
        """Tasks whose trajectories are in the file."""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            if run.parts.trainer is None:
                self._collected = _begin_rollouts(self._directory)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._trackers.finish()
        if self._run.on_end is not None:
            self._run.on_end()

    def add_step(self, step: TrainedStep, status: RunStatus) -> None:
        metrics = {
            "step": float(step.number),
            "line": float(step.line),
            "elapsed_s": time.monotonic() - self._began,
            **step.metrics,
            **{f"dropped/{reason}": float(count) for reason, count in status.dropped.items()},
            **{f"repeated/{reason}": float(count) for reason, count in status.repeated.items()},
            **{f"skipped/{reason}": float(count) for reason, count in status.skipped.items()},
            **{f"left_out/{tag}": float(count) for tag, count in status.left_out.items()},
        }
        if _identity(metrics) in self._reported:
            return
        self._result.steps.append(metrics)
        self._write(METRICS_FILE, [metrics])
        self._trackers.log(metrics, step.number)
        self.note(step_text(step.number, metrics, self._run.parts.trainer, step.skipped or step.without_effect))
        if self._run.on_step is not None:
            self._run.on_step(metrics)
        self.add_posts(step.posts)

    def add_validation(self, found: ValidationResult) -> None:
        number, line = found.version.number, found.version.incarnation
        elapsed = time.monotonic() - self._began
        metrics = {"step": float(number), "line": float(line), "elapsed_s": elapsed, **found.metrics}
        # A validation may be reported twice, or be done again by a run that continues.
        if number == self._continued_after or number in self._validated:
            self._remove(lambda one: one["step"] == number and is_validation(one))
        self._validated.add(number)
        self._result.validations.append(metrics)
        self._write(METRICS_FILE, [metrics])
        self._trackers.log({name: value for name, value in metrics.items() if name.startswith(PREFIX)}, int(number))
        self.note(validation_text(number, metrics))
        if self._run.on_validation is not None:
            self._run.on_validation(metrics)

    def add_posts(self, found: FetchedPosts) -> None:
        """Give what workers and the trainer have posted to the trackers."""
        if found.dropped:
            self.note(f"{found.dropped} posts to trackers were dropped: they were more than can be kept")
        step = int(self._result.steps[-1]["step"]) if self._result.steps else 0
        for one in found.posts:
            if self._run.on_post is not None:
                self._run.on_post(one)
            else:
                self._trackers.post(one, step)

    def rewind(self, number: int) -> None:
        """Forget the updates after one from which a run continues."""
        self._continued_after = number
        self.note(f"continues after step {number}")
        self._remove(lambda one: one["step"] > number)

    def take_over(self, number: int) -> None:
        """Leave out what was reported already."""
        self.note(f"takes over the run, which has worked on and has done {number} updates")
        for row in () if self._directory is None else read_rows(self._directory):
            if is_validation(row):
                self._validated.add(row["step"])
            else:
                self._reported.add(_identity(row))

    def _remove(self, is_obsolete: Callable[[Mapping[str, float]], bool]) -> None:
        """Remove metrics from the result and from the file."""
        for found in (self._result.steps, self._result.validations):
            found[:] = [one for one in found if not is_obsolete(one)]
        path = None if self._directory is None else self._directory / METRICS_FILE
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if not is_obsolete(json.loads(line))]
            if len(kept) < len(lines):
                path.write_text("".join(kept), encoding="utf-8")

    def note(self, text: str) -> None:
        """Print a line, if the run prints any, and write it for those who follow the run from elsewhere."""
        line = f"{LINE_PREFIX}{text}"
        if self._directory is not None:
            add_line(self._directory, line)
        if self._run.progress:
            print(line, file=sys.stderr, flush=True)

    def add_samples(self, groups: Sequence[Sequence[bytes]]) -> None:
        every = (one for group in groups for content in group for one in loads(content))
        # A batch is given again if the run was lost before it had noted that the batch was taken.
        found = [one for one in every if one["task_id"] not in self._collected]
        self._result.trajectories.extend(found)
        self._collected.update(one["task_id"] for one in found)
        self._write(ROLLOUTS_FILE, found)
        if self._directory is not None and found:
            size = (self._directory / ROLLOUTS_FILE).stat().st_size
            write_file(self._directory / ROLLOUTS_SIZE_FILE, str(size).encode())

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._directory is not None:
            with (self._directory / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def _identity(metrics: Mapping[str, float]) -> tuple[float | None, ...]:
    # The clock of the trainer's process tells a batch from another of the same number that was skipped.
    return tuple(map(metrics.get, ("step", "line", "wait_s")))


def _begin_rollouts(directory: Path) -> set[str]:
    """Remove a batch that was written in part; return the tasks of the others."""
    file, size = directory / ROLLOUTS_FILE, directory / ROLLOUTS_SIZE_FILE
    if not file.is_file():
        return set()
    if size.is_file():
        os.truncate(file, min(int(size.read_text()), file.stat().st_size))
    return {json.loads(line)["task_id"] for line in file.read_text(encoding="utf-8").splitlines()}
