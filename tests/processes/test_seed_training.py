"""The training example of Fray-Zero on a TPU slice: four hosts (of a stand-in cloud, each a real node), the extra
``tpu`` of the project around it, and a word from each of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fray import blocking
from fray.blocking import JobState
from fray.controller import provider_driver
from fray.testing.tpu_cloud import TpuCloud
from fray.testing.tpu_hosts import TpuHosts
from fray.testing.tpu_server import serve_tpus
from fray.testing.wheels import make_wheel, offline
from tests.processes.seed_functions import run_block
from tests.processes.test_seed_000 import BLOCKS
from tests.processes.test_tpu_real import POLICY

PROJECT = """
[project]
name = "llama"
version = "1"

[project.optional-dependencies]
tpu = ["alpha"]
"""
LOGIC = """
    import alpha, fray
    (OUT / str(fray.current_job().rank)).write_text(f"{fray.current_job().world_size} {alpha.version}")
"""
HOST = 'cpu = 4\nmemory = "4GB"\n'


def test_training_runs_on_every_host_of_a_slice_with_the_extra_of_its_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(provider_driver.POLL_INTERVALS, "tpu", provider_driver.PollIntervals(0.2, 1.0))  # type: ignore[index]
    out, project = tmp_path / "out", tmp_path / "project"
    out.mkdir()
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    make_wheel(tmp_path / "wheels", "alpha", "1.0")
    environ = {**offline(tmp_path / "wheels", tmp_path / "uv"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.chdir(project)
    cloud = TpuCloud(create_s=0.1, delete_s=0.1, queue_s=0.1, clock=time.monotonic)
    with serve_tpus(cloud) as endpoint, TpuHosts(cloud, tmp_path, host=HOST, environ=environ):
        policy = POLICY.format(endpoint=endpoint).replace('memory = "1GB"', 'memory = "4GB"')
        (tmp_path / "policy.toml").write_text(policy)
        with blocking.open_cluster(f"machine?nodes=0&policy={tmp_path}/policy.toml", logs=False):
            found = run_block(BLOCKS["example_training"].replace("    pass\n", LOGIC), OUT=out)
            info = found["cluster"].poll(found["job_id"])
    assert info.state is JobState.SUCCEEDED
    assert len({attempt.node for attempt in info.attempts}) == 4
    assert {path.name: path.read_text() for path in out.iterdir()} == {str(rank): "4 1.0" for rank in range(4)}
