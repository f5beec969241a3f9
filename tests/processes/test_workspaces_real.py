"""Workspaces on real daemons: edited code reaches the next job, on every node, whatever is killed meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import fray
from fray import Entrypoint, EnvironmentConfig, JobRequest
from tests.processes.lab import (
    SMALL,
    TOKEN,
    Lab,
    connected,
)
from tests.runtime.test_workspace_files import git, write


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a package of its own, which this process can import as a driver's script would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    write(root, "src/mylib/__init__.py", "")
    write(root, "src/mylib/work.py", WORK)
    write(root, "tool.py", "print('tool says', open('config.txt').read())\n")
    write(root, "config.txt", "one")
    write(root, ".gitignore", "secret.txt\n")
    write(root, "secret.txt", "never")
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root / "src"))
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]


WORK = """
import os, sys, subprocess

VERSION = 1

def look():
    return {
        "version": VERSION,
        "cwd": os.getcwd(),
        "file": __file__,
        "files": sorted(os.listdir(".")),
        "config": open("config.txt").read(),
        "tool": subprocess.run([sys.executable, "-m", "tool"], capture_output=True, text=True).stdout,
        "node": os.environ["FRAY_NODE"],
    }

def scribble(text):
    before = open("config.txt").read()
    with open("config.txt", "w") as file:
        file.write(text)
    return before

async def child():
    import fray
    async with fray.current_cluster().open_scope("child") as scope:
        return await scope.run(look, resources=fray.ResourceConfig.with_cpu(cpu=0.1, memory="100MB"))

class Looker:
    def look(self):
        return look()
"""


def request(name: str, fn: object, *args: object) -> JobRequest:
    return JobRequest(
        name=name,
        entrypoint=Entrypoint.from_callable(fn, args),  # type: ignore[arg-type]
        environment=EnvironmentConfig(workspace="."),
        resources=SMALL,
    )


@pytest.fixture
def lab(tmp_path: Path, project: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    environ = os.environ.copy()
    os.environ.pop("PYTHONPATH", None)
    os.environ["PYTHONPATH"] = str(Path(fray.__file__).parent.parent)
    try:
        yield lab
    finally:
        lab.close()
        os.environ.clear()
        os.environ.update(environ)


async def test_an_edit_reaches_the_next_job_on_every_node(lab: Lab, project: Path) -> None:
    import mylib.work  # type: ignore[import-not-found]

    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    with trio.fail_after(60):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            await cluster.wait_for_nodes(1)
            first = await (await cluster.launch(request("first", mylib.work.look)))
            assert first["version"] == 1
            assert first["files"] == [".gitignore", "config.txt", "src", "tool.py"]
            assert first["file"] == f"{first['cwd']}/src/mylib/work.py"
            assert not first["cwd"].startswith(str(project))
            assert first["tool"] == "tool says one\n"
            write(project, "src/mylib/work.py", WORK.replace("VERSION = 1", "VERSION = 2"))
            write(project, "config.txt", "two")
            second = await (await cluster.launch(request("second", mylib.work.look)))
            assert (second["version"], second["config"], second["tool"]) == (2, "two", "tool says two\n")
            # files that one attempt writes are not in the workspace of another
            assert await (await cluster.launch(request("vandal", mylib.work.scribble, "vandal"))) == "two"
            assert await (await cluster.launch(request("after", mylib.work.scribble, "again"))) == "two"
            # children, and actors, are where their parents are
            assert (await (await cluster.launch(request("parent", mylib.work.child))))["version"] == 2
            async with cluster.open_scope("actors") as scope:
                environment = EnvironmentConfig(workspace=".")
                actor = await scope.create_actor(mylib.work.Looker, environment=environment, resources=SMALL)
                assert (await actor.look())["config"] == "two"
            # another node has it from the controller; this one is gone
            lab.kill("alpha", signal.SIGTERM)
            lab.start_node("beta")
            third = await (await cluster.launch(request("third", mylib.work.look)))
            assert (third["version"], third["node"]) == (2, "beta")
            program = JobRequest(
                name="program",
                entrypoint=Entrypoint.from_binary(sys.executable, ["tool.py"]),
                environment=EnvironmentConfig(workspace="."),
                resources=SMALL,
            )
            assert (await (await cluster.launch(program)).wait_ended()).exit_code == 0


async def test_a_node_killed_while_it_fetches_and_a_controller_that_dies_cost_nothing(lab: Lab, project: Path) -> None:
    import mylib.work

    for number in range(40):
        write(project, f"data{number}.bin", os.urandom(500_000))
    lab.start_controller()
    await connected(lab)
    with trio.fail_after(90):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            job = await cluster.launch(request("first", mylib.work.look))
            lab.kill("controller")
            lab.start_controller()
            lab.start_node("alpha")
            chunks = trio.Path(os.environ["XDG_CACHE_HOME"], "fray/workspaces/chunks")
            while not await chunks.is_dir() or not list(await chunks.iterdir()):  # noqa: ASYNC110 - another process
                await trio.sleep(0.01)
            lab.kill("alpha")
            lab.start_node("alpha")
            seen = await job
            assert seen["version"] == 1
            assert len(seen["files"]) == 44


async def test_jobs_of_an_embedded_cluster_have_the_workspace_too(project: Path) -> None:
    import mylib.work

    with trio.fail_after(60):
        async with fray.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
            seen = await (await cluster.launch(request("first", mylib.work.look)))
            assert seen["files"] == [".gitignore", "config.txt", "src", "tool.py"]
            assert seen["cwd"] != str(project)


async def test_a_local_cluster_runs_in_place(project: Path) -> None:
    import mylib.work

    with trio.fail_after(60):
        async with fray.open_cluster("local", logs=False) as cluster:
            assert await (await cluster.launch(request("first", mylib.work.scribble, "in place"))) == "one"
    assert (project / "config.txt").read_text() == "in place"


async def test_a_workspace_that_cannot_be_sent_is_an_error_of_the_launch(project: Path) -> None:
    import mylib.work

    (project / "out").symlink_to("/etc")
    with trio.fail_after(60):
        async with fray.open_cluster("machine?nodes=1&cpu=2", logs=False) as cluster:
            with pytest.raises(fray.InvalidRequest, match="'out' leads out of the workspace"):
                await cluster.launch(request("first", mylib.work.look))
