"""A secret reaches the process, and is looked for everywhere else: store, logs, command lines, records, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, EnvironmentConfig, InvalidRequest, JobRequest, ResourceConfig, Secret

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="256MB")
BROUGHT, GIVEN = "brought-by-the-driver-51", "given-by-the-operator-52"


def request(name: str, fn: Any, **variables: str | Secret) -> JobRequest:
    environment = EnvironmentConfig.create(env_vars=variables)
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn), resources=SMALL, environment=environment)


def show() -> dict[str, Any]:
    """Prints what it must not, and tells what it has, without its values."""
    mine, theirs = os.environ["MINE"], os.environ["THEIRS"]
    print("my token is", mine, flush=True)
    print("theirs is", theirs, file=sys.stderr, flush=True)
    lines = b" ".join(file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists())
    return {
        "reached": (len(mine), len(theirs)),
        "in ps": any(value.encode() in lines for value in (mine, theirs)),
        "GROUP": os.environ["GROUP"],
        "CLUSTER": os.environ["CLUSTER"],
        "OVER": os.environ["OVER"],
    }


def fail() -> None:
    raise RuntimeError(f"cannot log in with {os.environ['MINE']}")


@pytest.fixture
def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A controller and a node with secrets of its own; all they write is below the directory."""
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / "GIVEN").touch(mode=0o600)
    (tmp_path / "secrets" / "GIVEN").write_text(GIVEN + "\n")
    monkeypatch.setenv("FRAY_TOKEN", "t" * 20)
    monkeypatch.delenv("BROUGHT", raising=False)
    socket = f"{tmp_path}/c"
    environ = {**os.environ, "OVER": "node", "CLUSTER": "node"}
    controller = ["--listen", f"unix:{socket}", "--store", f"{tmp_path}/store"]
    node = ["--controller", f"fray+unix://{socket}", "--name", "n", "--state-dir", f"{tmp_path}/n"]
    commands = [
        ["fray.controller.main", *controller, "--env", "CLUSTER=yes", "--env", "OVER=cluster"],
        ["fray.node", *node, "--secrets", f"{tmp_path}/secrets"],
    ]
    running = []
    for number, command in enumerate(commands):
        with (tmp_path / f"journal-{number}").open("wb") as out:
            running.append(subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out, env=environ))
    while not (tmp_path / "c").exists():
        assert running[0].poll() is None, (tmp_path / "journal-0").read_text()
        time.sleep(0.02)
    yield tmp_path
    for process in reversed(running):
        process.terminate()
        process.wait(10)


def all_that_was_written(directory: Path) -> bytes:
    files = [file for file in directory.rglob("*") if file.is_file() and file.parent.name != "secrets"]
    return b"".join(file.read_bytes() for file in files)


async def test_a_secret_reaches_the_process_and_is_found_nowhere_else(
    daemons: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROUGHT", BROUGHT)
    wanted = {"MINE": Secret("BROUGHT"), "THEIRS": Secret("GIVEN")}
    shown: list[str] = []
    with trio.fail_after(30):
        async with fray.open_cluster(f"fray+unix://{daemons}/c") as cluster:
            await cluster.wait_for_nodes(1)
            async with cluster.open_scope("s", env_vars={"GROUP": "group", "OVER": "group"}) as scope:
                job = await scope.launch(request("show", show, **wanted, OVER="job"))
                assert await job == {
                    "reached": (len(BROUGHT), len(GIVEN)),
                    "in ps": False,
                    "GROUP": "group",
                    "CLUSTER": "yes",
                    "OVER": "job",
                }
                failed = await scope.launch(request("fail", fail, MINE=Secret("BROUGHT")), on_failure="absorb")
                with pytest.raises(fray.RemoteError, match=r"cannot log in with \[secret BROUGHT\]"):
                    await failed
                monkeypatch.delenv("BROUGHT")
                with pytest.raises(InvalidRequest, match=r"secret 'BROUGHT' .* is unknown"):
                    await scope.launch(request("poor", fail, MINE=Secret("BROUGHT")))
                shown += [repr(job.info), repr(failed.info), repr(failed.exception()), await cluster.explain(failed)]
                shown += map(repr, await cluster.events(failed))
    out, err = capfd.readouterr()
    assert "my token is [secret BROUGHT]" in out
    assert "theirs is [secret GIVEN]" in err
    written = all_that_was_written(daemons)
    assert b"cannot log in with [secret BROUGHT]" in written, "the right files are looked at"
    for value in (BROUGHT, GIVEN):
        assert value.encode() not in written
        assert value not in out + err + "".join(shown)


async def test_a_secret_reaches_actors_and_pools_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROUGHT", BROUGHT)
    environment = EnvironmentConfig.create(env_vars={"MINE": Secret("BROUGHT")})
    async with fray.open_cluster("machine?nodes=1", logs=False) as cluster, cluster.open_scope("s") as scope:
        holder = await scope.create_actor(Holder, environment=environment)
        assert await holder.size() == len(BROUGHT)
        async with fray.WorkerPool(cluster, num_workers=1, resources=SMALL, environment=environment) as pool:
            assert await pool.submit(len_of_mine) == len(BROUGHT)


class Holder:
    def size(self) -> int:
        return len_of_mine()


def len_of_mine() -> int:
    return len(os.environ["MINE"])
