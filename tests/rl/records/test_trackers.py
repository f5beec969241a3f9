"""Trackers get the metrics of a run; what is missing is refused before the start, and a failure ends nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.records.trackers import TrackedRun, TrackerSet, check_trackers


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (["tensorbord"], "invalid tracker 'tensorbord'; expected one of 'tensorboard', 'wandb', 'trackio', 'mlflow'"),
        ("wandb", "invalid rl.Run: trackers: found 'wandb' (str); expected a list"),
    ],
)
def test_what_is_wrong_is_refused_before_the_start(trackers: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rl.Run(model=rl.TinyLlama(), data=[{"prompt": "1"}], rollout=solve, trainer=rl.GRPO(), trackers=trackers)
    assert message in str(caught.value)


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("fray.rl.records.trackers.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"\['mlflow'\] needs the package mlflow: pip install 'fray\[mlflow\]'"):
        check_trackers(["mlflow"], None)


def test_a_tracker_that_fails_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("trackio")
    monkeypatch.setitem(sys.modules, "trackio", broken)  # without its functions, as another release may be
    notes: list[str] = []
    trackers = TrackerSet(["trackio"], TrackedRun("digits", None, {}), notes.append)
    trackers.log({"reward_mean": 0.5}, 1)
    trackers.log({"reward_mean": 0.5}, 2)
    trackers.finish()
    assert len(notes) == 1
    assert notes[0].startswith("tracker trackio failed and is not used any more: AttributeError: ")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}: pip install")


def track(name: str, output: Path) -> None:
    """Give a tracker two updates, a validation of the first one after the second, and settings of all kinds."""
    settings = {"model": str(rl.TinyLlama()), **rl.GRPO(kl=0.1, lora=8).as_dict()}
    trackers = TrackerSet([name], TrackedRun("digits", output, settings, "numbers"), pytest.fail)
    trackers.log({"step": 1.0, "reward_mean": 0.25, "dropped/timeout": 2.0}, 1)
    trackers.log({"step": 2.0, "reward_mean": 0.5, "dropped/a: b": 1.0}, 2)
    trackers.log({"val/reward": 0.75}, 1)
    trackers.finish()


def records_of_wandb(content: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run: LevelDB's log format, behind 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if (left := 32_768 - at % 32_768) < 7:  # the rest of a block is empty
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@needs("wandb")
def test_wandb_keeps_what_is_logged_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    track("wandb", tmp_path)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, project = [], ""
    for content in records_of_wandb(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        project = record.run.project or project
        pairs = {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
        if pairs:
            rows.append({name: value for name, value in pairs.items() if not name.startswith("_")})
    assert project == "numbers"
    assert rows == [
        {"reward_mean": 0.25, "dropped/timeout": 2.0, "step": 1},
        {"reward_mean": 0.5, "dropped/a: b": 1.0, "step": 2},
        {"val/reward": 0.75, "step": 1},
    ]


@needs("trackio")
def test_trackio_has_the_metrics_of_each_update(tmp_path: Path) -> None:
    # It reads its directory when it is imported.
    program = "from pathlib import Path; from tests.rl.records import test_trackers; "
    program += "test_trackers.track('trackio', Path('.')); import trackio; "
    program += "runs = trackio.Api().runs('numbers'); print([run.name for run in runs])"
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["['digits']"], done.stderr
    with sqlite3.connect(tmp_path / "numbers.db") as store:
        found = store.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    assert [(step, json.loads(metrics)) for step, metrics in found] == [
        (1, {"reward_mean": 0.25, "dropped/timeout": 2.0}),
        (2, {"reward_mean": 0.5, "dropped/a: b": 1.0}),
        (1, {"val/reward": 0.75}),
    ]


@needs("mlflow")
def test_mlflow_has_the_metrics_of_each_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    track("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("numbers")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["group_size"]) == ("digits", "FINISHED", "16")
    found = {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    assert found == {
        "reward_mean": [(1, 0.25), (2, 0.5)],
        "dropped/timeout": [(1, 2.0)],
        "dropped/a. b": [(2, 1.0)],
        "val/reward": [(1, 0.75)],
    }


@pytest.mark.torch  # the environment of make test-rl has it
@needs("tensorboard")
def test_tensorboard_has_the_metrics_of_each_update(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = TrackerSet(["tensorboard"], TrackedRun("digits", tmp_path, {}), pytest.fail)
    trackers.log({"reward_mean": 0.25, "dropped/timeout": 2.0}, 1)
    trackers.log({"reward_mean": 0.5}, 2)
    trackers.finish()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    values = [(one.step, float(one.tensor_proto.float_val[0])) for one in found.Tensors("reward_mean")]
    assert values == [(1, 0.25), (2, 0.5)]
    assert "dropped/timeout" in found.Tags()["tensors"]
