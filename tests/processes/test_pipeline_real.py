"""The pipeline example on real processes: killed workers, drivers that are killed or interrupted, a cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fray.node.job_process.inherited_environ import STATE_MARK
from fray.v2 import LocalClient, ResourceConfig
from fray.v2.fray.client import FrayClient

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import pipeline
from pipeline_backend import ActorBackend
from pipeline_ledger import ShardFailed
from pipeline_plan import Dataset
from pipeline_screen import Screen
from pipeline_shards import list_files
from pipeline_text import DOCS
from pipeline_workers import ExecutionHint
from tests.processes.lab import TOKEN, open_lab
from tests.processes.process_trees import seconds_until_gone

SMALL = ResourceConfig(cpu=0.1)
GONE_WITHIN_S = 5.0
"""A second, on a machine that has nothing else to do."""


MODULES = ("bisect", "copy", "heapq", "keyword", "queue", "sched", "shlex", "textwrap")


def command(client: str, out: Path, *more: str) -> list[str]:
    texts = out.parent / "texts"
    texts.mkdir(exist_ok=True)
    for name in MODULES:
        shutil.copy2(Path(sysconfig.get_path("stdlib")) / f"{name}.py", texts)
    files = ["--input", str(texts), "--shards", "4", "--workers", "2", "--output", str(out)]
    return [sys.executable, pipeline.__file__, "--client", client, *files, *more]


def environ(temporary: Path) -> dict[str, str]:
    """The driver's node has its directory below ``temporary``: by that its processes are known."""
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": os.getcwd(), "FRAY_TOKEN": TOKEN, "TMPDIR": str(temporary)}


def below(temporary: Path) -> list[int]:
    """All processes of nodes that have their directory there."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _is_below(pid, temporary)]


def _is_below(pid: int, temporary: Path) -> bool:
    try:
        return os.fsencode(f"{STATE_MARK}={temporary}/") in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


@contextmanager
def begun(out: Path, until: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run on `machine` that has said so much."""
    driver = subprocess.Popen(command("machine", out, *more), env=environ(out.parent / "tmp"), stderr=-1, text=True)
    try:
        assert driver.stderr is not None
        next(line for line in driver.stderr if until in line)
        yield driver
    finally:
        driver.kill()
        driver.communicate()


def skipped(report: dict[str, Any]) -> dict[str, int]:
    return {stage["stage"]: stage["skipped"] for stage in report["run"]["stages"]}


# Workers -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[FrayClient]:
    with FrayClient("machine?nodes=1") as client:
        yield client


def report_of(client: FrayClient, out: Path, *more: str) -> dict[str, Any]:
    options = pipeline.arguments([*command("", out, "--check", *more)[4:]])
    with Screen() as screen:
        report = pipeline.run(client, options, screen)
    assert report["check"] == "the same"
    return report


@pytest.mark.parametrize("style", ["actor", "job"])
def test_a_killed_workers_shard_is_done_by_another_and_the_result_is_that_of_a_plain_loop(
    style: str, client: FrayClient, tmp_path: Path, capfd: Any
) -> None:
    report = report_of(client, tmp_path / "out", "--coordinator", style, "--kill-worker")
    (lost,) = report["run"]["lost"]
    assert len(lost["shards"]) == 1
    assert report["run"]["stages"][0]["retried"] == 1
    loss = f"lost {lost['worker']} (pid {lost['pid']}); taken over by others: {lost['shards'][0]}"
    assert loss in capfd.readouterr().err
    assert not Path(f"/proc/{lost['pid']}").exists()


def explode(row: dict[str, Any]) -> dict[str, Any]:
    raise LookupError(f"no {Path(row['path']).suffix} for process {os.getpid()}")


def test_an_error_of_an_operation_is_tried_by_a_second_process_and_comes_out_of_the_job(
    client: FrayClient, tmp_path: Path
) -> None:
    (tmp_path / "one.py").write_text("")
    dataset = Dataset.from_files(str(tmp_path), list_files(str(tmp_path)), 1).map(explode).store("bad", DOCS)
    with (
        ActorBackend(client, 2, pipeline.WORKER, coordinator="job") as backend,
        pytest.raises(ShardFailed, match=r"LookupError: no \.py for process") as caught,
    ):
        backend.execute(dataset, ExecutionHint(str(tmp_path / "out")))
    assert (caught.value.stage, caught.value.shard, caught.value.tries) == ("bad", 0, 2)
    assert "in explode" in caught.value.reason


# Drivers -------------------------------------------------------------------------------------------------------------


def test_after_kill_9_of_the_driver_nothing_is_left_and_a_rerun_continues(tmp_path: Path) -> None:
    with begun(tmp_path / "out", "docs 100%", "--coordinator", "job") as driver:
        assert len(below(tmp_path / "tmp")) >= 3
        driver.send_signal(signal.SIGKILL)
        seconds_until_gone(lambda: below(tmp_path / "tmp"), GONE_WITHIN_S)
    with LocalClient() as local:
        assert skipped(report_of(local, tmp_path / "out"))["docs"] == 4


def test_ctrl_c_ends_it_in_one_line_and_a_rerun_continues(tmp_path: Path) -> None:
    with begun(tmp_path / "out", "docs 100%") as driver:
        driver.send_signal(signal.SIGINT)
        assert driver.stderr is not None
        rest = driver.stderr.read()
        assert driver.wait(timeout=60) == 130, rest
    assert rest.splitlines()[-1] == f"pipeline: interrupted; continue with --output {tmp_path / 'out'}"
    assert "Traceback" not in rest
    assert below(tmp_path / "tmp") == []
    with LocalClient() as local:
        assert skipped(report_of(local, tmp_path / "out"))["docs"] == 4


def test_it_runs_on_a_cluster_by_its_address(tmp_path: Path) -> None:
    with open_lab(tmp_path, "alpha") as lab:
        arguments = command(lab.spec, tmp_path / "out", "--check", "--json", "--coordinator", "job")
        done = subprocess.run(arguments, env=environ(tmp_path / "tmp"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["check"] == "the same"


def held_up(row: dict[str, Any]) -> dict[str, Any]:
    """A text that names a directory is held up until there is a file ``go`` in it."""
    if row["text"]:
        here = Path(row["text"])
        (here / "begun").touch()
        while not (here / "go").exists():
            time.sleep(0.02)
    return {"path": row["path"]}


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.02)


def test_when_the_machine_of_the_coordinators_job_is_lost_it_continues_elsewhere(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    (texts / "a.txt").write_text("")
    (texts / "b.txt").write_text(str(tmp_path))
    dataset = Dataset.from_files(str(texts), [("a.txt", 1, 0.0), ("b.txt", 1, 0.0)], 2)
    with open_lab(tmp_path, "alpha") as lab, FrayClient(lab.spec, token=TOKEN) as client:

        def lose_alpha() -> None:
            wait_for(tmp_path / "begun", out / "held" / "00000-of-00002.parquet")
            lab.start_node("beta")
            client.cluster.wait_for_nodes(2)
            lab.kill("alpha")
            (tmp_path / "go").touch()

        with ThreadPoolExecutor() as threads, ActorBackend(client, 2, SMALL, coordinator="job") as backend:
            losing = threads.submit(lose_alpha)
            rows = backend.execute(dataset.map(held_up).store("held", (("path", "string"),)), ExecutionHint(str(out)))
            losing.result()
    assert sorted(row["path"] for row in rows) == ["a.txt", "b.txt"]
    assert [stage["skipped"] for stage in backend.summary["stages"]] == [1]
