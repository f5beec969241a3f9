"""Messages to systemd, received at a real socket, and the units of ``deploy/systemd``."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from fray.cli.options import parser_of
from fray.controller.options import parse as parse_controller
from fray.net.service_manager import VARIABLES, keep_watchdog, notify
from fray.node.job_process.inherited_environ import node_environ
from fray.node.main import parse as parse_node

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Socket of a service manager, and its address as the variable has it."""
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name if request.param == "file" else f"\0{name}")
        receiver.settimeout(5)
        yield receiver, name if request.param == "file" else f"@{name}"


def test_a_message_arrives_at_its_socket(manager: tuple[socket.socket, str]) -> None:
    receiver, address = manager
    notify("READY=1\nSTATUS=waiting", {"NOTIFY_SOCKET": address})
    assert receiver.recv(100) == b"READY=1\nSTATUS=waiting"


def test_without_a_manager_or_without_its_socket_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    notify("READY=1", {})
    assert not caplog.text
    notify("READY=1", {"NOTIFY_SOCKET": "/nonexistent/notify"})
    assert "/nonexistent/notify was not notified of READY=1" in caplog.text


async def test_the_watchdog_gets_two_signs_of_life_in_each_period(
    manager: tuple[socket.socket, str], autojump_clock: trio.abc.Clock
) -> None:
    receiver, address = manager
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
    with trio.move_on_after(24):
        await keep_watchdog(environ)
    receiver.setblocking(False)
    assert [receiver.recv(100) for _ in range(5)] == [b"WATCHDOG=1"] * 5  # at 0, 5, 10, 15, 20 s
    with pytest.raises(BlockingIOError):
        receiver.recv(100)


@pytest.mark.parametrize(
    "environ",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}],
)
async def test_without_a_watchdog_of_this_process_there_are_no_signs(environ: dict[str, str]) -> None:
    await keep_watchdog(environ)


def test_jobs_do_not_inherit_the_variables_of_the_service_manager() -> None:
    environ = dict.fromkeys(VARIABLES, "x") | {"HOME": "/root"}
    assert node_environ(environ, "/state").keys() == {"HOME", "FRAY_NODE_STATE"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_is_one_that_its_program_takes(unit: Path) -> None:
    (line,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    program, *arguments = shlex.split(line.removeprefix("ExecStart="))
    parse = {"fray-controller": parse_controller, "fray-node": parse_node, "fray": parser_of().parse_args}
    parse[Path(program).name](arguments)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    installed = tmp_path / unit.name
    # With a program that is there, and the account of this process.
    text = unit.read_text().replace("User=fray\n", "")
    installed.write_text(
        "\n".join(
            f"ExecStart={sys.executable}" if line.startswith("ExecStart=") else line for line in text.splitlines()
        )
    )
    done = subprocess.run(["systemd-analyze", "verify", str(installed)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
