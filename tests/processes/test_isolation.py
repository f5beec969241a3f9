"""PID namespaces, where this machine gives them, and what holds without."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray.errors import LaunchFailed
from fray.model.specs import EndReason, EntryKind, Phase, TerminationPolicy
from fray.node.config import PidNamespaceMode
from fray.node.shim.pid_namespace import isolation_mode, namespace_error, uses_pid_namespace
from tests.processes.launcher_bench import Bench, open_bench
from tests.processes.process_trees import lives, open_tree, seconds_until_gone

pytestmark = pytest.mark.timed

HERE = str(Path(__file__).parent)
NONE_HERE = namespace_error()
needs_namespaces = pytest.mark.skipif(bool(NONE_HERE), reason=f"no PID namespaces: {NONE_HERE}")
BRANCHES = [pytest.param(PidNamespaceMode.ON, marks=needs_namespaces), PidNamespaceMode.OFF]


def test_which_attempts_get_a_namespace() -> None:
    for entry in EntryKind:
        assert uses_pid_namespace(PidNamespaceMode.ON, entry, "")
        assert not uses_pid_namespace(PidNamespaceMode.OFF, entry, "")
        assert uses_pid_namespace(PidNamespaceMode.AUTO, entry, "") is (entry is EntryKind.BINARY)
        assert not uses_pid_namespace(PidNamespaceMode.ON, entry, "refused")
    assert isolation_mode(PidNamespaceMode.AUTO, "") == "pid_namespace:programs"
    assert {isolation_mode(PidNamespaceMode.OFF, ""), isolation_mode(PidNamespaceMode.AUTO, "refused")} == {"subreaper"}


async def said(bench: Bench, attempt: str) -> dict[str, Any]:
    await bench.until_phase(attempt, Phase.RUNNING)
    while not (found := [text for who, _, text in bench.lines if who == attempt and text.startswith("{")]):
        await bench.moved.park()
    return dict(json.loads(found[0]))


@needs_namespaces
async def test_in_a_namespace_the_job_sees_its_own_tree_and_the_node_sees_the_machines_numbers(tmp_path: Path) -> None:
    async with open_bench(tmp_path, pid_namespace=PidNamespaceMode.ON) as bench:
        attempt = bench.start("inside")
        seen = await said(bench, attempt)
        pid = (await bench.until_phase(attempt, Phase.RUNNING))[0].pid
        assert pid is not None
        assert os.readlink(f"/proc/{pid}/ns/pid") == seen["ns"]
        assert seen["ns"] != os.readlink("/proc/self/ns/pid")
        assert (seen["ppid"], seen["others"]) == (1, [1, seen["pid"]])
        assert bench.launcher.statistics()["attempts"][attempt][1:] == (seen["pid"], pid)  # no two have the same number
        assert bench.launcher.attributes()["isolation"] == "pid_namespace"
        bench.launcher.stop(attempt)
        assert (await bench.outcome(attempt)).cause is EndReason.SUCCEEDED
        assert not lives(pid)


async def test_a_machine_that_refuses_namespaces_says_so_and_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}")
    refusing = {"warm": ("job_functions:refuse_namespaces",)}
    async with open_bench(tmp_path / "a", pid_namespace=PidNamespaceMode.AUTO, **refusing) as bench:
        assert bench.launcher.attributes()["isolation"] == "subreaper"
        program = bench.start("program", entry=EntryKind.BINARY, argv=("readlink", "/proc/self/ns/pid"))
        assert (await bench.outcome(program)).cause is EndReason.SUCCEEDED
        await bench.until_line(program, os.readlink("/proc/self/ns/pid"))
    with pytest.raises(BaseExceptionGroup) as refused:
        async with open_bench(tmp_path / "b", pid_namespace=PidNamespaceMode.ON, **refusing):
            pass
    assert refused.group_contains(
        LaunchFailed, match="PID namespaces are not available on this machine: not on this machine; use"
    )


@pytest.mark.parametrize("mode", BRANCHES)
async def test_a_storm_with_daemons_is_ended_by_its_ladder_to_the_last(tmp_path: Path, mode: PidNamespaceMode) -> None:
    async with open_bench(tmp_path, pid_namespace=mode, subreaper=False) as bench:
        attempt = bench.start("storm", termination=TerminationPolicy(cancel_s=0, term_s=0))
        await bench.until_line(attempt, "ready")
        bench.launcher.stop(attempt)
        assert (await bench.outcome(attempt)).cause is EndReason.STOPPED
        assert not [pid for pid in below(str(tmp_path)) if lives(pid)]


def below(state_dir: str) -> list[int]:
    """Programs of the storm, with an environment or without."""
    names = (pid for pid in os.listdir("/proc") if pid.isdigit())
    return [int(pid) for pid in names if _argv0(pid).startswith(state_dir)]


def _argv0(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().partition("\0")[0]
    except OSError:
        return ""


@needs_namespaces
def test_shim_zygote_and_node_killed_at_once_leave_nothing_where_there_is_a_namespace(tmp_path: Path) -> None:
    with open_tree(str(tmp_path / "node"), "on") as tree:
        tree.kill("shim", "zygote", "node")
        seconds_until_gone(lambda: tree.of_job("storm-a"), 10)
        assert lives(tree.pid("unrelated"))


class Twin:
    """An actor that shows whether what depends on pids still works."""

    def pid(self) -> int:
        return os.getpid()

    def borrowed(self, numbers: Any) -> bool:
        """Return whether the array came in shared memory."""
        assert numbers.sum() == len(numbers)
        return "/dev/shm/fray" in Path("/proc/self/maps").read_text()


@needs_namespaces
async def test_actors_in_namespaces_share_memory_can_be_looked_at_and_their_deaths_are_noticed() -> None:
    import numpy

    async with fray.open_cluster("machine?nodes=1&pid_namespace=on") as cluster:
        actor = await cluster.create_actor(Twin, name="twin")
        assert await actor.borrowed(numpy.ones(4_000_000))
        pid = (await cluster.actor_info(actor)).pid
        assert pid is not None
        assert pid != await actor.pid()
        if shutil.which("py-spy", path=os.path.dirname(sys.executable)):
            command = [f"{os.path.dirname(sys.executable)}/py-spy", "dump", "--pid", str(pid)]
            done = await trio.run_process(command, capture_stdout=True)
            assert b"MainThread" in done.stdout
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(fray.ActorDied):
            while True:
                await actor.pid()
