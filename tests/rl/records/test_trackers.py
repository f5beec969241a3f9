"""Trackers get the metrics of a run; what is missing is refused before the start, and a failure ends nothing."""

from __future__ import annotations

import importlib.util
import sys
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
        ("wandb", "invalid trackers 'wandb': expected a list, trackers=['wandb']"),
    ],
)
def test_what_is_wrong_is_refused_before_the_start(trackers: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rl.Run(model=rl.TinyLlama(), data=[{"prompt": "1"}], rollout=solve, trainer=rl.GRPO(), trackers=trackers)
    assert message in str(caught.value)


def test_a_missing_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("fray.rl.records.trackers.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"trackers=\['mlflow'\] needs the package mlflow: pip install mlflow"):
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


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
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
