"""Containers: the command line, and who may have one."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentConfig, EnvironmentSpec
from fray.model.resources import Capacity, Demand
from fray.model.specs import AttemptSpec, EndReason, EntryKind, JobAccount, JobSpec, Outcome
from fray.node.containers.engine import (
    container_name,
    find_engine,
    limit_flags,
    run_command,
)
from fray.node.prepare import PreparedEnvironment
from fray.node.shim.container_plugin import ContainerPlugin
from fray.scheduler.pool.pool import admits_demand


def attempt_spec(entry: EntryKind = EntryKind.BINARY) -> AttemptSpec:
    environment = EnvironmentSpec(docker_image="img", python="3.11")
    spec = JobSpec(
        job_id="j", name="j", namespace="n", entry=entry, argv=("echo", "hi"), environment=environment,
        demand=Demand(cpu_milli=1500), memory_limit_bytes=1 << 30, env_vars={"TOKEN": "hush"},
    )  # fmt: skip
    return AttemptSpec(
        attempt_id="j:0:0", spec=spec, controller="unix:/run/c/sock", key="k", directory="/state/attempts/a",
        sockets="/state/sockets/a",
    )  # fmt: skip


PREPARED = PreparedEnvironment(
    image="img", engine="/usr/bin/podman", label="fray.node=1", library={"trio": "/lib/trio"}
)


def command(entry: EntryKind = EntryKind.BINARY) -> list[str]:
    return run_command(attempt_spec(entry), PREPARED, entry="e:main", cwd="/w", variables=["TOKEN"], user="7:8")


def test_values_of_variables_are_not_on_the_command_line() -> None:
    words = command()
    assert words[words.index("--env") + 1] == "TOKEN"
    assert "hush" not in " ".join(words)


def test_a_program_runs_as_given_in_its_image_as_the_node_s_user_with_its_resources() -> None:
    words = command()
    assert words[:2] == ["/usr/bin/podman", "run"]
    assert words[-3:] == ["img", "echo", "hi"]
    assert {"--rm", "--init", "--cpus=1.5", f"--memory={1 << 30}", "--volume=/lib/trio:/opt/fray/trio:ro"} <= set(words)
    assert [word for word in words if word.startswith("--volume=") and "/opt/fray" not in word] == [
        "--volume=/state/attempts/a:/state/attempts/a",
        "--volume=/state/sockets:/state/sockets:ro",
        "--volume=/state/sockets/a:/state/sockets/a",
        "--volume=/run/c/sock:/run/c/sock:ro",
    ]
    assert words[words.index("--user") + 1] == "7:8"
    assert words[words.index("--name") + 1] == container_name("j:0:0")


def test_under_an_account_no_program_of_the_image_gains_privileges_and_variables_come_in_a_file() -> None:
    account = JobAccount(uid=7, gid=7, name="ada", directory="/state/accounts/7")
    spec = evolve(attempt_spec(), account=account)
    words = run_command(
        spec, PREPARED, entry="e:main", cwd="/w", variables=(), user="7:7", variables_file="/proc/self/fd/5"
    )
    assert "--security-opt=no-new-privileges" in words
    assert words[words.index("--env-file") + 1] == "/proc/self/fd/5"
    assert "--env" not in words
    assert "--security-opt=no-new-privileges" not in command()


def test_of_the_controller_s_directory_nothing_but_sockets_is_seen(tmp_path: Path) -> None:
    spec = evolve(attempt_spec(), controller=f"unix:{tmp_path}/controller")

    def mounted() -> str:
        words = run_command(spec, PREPARED, entry="e:main", cwd="/w", variables=(), user="7:8")
        return next(word for word in words if word.startswith(f"--volume={tmp_path}"))

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "controller"))
        # So that the socket of a restarted controller shows.
        assert mounted() == f"--volume={tmp_path}:{tmp_path}:ro"
        (tmp_path / "token").touch()
        assert mounted() == f"--volume={tmp_path}/controller:{tmp_path}/controller:ro"


def test_python_code_runs_with_the_image_s_python_and_gets_the_path_of_its_attempt_spec() -> None:
    words = command(EntryKind.CALLABLE)
    assert words[words.index("img") + 1 :][:3] == ["python3", "-P", "-c"]
    assert words[-3:] == ["3.11", "e:main", "/state/attempts/a"]


def test_devices_are_named_in_the_engine_s_words() -> None:
    assert limit_flags(0, 0, ["gpu-0", "gpu-2"], podman=False) == ['--gpus="device=0,2"']
    assert limit_flags(0, 0, ["gpu-0", "gpu-2"], podman=True) == [
        "--device=nvidia.com/gpu=0",
        "--device=nvidia.com/gpu=2",
    ]


def test_only_machines_that_run_containers_are_asked() -> None:
    able = Capacity(cpu_milli=1, memory_bytes=1, disk_bytes=1, attributes={"containers": "podman"})
    unable = Capacity(cpu_milli=1, memory_bytes=1, disk_bytes=1)
    assert admits_demand(Demand(containers=True), able)
    assert not admits_demand(Demand(containers=True), unable)
    assert admits_demand(Demand(), unable)


def test_an_image_brings_its_own_packages() -> None:
    with pytest.raises(InvalidRequest, match="build an image with them"):
        EnvironmentConfig(docker_image="img", pip_packages=["polars"])


def program(directory: Path, name: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text("#!/bin/sh\n")
    (directory / name).chmod(0o755)


def test_a_docker_client_without_a_daemon_is_no_engine(tmp_path: Path) -> None:
    program(tmp_path / "bin", "docker")
    environ = {"PATH": str(tmp_path / "bin"), "DOCKER_HOST": f"unix://{tmp_path}/docker.sock"}
    assert find_engine(environ) is None
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "docker.sock"))
        server.listen()
        daemon = threading.Thread(target=_pong, args=[server])
        daemon.start()
        engine = find_engine(environ)
        daemon.join()
    assert engine is not None
    assert engine.kind == "docker"
    program(tmp_path / "bin", "podman")
    os.unlink(tmp_path / "docker.sock")
    engine = find_engine(environ)
    assert engine is not None
    assert engine.kind == "podman"


def _pong(server: socket.socket) -> None:
    with server.accept()[0] as client:
        client.recv(100)
        client.sendall(b"HTTP/1.0 200 OK\r\n\r\nOK")


@pytest.mark.parametrize(
    ("entry", "code", "cause"),
    [
        (EntryKind.BINARY, 125, EndReason.ENVIRONMENT),
        (EntryKind.BINARY, 127, EndReason.FAILURE),
        (EntryKind.CALLABLE, 127, EndReason.ENVIRONMENT),
        (EntryKind.CALLABLE, 1, EndReason.FAILURE),
    ],
)
def test_the_engine_s_own_failures_are_the_environment_s(entry: EntryKind, code: int, cause: EndReason) -> None:
    outcome = Outcome(cause=EndReason.FAILURE, exit_code=code, message="no such image")
    assert ContainerPlugin("podman", attempt_spec(entry)).amend_outcome(outcome).cause is cause
