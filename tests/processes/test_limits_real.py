"""Resources that attempts use, and how attempts that exceed their request are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import trio

import fray.node.resources.allocator
from fray.model.resources import Demand
from fray.model.specs import EndReason, Phase
from fray.node.attempts.process_launcher import STATE_FORMAT, ProcessLauncher
from fray.node.linux.cgroups import CgroupManager, find_cgroup_manager
from fray.node.resources.allocator import ResourceAllocator
from tests.processes.launcher_bench import open_bench
from tests.processes.process_trees import lives

MB = 1024**2


async def start_and_stop(state_dir: str, held: ResourceAllocator | None = None) -> None:
    """The next life of a node."""
    async with trio.open_nursery() as nursery:
        await nursery.start(ProcessLauncher(state_dir, warm=(), allocator=held).run)
        nursery.cancel_scope.cancel()


HERE_GROUPS = find_cgroup_manager("probe")
needs_groups = pytest.mark.skipif(HERE_GROUPS is None, reason="control groups cannot be made here")


def allocator(state_dir: Path, limiter: str) -> ResourceAllocator:
    groups: CgroupManager | None = find_cgroup_manager(str(state_dir)) if limiter == "group" else None
    return ResourceAllocator(groups, enforce=limiter != "off")


@pytest.mark.parametrize("limiter", ["watch", pytest.param("group", marks=needs_groups)])
@pytest.mark.promise("P11")
async def test_a_tree_that_takes_more_than_it_requested_is_ended_with_advice_what_to_write(
    tmp_path: Path, limiter: str
) -> None:
    async with open_bench(tmp_path, allocator=allocator(tmp_path, limiter)) as bench:
        attempt = bench.start("hog", memory_limit_bytes=128 * MB)
        outcome = await bench.outcome(attempt)
        assert outcome.cause is EndReason.OUT_OF_MEMORY
        assert "the limit is the 128 MB it requested" in outcome.message
        assert "Set ResourceConfig(memory='" in outcome.message
        most = 256 * MB if limiter == "group" else 1024 * MB  # who only watches, on a busy machine, comes late
        assert 100 * MB < outcome.peak_memory_bytes < most
        if bench.launcher.allocator.groups is not None:
            assert list(bench.launcher.allocator.groups.leftover()) == []


async def test_a_job_without_a_request_has_no_limit_and_its_peak_is_on_record(tmp_path: Path) -> None:
    async with open_bench(tmp_path, allocator=allocator(tmp_path, "watch")) as bench:
        attempt = bench.start("hog", env_vars={"PIECES": "20"})
        await bench.until_phase(attempt, Phase.RUNNING)
        pid = (await bench.until_phase(attempt, Phase.RUNNING))[0].pid
        while resident(pid) < 150 * MB:  # noqa: ASYNC110 - there is no event
            await trio.sleep(0.01)
        bench.launcher.kill(attempt)
        assert (await bench.outcome(attempt)).peak_memory_bytes > 150 * MB


def resident(pid: int | None) -> int:
    """Return the resident memory of the children of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(int(Path(f"/proc/{child}/statm").read_text().split()[1]) * 4096 for child in children)


async def test_pages_that_many_processes_share_count_once(tmp_path: Path) -> None:
    async with open_bench(tmp_path, allocator=allocator(tmp_path, "watch")) as bench:
        attempt = bench.start("share", memory_limit_bytes=200 * MB)  # 7 resident sets of 60 MB and more
        outcome = await bench.outcome(attempt)
        assert outcome.cause is EndReason.SUCCEEDED, outcome.message


