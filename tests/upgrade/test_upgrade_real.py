"""An upgrade of a running cluster from an earlier build to this one, with real processes of both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fray.model.messages.session import VERSION
from fray.net.channel.versions import WIRE_VERSIONS
from tests.processes.test_tls_real import HOST
from tests.upgrade.builds import (
    PREVIOUS,
    RECENT,
    ROOT,
    WITHIN_S,
    Cluster,
    export_build,
    export_distant,
    open_cluster,
    wait_until,
)
from tests.upgrade.wire_schema import SNAPSHOT, problems

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
    return export_build(PREVIOUS, tmp_path_factory.mktemp(PREVIOUS))


@pytest.fixture(scope="module")
def recent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_build(RECENT, tmp_path_factory.mktemp(RECENT))


@pytest.fixture(params=["previous", "recent"])
def earlier(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


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


class Work:
    """A driver with jobs and an actor, which it calls until `finish`."""

    def __init__(self, cluster: Cluster, name: str, tree: Path, jobs: int = 3, restarts: int = -1) -> None:
        self.cluster, self.name, self.tree, self.jobs = cluster, name, tree, jobs
        self.directory = cluster.directory / name
        self.directory.mkdir()
        self.process = cluster.start(f"{name}-driver", tree, str(DRIVER), str(self.directory), str(jobs), str(restarts))
        self.wait_calls()
        wait_until(lambda: len(self.starts()) == jobs + 1, "the jobs and the actor run")

    def wait_calls(self, more: int = 20) -> None:
        """Wait until the driver has got answers to further calls."""
        enough = self._calls() + more
        wait_until(lambda: self.process.poll() is not None or self._calls() >= enough, f"{more} further calls")
        assert self.process.poll() is None, self.cluster.log(f"{self.name}-driver")

    def _calls(self) -> int:
        file = self.directory / "progress"
        return int(file.read_text()) if file.exists() else 0

    def starts(self) -> list[tuple[str, Path]]:
        """Each start of a job or actor, and the tree of the build that ran it."""
        file = self.directory / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(name, Path(module).parents[1]) for name, module in (line.split(" ", 1) for line in lines)]

    def finish(self) -> None:
        """End it, and check that all jobs have succeeded and each call has run once."""
        (self.directory / "finish").touch()
        assert self.process.wait(timeout=WITHIN_S) == 0, self.cluster.log(f"{self.name}-driver")
        summary = json.loads((self.directory / "summary.json").read_text())
        assert Path(summary["fray"]).parents[1] == self.tree
        assert summary["results"] == [f"work-{number} has finished" for number in range(self.jobs)]
        assert summary["states"] == ["succeeded"] * self.jobs
        assert summary["sum"] == 6
        # In the actor's state, which moves with it, and in the file that it has written.
        every = list(range(summary["calls"]))
        assert summary["state"] == every
        assert [int(line) for line in (self.directory / "effects").read_text().split()] == every


def replace_controller(cluster: Cluster, tree: Path) -> None:
    cluster.stop("controller")
    cluster.start_controller(tree)


def replace_node(cluster: Cluster, name: str) -> None:
    """Restart an empty node as this build, and put it into service."""
    cluster.stop(name)
    cluster.start_node(name, ROOT)
    wait_until(lambda: cluster.nodes(ROOT)[name]["alive"] is True, f"{name} is back")
    cluster.fray(ROOT, "uncordon", name)


def test_an_upgrade_ends_no_job_and_runs_every_call_once(cluster: Cluster, previous: Path) -> None:
    cluster.start_controller(previous)
    cluster.start_node("c", previous)
    # An actor that may not restart, and so may not move: its node is replaced when it has ended.
    pinned = Work(cluster, "pinned", previous, jobs=0, restarts=0)
    cluster.fray(ROOT, "cordon", "c", "--reason", "upgrade")
    for name in ("a", "b"):
        cluster.start_node(name, previous)
    work = Work(cluster, "work", previous)
    # The way back, by the command of the new release, while the old controller runs.
    backup = cluster.directory / "backup.tar"
    cluster.fray(ROOT, "backup", "--store", str(cluster.store), str(backup))

    replace_controller(cluster, ROOT)
    assert "migrated from schema 2 to" in cluster.log("controller")
    wait_until(lambda: len(cluster.nodes(ROOT)) == 3, "all nodes are back")
    for driver in (work, pinned):
        driver.wait_calls()
    # Jobs and actors have not noticed.
    assert len(work.starts()) == 4
    for name in ("a", "b"):
        cluster.fray(ROOT, "drain", name, "--reason", "upgrade", "--wait")
        work.wait_calls()
        replace_node(cluster, name)
        work.wait_calls()
    assert set(dict(work.starts()).values()) == {ROOT}, work.starts()
    work.finish()
    pinned.wait_calls()
    assert pinned.starts() == [("ledger", previous)]
    pinned.finish()
    wait_until(lambda: cluster.nodes(ROOT)["c"]["attempts"] == 0, "c is empty")
    replace_node(cluster, "c")

    # Back: the old controller refuses the store, and starts on the backup.
    cluster.stop("controller")
    refused = cluster.start("refused", previous, "-m", "fray.controller.main", "--store", str(cluster.store))
    assert refused.wait(timeout=WITHIN_S) != 0
    assert "was written by a later version of Fray" in cluster.log("refused")
    cluster.fray(previous, "backup", "--store", str(cluster.directory / "restored"), "--restore", str(backup))
    restored = evolve(cluster, directory=cluster.directory / "back", store=cluster.directory / "restored", running={})
    restored.directory.mkdir()
    restored.start_controller(previous)
    restored.close()


def test_a_controller_of_a_wrong_release_ends_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_controller(ROOT)
    cluster.start_node("a", ROOT)
    work = Work(cluster, "work", ROOT)
    replace_controller(cluster, export_distant(tmp_path / "distant"))
    wait_until(lambda: "no common version of the wire format" in cluster.log("a"), "the node is refused")
    work.wait_calls()
    replace_controller(cluster, ROOT)
    wait_until(lambda: cluster.nodes(ROOT)["a"]["alive"] is True, "the node is back")
    work.wait_calls()
    assert len(work.starts()) == 4
    work.finish()


def test_a_new_driver_and_a_new_node_work_with_an_old_controller(cluster: Cluster, earlier: Path) -> None:
    cluster.start_controller(earlier)
    cluster.start_node("old", earlier)
    assert hello(cluster, ROOT) == "1024 [1, 3, 6]\n"
    cluster.stop("old")
    cluster.start_node("new", ROOT)
    for tree in (earlier, ROOT):
        assert hello(cluster, tree) == "1024 [1, 3, 6]\n"


@pytest.mark.skipif(not HOST, reason="this machine has no address but loopback")
def test_both_builds_work_together_over_tls(cluster: Cluster, earlier: Path) -> None:
    cluster.host = HOST
    cluster.start_controller(earlier)
    cluster.start_node("n", earlier)
    assert hello(cluster, ROOT) == "1024 [1, 3, 6]\n"
    replace_controller(cluster, ROOT)
    assert hello(cluster, earlier) == "1024 [1, 3, 6]\n"
    cluster.stop("n")
    cluster.start_node("n", ROOT)
    assert hello(cluster, earlier) == "1024 [1, 3, 6]\n"


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


def schema_of(tree: Path) -> dict[str, Any]:
    script = [sys.executable, str(Path(__file__).parent / "wire_schema.py"), str(tree)]
    printed = subprocess.run(script, capture_output=True, check=True, text=True).stdout
    return dict(json.loads(printed))


def test_the_snapshot_is_the_schema_of_the_previous_build(previous: Path) -> None:
    assert schema_of(previous) == json.loads(SNAPSHOT.read_text())


def test_what_the_recent_build_reads_and_writes_is_still_there(recent: Path) -> None:
    assert list(problems(schema_of(recent), schema_of(ROOT))) == []
