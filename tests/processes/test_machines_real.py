"""Machines that come and go, as real processes: below daemons that are killed, and in the example.

Embedded ones are in the page docs/autoscaling.md, which is run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from lab import TOKEN, Lab, connected

import fray
from fray.model.messages.machine_groups import Machines

DAEMON = """
[[group]]
name = "stay"
provider = "process"
memory = "300MB"
max = 1
min = 1
options.detached = true

[[group]]
name = "go"
provider = "process"
memory = "300MB"
max = 1
min = 1
"""


async def until(cluster: fray.Cluster, what: Callable[[Machines], bool], within_s: float = 30) -> Machines:
    with trio.fail_after(within_s):
        while not what(found := await cluster.list_machines()):  # noqa: ASYNC110 - there is no subscription
            await trio.sleep(0.05)
    return found


async def test_the_next_controller_finds_the_machines_that_stayed(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(DAEMON)
    lab = Lab(tmp_path)
    try:
        lab.start_controller("--policy", str(policy))
        await connected(lab)
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            before = await until(cluster, lambda found: all(group.joined for group in found.groups))
            pids = {node.attributes["group"]: node.pid for node in await cluster.nodes()}
        names = {machine.group: machine.name for machine in before.machines}
        lab.kill("controller", signal.SIGKILL)
        assert is_alive(pids["stay"])
        with trio.fail_after(15):
            while is_alive(pids["go"]):  # noqa: ASYNC110
                await trio.sleep(0.05)
        lab.start_controller("--policy", str(policy))
        await connected(lab)
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            fresh = lambda found: {m.group: m.name for m in found.machines if m.phase == "joined"}  # noqa: E731
            after = fresh(
                await until(cluster, lambda found: len(fresh(found)) == 2 and fresh(found)["go"] != names["go"])
            )
            assert after["stay"] == names["stay"]
            assert {node.attributes["group"]: node.pid for node in await cluster.nodes()}["stay"] == pids["stay"]
            said = fray_command(lab, "machines", "--json")
            assert {group["name"]: group["joined"] for group in said["groups"]} == {"stay": 1, "go": 1}
            await cluster.scale_group("stay", max=0)
            await until(cluster, lambda found: [m.group for m in found.machines] == ["go"])
            assert not is_alive(pids["stay"])
    finally:
        lab.close()


def is_alive(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fray_command(lab: Lab, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "fray.cli", *arguments], env=lab.environ(), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


async def test_two_users_share_a_fleet_and_a_production_gang_takes_it_for_a_while(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
    import shared_fleet

    made_room = await shared_fleet.play(10, 1.2, 2, tmp_path)  # longer than a gang waits for machines, 3 s
    said = capfd.readouterr().out
    assert sum(made_room.values()) >= 1
    lines = ("there is no machine yet", "2 requested, 2 alive", "the fleet is full", "carol 4", "no machine is left")
    for line in lines:
        assert line in said
    assert "every task has succeeded" in said
