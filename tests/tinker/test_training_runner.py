"""Snapshots of a training job, beside the answers that its service has on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fray.tinker.training_runner import TrainingRunner
from fray.tinker.wire.dataproto import encode_data_proto
from tests.tinker.services import MODEL, REWARD
from tests.tinker.test_opentinker_service import CONFIG, batch_of

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_a_snapshot_never_has_the_request_whose_answer_is_not_on_disk_yet(tmp_path: Path) -> None:
    """The service may be lost between the execution of a request and the save of its answer, and the engine with it."""
    batch = {"batch_data": encode_data_proto(batch_of(["407", "123"]))}
    requests = [
        ("upload_reward_function", {"function_name": "share", "source_code": REWARD}),
        ("set_config", {"config_overrides": CONFIG}),
        ("init_workers", {"total_steps": 3}),
        ("train_step", batch),
        ("validate", batch),
        ("train_step", batch),
    ]
    runner = TrainingRunner({"tiny": MODEL}, {}, tmp_path)
    try:
        continued = []
        for seq, (kind, body) in enumerate(requests, 1):
            assert runner.execute(seq, kind, json.dumps(body).encode()).body.get("status") == "success"
            another = TrainingRunner({"tiny": MODEL}, {}, tmp_path)
            continued.append(another.begin())
            another.close()
        assert continued == [0, 0, 0, 0, 4, 4]
    finally:
        runner.close()
