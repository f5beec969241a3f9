"""Settings and status of a run, in its output directory, and the runs of this user by name.

Status is a file and not an actor's answer: who can read the output can look, on a cluster too, when the
run has ended, and when it hangs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from attrs import asdict, frozen

from fray.errors import InvalidRequest
from fray.model.text import near_text
from fray.net import storage
from fray.rl.core.server_states import ServerRecord
from fray.rl.messages import RunStatus
from fray.rl.model_spec import ModelSpec
from fray.rl.train.settings import GRPO
from fray.runtime.process.current_job import current_job
from fray.runtime.runtime import current_or_none
from fray.runtime.serialization.pickling import dumps, loads
from fray.tracebacks import innermost

STATUS_FILE, SETTINGS_FILE, METRICS_FILE, JOURNAL_DIRECTORY = "status.json", "run.pickle", "metrics.jsonl", "rollouts"
REQUESTS_DIRECTORY = "requests"
WORK_FILE = "work.json"
"""File of the process of data and pool, beside the journal, with what the run does: it works on while that of the
controller, which writes the status, is started again."""
RECIPE_FILE = "recipe.json"
"""All settings of the run, as texts."""
STATUS_PERIOD_S = 1.0
"""Seconds between two writes of the status."""
LISTED = 8
"""Names of runs in a message; the newest ones."""
_NAME = re.compile(r"[\w.-]+")


@frozen
class RunSettings:
    """Settings of a run that an update of it needs."""

    name: str
    model: ModelSpec
    trainer: GRPO | None
    threads: int | None
    own_trainer: str = ""
    """Name of the class of the user's own trainer."""
    device: str = "cpu"
    """Device on which it was trained."""


class RecordedParts(Protocol):
    """The parts of a run that are recorded: `fray.rl.run_parts.RunParts`."""

    @property
    def name(self) -> str: ...
    @property
    def output(self) -> Path | None: ...
    @property
    def model(self) -> ModelSpec: ...
    @property
    def trainer(self) -> GRPO | None: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def trainer_device(self) -> str: ...
    @property
    def own_trainer(self) -> object: ...
    @property
    def settings(self) -> Mapping[str, str]: ...


class RunRecorder:
    """Writes the settings of a run at its start, its status meanwhile, and how it ended.

    Args:
        parts: without an output, nothing is written.
        job: id of the job that runs it. Default: that of this process, if it is a job's.
    """

    def __init__(self, parts: RecordedParts, job: str | None = None) -> None:
        self._parts, self._output = parts, parts.output
        self._is_stopped = False
        self._status: dict[str, Any] = {
            "name": parts.name,
            "state": "running",
            "error": "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": own_job_id() if job is None else job,
            "started_at": time.time(),
            "steps": None if parts.trainer is None else parts.trainer.steps,
        }

    @property
    def is_on(self) -> bool:
        """Return whether anything is written."""
        return self._output is not None

    def __enter__(self) -> RunRecorder:
        parts, output = self._parts, self._output
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            # Of commands that were killed before they had an answer.
            shutil.rmtree(output / REQUESTS_DIRECTORY, ignore_errors=True)
            own = "" if parts.own_trainer is None else type(parts.own_trainer).__name__
            device = parts.trainer_device
            settings = RunSettings(parts.name, parts.model, parts.trainer, parts.threads, own, device)
            write_file(output / SETTINGS_FILE, dumps(settings, "the settings of the run"))
            self._begin(output)
        return self

    def write_pending(self) -> None:
        """Record that the run has a job, which will write what follows."""
        self._status |= {"state": "pending", "pid": None, "host": ""}
        if self._output is not None:
            self._begin(self._output)

    def _begin(self, output: Path) -> None:
        recipe = json.dumps(dict(self._parts.settings), indent=2)
        write_file(output / RECIPE_FILE, recipe.encode() + b"\n")
        _register(self._parts.name, output)
        self._write()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        # A run that was only cancelled, by Ctrl-C or with its job, has been stopped.
        failure = None if error is None else _failure_in(error)
        ended = "stopped" if self._is_stopped or error is not None else "done"
        state = ended if failure is None else "failed"
        if error is not None and own_job_id() and current_job().preempted:
            # The cluster starts its job again, on this machine or another, also if the end of another process of the
            # machine has failed it before it was stopped itself.
            state, failure = "pending", None
        self._status |= {"state": state, "error": "" if failure is None else f"{type(failure).__name__}: {failure}"}
        self._write()

    def note_stop(self) -> None:
        """Record that the run ends because it was asked to."""
        self._is_stopped = True

    def write(self, status: RunStatus, servers: Iterable[ServerRecord]) -> None:
        """Write the status."""
        listed = [
            {"name": one.name, "state": one.state.value, "version": None if one.version is None else str(one.version)}
            for one in servers
        ]
        self._status |= {**_work_of(status), "servers": listed}
        self._write()

    def _write(self) -> None:
        if self._output is not None:
            _write_dated(self._output / STATUS_FILE, self._status)


def write_work(journal: Path, status: RunStatus) -> None:
    """Write what a run does, beside its journal."""
    _write_dated(journal / WORK_FILE, _work_of(status))


def _work_of(status: RunStatus) -> dict[str, Any]:
    names = {"version": str(status.version), "rollout_version": str(status.rollout_version)}
    return {**asdict(status, recurse=False), **names, "step": status.version.number}


def _write_dated(file: Path, values: Mapping[str, Any]) -> None:
    content = json.dumps({**values, "written_at": time.time()}, indent=2, default=str)
    write_file(file, content.encode() + b"\n")


