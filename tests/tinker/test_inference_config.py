"""Settings of inference jobs, and a store of before there were any."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fray.tinker.core.inference_config import inference_settings_of
from fray.tinker.core.job_states import ServiceJobState
from fray.tinker.core.training_config import ConfigError
from fray.tinker.store import ServiceJob, ServiceStore


def test_what_has_no_effect_is_listed_unless_it_is_the_default() -> None:
    defaults: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "trust_remote_code": False,
        "tokenizer_path": "tiny",
        "num_gpus": 1,
    }
    settings = inference_settings_of({"model_path": "tiny", "max_model_len": 32, **defaults})
    assert (settings.model_path, settings.max_model_len, settings.not_used) == ("tiny", 32, ())
    changed = {"tokenizer_path": "other", "tensor_parallel_size": 2, "trust_remote_code": True, "quantization": "fp8"}
    settings = inference_settings_of({"model_path": "tiny", **changed})
    assert settings.not_used == ("quantization", "tensor_parallel_size", "tokenizer_path", "trust_remote_code")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0; expected an integer of at least 1"),
        ({"max_model_len": 1}, "max_model_len: 1; expected an integer of at least 2"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization: 1.1; expected above 0, at most 1"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        inference_settings_of({"model_path": "tiny", **wrong})


def test_a_store_of_the_first_version_is_continued(tmp_path: Path) -> None:
    store = ServiceStore(tmp_path)
    store.put_job(ServiceJob("a", "s", "user_1", {"x": 1}, 0, 1.0, state=ServiceJobState.RUNNING))
    store.close()
    with sqlite3.connect(tmp_path / "service.sqlite") as old:
        old.executescript("ALTER TABLE jobs DROP COLUMN is_inference; DROP TABLE usage; PRAGMA user_version = 1;")
    old.close()
    store = ServiceStore(tmp_path)
    store.put_job(ServiceJob("b", "s", "user_1", {"model_path": "tiny"}, 0, 2.0, is_inference=True))
    assert [(job.job_id, job.is_inference) for job in store.jobs()] == [("a", False), ("b", True)]
    store.close()