async def test_cpu_seconds_are_of_the_whole_tree_strays_included(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        outcome = await bench.outcome(bench.start("burn"))
        assert outcome.cause is EndReason.SUCCEEDED
        assert 0.2 <= outcome.cpu_s < 5


async def test_pinned_attempts_have_cpus_of_their_own_and_give_them_back(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    async with open_bench(tmp_path, allocator=ResourceAllocator(None)) as bench:
        whole = {"pin_cpus": True, "demand": Demand(cpu_milli=1000)}
        for number in range(2):
            value = await bench.value(bench.start(f"pinned-{number}", env_vars={"MKL_NUM_THREADS": "7"}, **whole))
            seen = json.loads(value or b"")
            assert (seen["cpus"], seen["child"]) == (mine[:1], 1)
            assert (seen["environ"]["OMP_NUM_THREADS"], seen["environ"]["MKL_NUM_THREADS"]) == ("1", "7")
        more = bench.start("pinned-more", pin_cpus=True, demand=Demand(cpu_milli=(len(mine) + 1) * 1000))
        outcome = await bench.outcome(more)
        assert outcome.cause is EndReason.ENVIRONMENT
        assert "it offers more than it has" in outcome.message


@pytest.mark.timed
@needs_groups
def test_a_node_that_is_killed_leaves_no_group_behind(tmp_path: Path) -> None:
    """Start and end a node whose shims notice its end, and clean up for it."""
    node = subprocess.Popen([sys.executable, "-c", DIE_BESIDE_A_JOB, str(tmp_path)], stdout=subprocess.PIPE)
    assert node.communicate()[0] == b"1\n"
    assert node.returncode == -signal.SIGKILL
    found = find_cgroup_manager(str(tmp_path))
    assert found is not None
    deadline = time.monotonic() + 30
    while list(found.leftover()):
        assert time.monotonic() < deadline


DIE_BESIDE_A_JOB = """
import os, signal, sys, trio
from pathlib import Path
from tests.processes.launcher_bench import open_bench
from tests.processes.test_limits_real import allocator

async def main(state_dir):
    held = allocator(state_dir, "group")
    async with open_bench(state_dir, allocator=held) as bench:
        await bench.until_line(bench.start("deaf"), "ready")
        print(len(list(held.groups.leftover())), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

trio.run(main, Path(sys.argv[1]))
"""


@needs_groups
def test_a_daemon_without_environment_is_found_by_its_group_when_shim_and_all_are_gone(tmp_path: Path) -> None:
    """The worst without a namespace: what is left has no mark, no parent of ours, and works elsewhere."""
    left = find_cgroup_manager(str(tmp_path))
    assert left is not None
    group = left.make("attempt")
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}, setsid=True)
    group.add_process(pid)
    trio.run(start_and_stop, str(tmp_path), allocator(tmp_path, "group"))
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
    assert not os.path.exists(group.path)


def test_a_daemon_without_environment_is_found_by_where_it_works(tmp_path: Path) -> None:
    home = tmp_path / "attempts" / "one"
    home.mkdir(parents=True)
    (tmp_path / "format").write_text(f"{STATE_FORMAT}\n")
    program = 'import os, sys; os.chdir(sys.argv[1]); os.execve("/bin/sleep", ["sleep", "1000"], {})'
    ours = subprocess.Popen([sys.executable, "-c", program, str(home)], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], start_new_session=True)
    while not all(b"sleep\0" in Path(f"/proc/{one.pid}/cmdline").read_bytes()[:6] for one in (ours, other)):
        pass
    trio.run(start_and_stop, str(tmp_path))
    assert ours.wait() == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


async def test_devices_that_a_stranger_still_holds_are_busy_before_the_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger came while the attempt ran; processes that held the device before it do not count."""
    monkeypatch.setattr(fray.node.resources.allocator, "FREE_S", 0.1)
    device = tmp_path / "nvidia0"
    device.touch()
    held = ResourceAllocator(None)
    held.files = {"gpu-0": str(device)}
    async with open_bench(tmp_path / "node", allocator=held, offered={"gpu": 1}) as bench:
        reports = reports_of_busy_devices(bench.launcher)
        with open(device):  # noqa: ASYNC230 - as a driver's daemon has it
            attempt = bench.start("obey", devices=("gpu-0",))
            await bench.until_line(attempt, "ready")
            async with trio.open_nursery() as nursery:
                start = partial(trio.run_process, ["sleep", "1000"], stdin=device.open("rb"), check=False)
                stranger = await nursery.start(start)
                bench.launcher.stop(attempt)
                await bench.outcome(attempt)
                assert reports.receive_nowait() == {"gpu-0": f"held by pid {stranger.pid} (sleep)"}
                stranger.kill()
        assert await reports.receive() == {}


def reports_of_busy_devices(launcher: ProcessLauncher) -> trio.MemoryReceiveChannel[dict[str, str]]:
    send, receive = trio.open_memory_channel[dict[str, str]](10)
    launcher.on_busy = lambda: send.send_nowait(launcher.allocator.busy)
    return receive


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/freezer", os.W_OK), reason="processes cannot be frozen here")
async def test_processes_that_cannot_be_killed_are_reported_and_keep_their_devices_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process hears no signal, as one that waits for a dead disk."""
    here = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{here}")
    freezer = Path("/sys/fs/cgroup/freezer") / f"fray-test-{os.getpid()}"
    freezer.mkdir()
    held = ResourceAllocator(None)
    try:
        async with open_bench(tmp_path, allocator=held, subreaper=True, warm=("job_functions:sweep_shortly",)) as bench:
            reports = reports_of_busy_devices(bench.launcher)
            attempt = bench.start("scatter", devices=("gpu-0",), env_vars={"FREEZER": str(freezer)})
            outcome = await bench.outcome(attempt)
            assert (outcome.cause, outcome.message[:30]) == (EndReason.SUCCEEDED, "1 of its processes could not b")
            why = reports.receive_nowait()["gpu-0"]
            assert why.startswith("1 processes of scatter:0:0 cannot be killed (below pid ")
            pid = int((freezer / "cgroup.procs").read_text())
            assert lives(pid)
            (freezer / "freezer.state").write_text("THAWED")
            assert await reports.receive() == {}
            assert not lives(pid)
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        freezer.rmdir()