def _failure_in(error: BaseException) -> BaseException | None:
    """Return the exception in groups of scopes and nurseries, without what was cancelled; None if all was."""
    found = error.subgroup(Exception) if isinstance(error, BaseExceptionGroup) else error
    alone = None if found is None else innermost(found)
    return alone if isinstance(alone, Exception) else None


def write_file(file: Path, content: bytes) -> None:
    """Replace a file, which no reader sees half-written."""
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_bytes(content)
    unfinished.rename(file)


def own_job_id() -> str:
    """Return the id of the job of this process; empty outside of jobs."""
    runtime = current_or_none()
    return "" if runtime is None else runtime.job_id or ""


def work_directory(name: str, url: str) -> Path:
    """Return the directory of this user in which a run works whose output is at a URL."""
    return _state_home() / "rl-storage" / f"{_file_name(name)}-{sha256(url.encode()).hexdigest()[:12]}"


def upload_records(output: Path, url: str) -> None:
    """Copy metrics, settings and status of a run to a storage. Blocks."""
    for name in (METRICS_FILE, SETTINGS_FILE, STATUS_FILE):
        if (output / name).is_file():
            storage.upload_file_now(output / name, f"{url}/{name}")


def begin_output(output: Path | None, url: str | None, continues: bool) -> None:
    """Prepare the directory in which a run works whose output is at a URL: its metrics are those at the URL. Blocks.

    Nothing happens without a URL.

    Args:
        continues: False if it has no checkpoint: then it has no metrics.
    """
    if output is None or url is None:
        return
    # Nothing else of it: its owner holds a lock there.
    (output / METRICS_FILE).unlink(missing_ok=True)
    if continues and METRICS_FILE in storage.names_now(url):
        write_file(output / METRICS_FILE, storage.read_now(f"{url}/{METRICS_FILE}"))


def read_settings_of(output: Path) -> RunSettings:
    """Return the settings of the run with an output directory. Raises InvalidRequest if it has none."""
    file = output / SETTINGS_FILE
    if not file.is_file():
        raise InvalidRequest(f"{output} is not the output of a run: it has no {SETTINGS_FILE}")
    settings: RunSettings = loads(file.read_bytes())
    return settings


def read_status(output: Path) -> dict[str, Any]:
    """Return the status of the run with an output directory, as it was written last.

    Beside the fields of `RunStatus`: ``name``, ``state`` (pending, running, done, failed, stopped), ``error``,
    ``servers``, ``host``, ``pid``, ``job`` (its id, or empty), ``step``, ``steps`` and times: ``written_at`` by its
    controller, ``work_written_at`` by the process of data and pool (None: not since). ``metrics`` are those of the last
    update.

    Raises:
        InvalidRequest: it has none.
    """
    status = read_state(output)
    if not status:
        raise InvalidRequest(f"{output} is not the output of a run: it has no {STATUS_FILE}")
    work = _read_json(output / JOURNAL_DIRECTORY / WORK_FILE)
    work_at = work.pop("written_at", 0.0)
    # Else it may be that of an earlier start.
    if status["state"] not in ("pending", "running") or work_at <= status["written_at"]:
        work, work_at = {}, None
    metrics: dict[str, Any] = {}
    for metrics in read_metrics(output):  # noqa: B007 (the last one)
        pass
    return {**status, **work, "work_written_at": work_at, "metrics": metrics, "output": str(output)}


def read_state(output: Path) -> dict[str, Any]:
    """Return what `read_status` does, without the metrics; empty if there is no run."""
    return _read_json(output / STATUS_FILE)


def _read_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def read_metrics(output: Path) -> Iterator[dict[str, Any]]:
    """Return the metrics of each update, in order."""
    # Those of validations have other keys.
    return (row for row in read_rows(output) if "reward_mean" in row)


def read_rows(output: Path) -> Iterator[dict[str, Any]]:
    """Return the metrics of each update and each validation, in the order in which they were written."""
    file = output / METRICS_FILE
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            # The last line may be written right now.
            if line.endswith("}"):
                yield json.loads(line)


def find_output(run: str) -> Path:
    """Return the output directory of a run, by its name or by the directory itself.

    Raises:
        InvalidRequest: there is no such run.
    """
    directory = Path(run).absolute()
    if (directory / STATUS_FILE).is_file():
        return directory
    known = dict(named_outputs())
    if run not in known:
        listed = f"; runs here: {', '.join(list(known)[-LISTED:])}" if known else ""
        near = near_text(run, known) or listed
        raise InvalidRequest(f"there is no run {run!r}, and no output directory of that name{near}")
    return known[run]


def named_outputs() -> list[tuple[str, Path]]:
    """Return name and output of the runs that this user started here, oldest first; those that are removed are not."""
    found = []
    for file in sorted(_registry().glob("*"), key=lambda each: each.stat().st_mtime):
        output = Path(file.read_text(encoding="utf-8"))
        if (output / STATUS_FILE).is_file():
            found.append((file.name, output))
        else:
            file.unlink(missing_ok=True)
    return found


def _state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute() / "fray"


def _registry() -> Path:
    return _state_home() / "rl-runs"


def _file_name(name: str) -> str:
    return "_".join(_NAME.findall(name))


def _register(name: str, output: Path) -> None:
    try:
        _registry().mkdir(parents=True, exist_ok=True)
        write_file(_registry() / _file_name(name), str(output).encode())
    except OSError:
        # A home that cannot be written: the run is found by its directory.
        pass
