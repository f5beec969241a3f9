"""An upgrade of a running cluster from the previous build to this one, with real processes of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fray.model.messages.session import VERSION
from fray.net.channel.versions import WIRE_VERSIONS
from tests.upgrade.builds import ROOT, WITHIN_S, Cluster, export_distant, export_previous, open_cluster, wait_until
from tests.upgrade.wire_schema import SNAPSHOT

pytestmark = [pytest.mark.full, pytest.mark.within(300)]
DRIVER = Path(__file__).parent / "driver_during_upgrade.py"
HELLO = """
import fray, trio
from fray import ResourceConfig

class Cell:
    def __init__(self): self.n = 0
    async def add(self, k): self.n += k; return self.n

async def main():
    async with fray.open_cluster() as cluster, cluster.open_scope("hello") as scope:
        await cluster.wait_for_nodes(1)
        small = ResourceConfig.with_cpu(cpu=0.2, memory="100MB")
        cell = await scope.create_actor(Cell, name="cell", resources=small)
        print(await scope.run(pow, 2, 10, resources=small), [await cell.add(k) for k in (1, 2, 3)])

trio.run(main)
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_previous(tmp_path_factory.mktemp("previous"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(tmp_path) as cluster:
        yield cluster


def hello(cluster: Cluster, tree: Path) -> str:
    """Run a driver of a build: a job and an actor."""
    done = subprocess.run(
        [sys.executable, "-c", HELLO],
        env=cluster.environ(tree),
        cwd=cluster.directory,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    return done.stdout + done.stderr


def calls(cluster: Cluster) -> int:
    file = cluster.directory / "progress"
    return int(file.read_text()) if file.exists() else 0


def wait_calls(cluster: Cluster, more: int = 20) -> None:
    """Wait until the driver has got answers to further calls."""
    enough = calls(cluster) + more
    driver = cluster.running["driver"]
    wait_until(lambda: driver.poll() is not None or calls(cluster) >= enough, f"{more} further calls")
    assert driver.poll() is None, cluster.log("driver")


def starts(cluster: Cluster) -> list[tuple[str, Path]]:
    """Each start of a job or actor, and the package that ran it."""
    file = cluster.directory / "starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(line.split(" ", 1)[0], Path(line.split(" ", 1)[1]).parents[1]) for line in lines]


def test_an_upgrade_ends_no_job_and_runs_every_call_once(cluster: Cluster, previous: Path) -> None:
    cluster.start_controller(previous)
    for name in ("a", "b"):
        cluster.start_node(name, previous)
    cluster.start("driver", previous, str(DRIVER), str(cluster.directory))
    wait_calls(cluster)
    wait_until(lambda: len(starts(cluster)) == 4, "three jobs and the actor run")
    # Before anything else: the way back, by the command of the new release, while the old controller runs.
    backup = cluster.directory / "backup.tar"
    cluster.fray(ROOT, "backup", "--store", str(cluster.store), str(backup))

    cluster.stop("controller")
    cluster.start_controller(ROOT)
    assert "migrated from schema 2 to" in cluster.log("controller")
    wait_until(lambda: len(cluster.nodes(ROOT)) == 2, "both nodes are back")
    wait_calls(cluster)
    # Jobs and the actor have not noticed.
    assert len(starts(cluster)) == 4

    for name in ("a", "b"):
        cluster.fray(ROOT, "drain", name, "--reason", "upgrade", "--wait")
        wait_calls(cluster)
        cluster.stop(name)
        cluster.start_node(name, ROOT)
        wait_until(lambda name=name: cluster.nodes(ROOT)[name]["alive"] is True, f"{name} is back")  # type: ignore[misc]
        cluster.fray(ROOT, "uncordon", name)
        wait_calls(cluster)
    last = dict(starts(cluster))
    assert set(last.values()) == {ROOT}, starts(cluster)

    (cluster.directory / "finish").touch()
    assert cluster.running["driver"].wait(timeout=WITHIN_S) == 0, cluster.log("driver")
    summary = json.loads((cluster.directory / "summary.json").read_text())
    assert Path(summary["fray"]).parents[1] == previous
    assert summary["results"] == [f"work-{number} has finished" for number in range(3)]
    assert summary["states"] == ["succeeded"] * 3
    assert summary["sum"] == 6
    # Every call once: in the actor's state, which moved with it, and in the file that it wrote.
    every = list(range(summary["calls"]))
    assert summary["state"] == every
    assert [int(line) for line in (cluster.directory / "effects").read_text().split()] == every

    # Back: the old controller refuses the store, and starts on the backup.
    cluster.stop("controller")
    controller = cluster.start("refused", previous, "-m", "fray.controller.main", "--store", str(cluster.store))
    assert controller.wait(timeout=WITHIN_S) != 0
    assert "was written by a later version of Fray" in cluster.log("refused")
    cluster.fray(ROOT, "backup", "--store", str(cluster.directory / "restored"), "--restore", str(backup))


def test_a_new_driver_and_a_new_node_work_with_an_old_controller(cluster: Cluster, previous: Path) -> None:
    cluster.start_controller(previous)
    cluster.start_node("old", previous)
    assert hello(cluster, ROOT) == "1024 [1, 3, 6]\n"
    cluster.stop("old")
    cluster.start_node("new", ROOT)
    for tree in (previous, ROOT):
        assert hello(cluster, tree) == "1024 [1, 3, 6]\n"


def test_a_release_too_far_away_is_refused_by_the_same_line_on_both_sides(cluster: Cluster, tmp_path: Path) -> None:
    distant = export_distant(tmp_path / "distant")
    cluster.start_controller(ROOT)
    node = cluster.start_node("far", distant)
    assert node.wait(timeout=WITHIN_S) != 0
    oldest, newest = WIRE_VERSIONS
    line = (
        f"no common version of the wire format: fray 9.0.0 dials and speaks versions 90 to 91, fray {VERSION} listens "
        f"and speaks versions {oldest} to {newest}; upgrade the listening side first"
    )
    for name in ("far", "controller"):
        assert line in cluster.log(name), cluster.log(name)
    assert f"ProtocolMismatch: {line}" in hello(cluster, distant)


def test_the_snapshot_is_the_schema_of_the_previous_build(previous: Path) -> None:
    script = Path(__file__).parent / "wire_schema.py"
    printed = subprocess.run(
        [sys.executable, str(script), str(previous)], capture_output=True, check=True, env={**os.environ}, text=True
    ).stdout
    assert json.loads(printed) == json.loads(SNAPSHOT.read_text())
