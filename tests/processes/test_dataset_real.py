"""The dataset example on real clusters: threads, processes, daemons, and workers that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import dataset_backend
import fray
from dataset import Dataset, read_jsonl, run_here
from dataset_backend import FrayBackend
from fray import blocking
from tests.processes.lab import TOKEN, Lab

FILES = dataset_backend.library_files(os.path.dirname(os.__file__), 12)
SMALL: dict[str, Any] = {"memory_per_worker": "200MB", "cpu_per_worker": 0.25}


@pytest.fixture(scope="module", params=["local", "machine?nodes=1&cpu=4"])
def cluster(request: pytest.FixtureRequest) -> Iterator[blocking.Cluster]:
    with blocking.open_cluster(request.param, logs=False) as cluster:
        yield cluster


def test_workers_get_the_same_result_as_one_process(cluster: blocking.Cluster, tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    backend = FrayBackend(max_parallelism=2, on_progress=lambda *words: said.append(words[:3]), **SMALL)
    assert backend.cluster is cluster
    data = dataset_backend.who_imports_what(FILES)
    rows = backend.execute(data)
    assert dataset_backend.in_order(rows) == dataset_backend.in_order(run_here(data))
    assert rows
    assert said[:2] == [("flatmap", 0, 8), ("flatmap", 1, 8)]
    assert said[-1] == ("groupby → filter", 8, 8)
    written = backend.execute(data.write_jsonl(f"file://{tmp_path}/out"))
    assert [row for file in written for row in read_jsonl(file)] == rows
    assert [info.state for info in cluster.list_jobs() if not info.state.finished] == []


def half(n: int) -> float:
    return 1 / (n - 3)


def die(n: int) -> None:
    os._exit(3)


def test_an_error_of_a_step_is_raised_and_the_workers_end(cluster: blocking.Cluster) -> None:
    with pytest.raises(ZeroDivisionError):
        FrayBackend(cluster, max_parallelism=1, **SMALL).execute(Dataset.from_items(range(5)).map(half))
    if not isinstance(cluster, blocking.LocalCluster):
        with pytest.raises(fray.ActorDied):
            FrayBackend(cluster, 1, max_retries=0, **SMALL).execute(Dataset.from_items([1]).map(die))


def run_example(*arguments: str, **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, dataset_backend.__file__, "--json", "--check", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["same"] is True
    return report


def test_a_killed_worker_costs_its_shard_a_second_try_and_nothing_else() -> None:
    report = run_example("--limit", "60", "--workers", "2", "--kill-worker")
    assert report["killed"]["pid"]
    assert report["retried"] >= 1
    assert report["files"] == 60


def test_it_runs_on_a_cluster_of_daemons(lab: Lab) -> None:
    lab.start_controller()
    lab.start_node("a")
    lab.wait_serving()
    report = run_example("--cluster", lab.spec, "--limit", "24", "--workers", "2", **lab.environ())
    assert report["shards"] == 8
    assert report["top"][0][0] > 3
    with blocking.FrayCluster(f"127.0.0.1:{lab.port}", token=TOKEN, logs=False) as cluster:
        assert isinstance(cluster, blocking.FrayCluster)
        assert blocking.current_cluster() is cluster
        assert [node.name for node in cluster.nodes()] == ["a"]
        assert cluster.list_jobs() == [], "the driver of the example has ended, and its workers with it"


def test_mistakes_are_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert dataset_backend.main(["--limit", "5", "--cluster", "nonsense"]) == 2
    assert "invalid cluster spec" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        dataset_backend.main(["--cluster", "local", "--kill-worker"])
    assert "use --cluster machine" in capsys.readouterr().err
