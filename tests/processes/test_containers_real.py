"""Jobs in containers, with a stand-in for podman that runs them on this machine (`tests/processes/podman`)."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import Entrypoint, EnvironmentConfig, JobFailed, JobRequest
from fray.model.specs import EndReason
from tests.processes.environment_functions import Uses, where
from tests.processes.lab import TOKEN, open_lab
from tests.processes.process_trees import sleeping

LIMIT_S = 90.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the stand-in's containers; it and the interpreter of the tests are on the path."""
    (tmp_path / "bin").mkdir()
    shutil.copy(Path(__file__).with_name("podman"), tmp_path / "bin/podman")
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(tmp_path / "containers"))
    (tmp_path / "containers").mkdir()
    return tmp_path / "containers"


def containers(place: Path) -> list[Path]:
    return list(place.glob("fray-*"))


IMAGE = EnvironmentConfig(docker_image="there", env_vars={"GREETING": "good\nmorning"})


async def test_jobs_and_actors_run_in_containers_and_these_end_with_them(place: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=2&cpu=2") as cluster, cluster.open_scope("s") as scope:

            async def launch(name: str, entrypoint: Entrypoint, environment: EnvironmentConfig = IMAGE) -> Any:
                request = JobRequest(name=name, entrypoint=entrypoint, environment=environment)
                return await scope.launch(request, on_failure="absorb")

            job = await launch("call", Entrypoint.from_callable(where))
            assert await job.wait() == ("good\nmorning", True)
            actor = await scope.create_actor(Uses, environment=IMAGE)
            assert await actor.where() == ("good\nmorning", True)
            program = await launch("program", Entrypoint.from_binary("sh", ["-c", 'test "$GREETING" && exit 7']))
            with pytest.raises(JobFailed, match="7"):
                await program.wait()
            none = await launch("none", Entrypoint.from_binary("true"), EnvironmentConfig(docker_image="nowhere"))
            with pytest.raises(JobFailed, match="not found in any registry") as caught:
                await none.wait()
            assert caught.value.details["cause"] is EndReason.ENVIRONMENT

            stopped = await launch("stopped", Entrypoint.from_binary("sleep", ["1000"]))
            await stopped.wait_running()
            await stopped.terminate()
            await stopped.wait_ended()
            assert len(containers(place)) == 1, "the actor's"
    assert containers(place) == []


async def test_a_container_whose_client_was_killed_is_removed(place: Path) -> None:
    with trio.fail_after(LIMIT_S):
        async with fray.open_cluster("machine?nodes=2&cpu=2") as cluster, cluster.open_scope("s") as scope:
            seconds = f"1000.{os.getpid()}"
            request = JobRequest(name="j", entrypoint=Entrypoint.from_binary("sleep", [seconds]), environment=IMAGE)
            job = await scope.launch(request, on_failure="absorb")
            while not containers(place):  # noqa: ASYNC110 - another program's file
                await trio.sleep(0.01)
            info = await job.wait_running()
            assert len(sleeping(seconds)) == 1
            os.kill(info.attempts[-1].pid or 0, signal.SIGKILL)
            await job.wait_ended()
            assert containers(place) == []
            while sleeping(seconds):  # noqa: ASYNC110 - another program's end
                await trio.sleep(0.01)


def test_a_command_runs_in_the_container_of_its_job(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fray.cli", *words]
        return subprocess.run(command, text=True, timeout=LIMIT_S, check=False, **options)

    (tmp_path / "lab").mkdir()
    monkeypatch.setenv("COLOR", "red")
    with open_lab(tmp_path / "lab", "alpha") as lab:
        monkeypatch.setenv("FRAY_CLUSTER_SPEC", lab.spec)
        monkeypatch.setenv("FRAY_TOKEN", TOKEN)
        job = (
            "--detach",
            "--name",
            "j",
            "--image",
            "there",
            "--cpu",
            "0.1",
            "--memory",
            "200MB",
            "--env",
            "COLOR=green",
        )
        assert run("run", *job, "--", "sleep", "1000").returncode == 0
        give_up_at = time.monotonic() + LIMIT_S
        while not containers(place):
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        (container,) = containers(place)
        words = (place / "command").read_text().split("\n")
        directory = os.path.realpath(words[words.index("--workdir") + 1])
        script = "echo $COLOR; pwd; cat; echo odd >&2; exit 7"
        said = run("exec", "j", "--", "sh", "-c", script, input="typed\n", capture_output=True)
        assert (said.returncode, said.stdout, said.stderr) == (7, f"green\n{directory}\ntyped\n", "odd\n")
        assert (place / "command").read_text().split("\n")[1:5] == ["exec", "--interactive", container.name, "sh"]
        assert run("exec", "j", "--", "no-such-program", capture_output=True).returncode == 127
        refused = run("profile", "j", "--native", capture_output=True)
        assert "runs in a container" in refused.stderr

        terminal, inside = pty.openpty()
        script = "test -t 0 && test -t 1 && echo $TERM on a terminal"
        environ = {**os.environ, "TERM": "vt100"}
        said = run("exec", "j", "--", "sh", "-c", script, stdin=inside, stdout=inside, stderr=inside, env=environ)
        os.close(inside)
        assert (said.returncode, os.read(terminal, 1000)) == (0, b"vt100 on a terminal\r\n")
        os.close(terminal)
        assert run("stop", "j").returncode == 0
        assert containers(place) == []


async def test_where_there_is_no_engine_the_job_is_refused_at_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    async with fray.open_cluster("machine?nodes=2&cpu=2") as cluster, cluster.open_scope("s") as scope:
        request = JobRequest(name="j", entrypoint=Entrypoint.from_binary("true"), environment=IMAGE)
        with pytest.raises(fray.NeverSchedulable, match="docker \\(a daemon that answers\\) or podman"):
            await scope.launch(request)
