"""Resource limits of attempts: control groups, sampling, CPUs, devices; all from files and numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray import EndReason, InvalidRequest, ResourceConfig
from fray.model.specs import Outcome
from fray.model.text import byte_size_text
from fray.node.linux.cgroups import Cgroup, find_cgroup_manager
from fray.node.resources import device_variables as devices
from fray.node.resources.cpu_pinning import CpuTable, thread_variables
from fray.node.resources.device_holders import (
    TPU_LOCK,
    device_files,
    device_holder_text,
    holders,
    remove_stale_lock,
)
from fray.node.resources.device_variables import device_variables
from fray.node.shim.cgroup_guard import CgroupGuard
from fray.node.shim.resource_usage import (
    MAX_CPU_SHARE,
    MAX_SAMPLE_S,
    MIN_SAMPLE_S,
    next_sample_s,
    out_of_memory_outcome,
)

MB, GIB = 1024**2, 1024**3


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, *, procs: str = "", handed: str = "", offered: str = "cpu memory pids") -> Path:
    """A node in a service of its own, as a service manager that delegates makes it."""
    group = "sys/fs/cgroup/system.slice/fray.service"
    return machine(
        root,
        {
            "proc/self/cgroup": "0::/system.slice/fray.service\n",
            "sys/fs/cgroup/cgroup.controllers": offered,
            f"{group}/cgroup.controllers": offered,
            f"{group}/cgroup.subtree_control": handed,
            f"{group}/cgroup.procs": procs,
        },
    )


def v1(root: Path) -> Path:
    group = "sys/fs/cgroup/memory/fray"
    return machine(root, {"proc/self/cgroup": "4:memory:/fray\n0::/\n", f"{group}/memory.limit_in_bytes": "max"})


def write_files(path: str, files: dict[str, str]) -> None:
    """The kernel fills a new group with files; nothing does in a plain directory."""
    machine(Path(path), files)


# Groups ---------------------------------------------------------------------------------------------------------------


def test_version_2_limits_memory_without_swap_and_kills_all_or_none(tmp_path: Path) -> None:
    groups = find_cgroup_manager("/state", v2(tmp_path, handed="memory"))
    assert groups is not None
    assert groups.kind == "cgroup2"
    limits = ("memory.max", "memory.swap.max", "memory.oom.group")
    write_files(str(groups.base / f"{groups._prefix}a"), dict.fromkeys(limits, ""))
    group = groups.make("a", 64 * MB)
    assert [Path(group.path, name).read_text() for name in limits] == [str(64 * MB), "0", "1"]
    write_files(group.path, {"memory.events": "low 0\noom 3\noom_kill 2\n", "memory.peak": f"{65 * MB}\n"})
    assert (group.oom_kills(), group.peak_bytes()) == (2, 65 * MB)
    assert [old.path for old in groups.leftover()] == [group.path]


def test_version_1_does_as_well(tmp_path: Path) -> None:
    groups = find_cgroup_manager("/state", v1(tmp_path))
    assert groups is not None
    assert groups.kind == "cgroup1"
    write_files(str(groups.base / f"{groups._prefix}a"), {"memory.limit_in_bytes": ""})
    group = groups.make("a", 64 * MB)
    assert Path(group.path, "memory.limit_in_bytes").read_text() == str(64 * MB)
    write_files(group.path, {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"})
    write_files(group.path, {"memory.max_usage_in_bytes": str(64 * MB)})
    assert (group.oom_kills(), group.peak_bytes()) == (1, 64 * MB)


def test_a_node_alone_in_its_group_moves_down_and_hands_the_controller_on(tmp_path: Path) -> None:
    root = v2(tmp_path, procs=f"{os.getpid()}\n")
    base = root / "sys/fs/cgroup/system.slice/fray.service"
    write_files(str(base / "fray-node"), {"cgroup.procs": ""})
    assert find_cgroup_manager("/state", root) is not None
    assert (base / "fray-node/cgroup.procs").read_text() == str(os.getpid())
    assert (base / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize(
    "why", [{"procs": f"1\n{os.getpid()}\n"}, {"offered": "cpu pids"}, {"offered": ""}], ids=["shared", "none", "bare"]
)
def test_where_groups_cannot_be_had_there_are_none(tmp_path: Path, why: dict[str, str]) -> None:
    assert find_cgroup_manager("/state", v2(tmp_path, **why)) is None


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    assert find_cgroup_manager("/state", machine(tmp_path, {"proc/self/cgroup": ""})) is None


def test_a_kill_by_the_kernel_is_the_first_cause_of_what_the_job_says_of_it(tmp_path: Path) -> None:
    failed: list[Outcome] = []
    guard = CgroupGuard(Cgroup(str(tmp_path), 2), 64 * MB, failed.append)
    failure = Outcome(cause=EndReason.FAILURE, message="a worker died", exit_code=1)
    assert guard.amend_outcome(failure) == failure
    write_files(str(tmp_path), {"memory.events": "oom_kill 1\n"})
    outcome = guard.amend_outcome(failure)
    assert (outcome.cause, outcome.exit_code) == (EndReason.OUT_OF_MEMORY, 1)
    assert outcome.message.endswith("Its own outcome: a worker died")
    guard.processes_moved = True
    guard.on_timer(float("inf"))
    assert [one.cause for one in failed] == [EndReason.OUT_OF_MEMORY]
    assert guard.next_due_at() is None


def test_a_kill_by_the_kernel_keeps_what_was_measured_of_the_job(tmp_path: Path) -> None:
    guard = CgroupGuard(Cgroup(str(tmp_path), 2), 64 * MB, lambda outcome: None)
    guard.processes_moved = True
    write_files(str(tmp_path), {"memory.events": "oom_kill 1\n", "memory.peak": str(60 * MB)})
    killed = Outcome(
        cause=EndReason.KILLED, signal=9, duration_s=3.0, cpu_s=2.0, peak_memory_bytes=64 * MB, captured="stacks"
    )
    outcome = guard.amend_outcome(killed)
    assert outcome.cause is EndReason.OUT_OF_MEMORY
    assert (outcome.duration_s, outcome.cpu_s, outcome.captured) == (3.0, 2.0, "stacks")
    assert outcome.peak_memory_bytes == 64 * MB
    assert outcome.message.startswith("its processes used 64 MB")


# Looks ----------------------------------------------------------------------------------------------------------------


def test_near_its_limit_a_tree_is_looked_at_often_and_far_from_it_seldom() -> None:
    assert next_sample_s(8 * GIB, 8 * GIB, 0.0, 100) == MIN_SAMPLE_S
    assert next_sample_s(0, 1 * GIB, 0.0, 100) == 0.5
    assert next_sample_s(0, 512 * GIB, 0.0, 100) == MAX_SAMPLE_S
    assert next_sample_s(0, 0, 0.0, 2.0) == 2.0


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0, 10), st.floats(0, 1e6))
def test_looking_never_costs_more_than_its_share(used: int, limit: int, cost_s: float, age_s: float) -> None:
    assert cost_s <= MAX_CPU_SHARE * next_sample_s(used, limit, cost_s, age_s) * 1.000001


def test_an_attempt_over_its_limit_gets_an_error_that_says_what_to_write() -> None:
    outcome = out_of_memory_outcome(2 * GIB, 2 * GIB + 300 * MB)
    assert outcome.cause is EndReason.OUT_OF_MEMORY
    assert "used 2.293 GB of memory; the limit is the 2 GB it requested" in outcome.message
    assert "Set ResourceConfig(memory='3GB')" in outcome.message
    assert ResourceConfig(memory="3GB").memory_limit_bytes() == 3 * GIB
    assert byte_size_text(1536, "") == "1.5KB"


def test_only_what_was_asked_for_is_a_limit() -> None:
    assert (ResourceConfig().demand().memory_bytes, ResourceConfig().memory_limit_bytes()) == (2 * GIB, 0)
    gpu = ResourceConfig.with_gpu("h100")
    assert (gpu.demand().memory_bytes, gpu.memory_limit_bytes()) == (16 * GIB, 0)
    asked = ResourceConfig.with_cpu(memory="1GB")
    assert (asked.demand().memory_bytes, asked.memory_limit_bytes()) == (GIB, GIB)


# CPUs -----------------------------------------------------------------------------------------------------------------


def test_neighbours_are_given_first() -> None:
    table = CpuTable((0, 1, 3, 4, 5))
    assert table.grant("a", 3) == (3, 4, 5)
    assert table.grant("b", 2) == (0, 1)
    assert table.grant("c", 1) is None
    table.release("a")
    assert table.grant("c", 1) == (3,)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"), st.integers(1, 4))))
def test_no_cpu_is_ever_given_twice(steps: list[tuple[bool, str, int]]) -> None:
    table = CpuTable(range(6))
    for grant, holder, count in steps:
        if not grant:
            table.release(holder)
        elif (found := table.grant(holder, count)) is not None:
            assert set(found) <= set(table.cpus)
        given_out = [cpu for cpus in table.allocated.values() for cpu in cpus]
        assert len(given_out) == len(set(given_out))
        assert sorted([*given_out, *table.free()]) == list(table.cpus)


@pytest.mark.parametrize("cpu", [0, 0.5, 1.5])
def test_parts_of_cpus_cannot_be_pinned(cpu: float) -> None:
    with pytest.raises(InvalidRequest, match="needs whole CPUs"):
        ResourceConfig(cpu=cpu, pin_cpus=True).demand()


def test_libraries_get_the_number_of_threads_unless_the_job_sets_it() -> None:
    assert thread_variables((2, 3), {"OMP_NUM_THREADS": "9"})["MKL_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in thread_variables((2, 3), {"OMP_NUM_THREADS": "9"})
    assert thread_variables((), {}) == {}


# Devices --------------------------------------------------------------------------------------------------------------


def test_a_job_sees_the_gpus_it_was_granted_in_the_order_of_their_ids_on_the_bus() -> None:
    found = device_variables(("gpu-2", "gpu-0"), {"gpu": 4})
    assert found == {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert device_variables((), {"gpu": 4})["CUDA_VISIBLE_DEVICES"] == ""
    assert device_variables((), {}) == {}


def test_a_part_of_a_tpu_host_is_described_as_libtpu_reads_it_and_a_whole_one_is_not() -> None:
    part = device_variables(("tpu-2", "tpu-3"), {"tpu": 4})
    assert (part["TPU_VISIBLE_CHIPS"], part["TPU_VISIBLE_DEVICES"]) == ("2,3", "2,3")
    assert (part["TPU_CHIPS_PER_PROCESS_BOUNDS"], part["TPU_PROCESS_BOUNDS"]) == ("1,2,1", "1,1,1")
    assert device_variables(tuple(f"tpu-{n}" for n in range(4)), {"tpu": 4}) == {}
    hidden = device_variables((), {"tpu": 4})
    assert (hidden["TPU_VISIBLE_CHIPS"], hidden["JAX_PLATFORMS"]) == ("", "cpu")


def test_the_file_of_a_device_is_found_by_its_place_on_the_bus(tmp_path: Path) -> None:
    bus = "proc/driver/nvidia/gpus"
    root = machine(
        tmp_path,
        {
            f"{bus}/0000:0a:00.0/information": "Model: NVIDIA H100\nDevice Minor: \t 1\n",
            f"{bus}/0000:05:00.0/information": "Model: NVIDIA H100\nDevice Minor: \t 0\n",
            **{f"dev/vfio/{number}": "" for number in (0, 2, 10)},
        },
    )
    assert device_files(root) == {
        "gpu-0": "/dev/nvidia0",
        "gpu-1": "/dev/nvidia1",
        "tpu-0": "/dev/vfio/0",
        "tpu-1": "/dev/vfio/2",
        "tpu-2": "/dev/vfio/10",
    }


def test_who_holds_a_device_is_read_from_its_open_files(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/7/comm": "python\n", "proc/8/comm": "bash\n", "proc/self": ""})
    for pid, number, target in ((7, 3, "/dev/accel0"), (7, 4, "/dev/null"), (8, 0, "/dev/pts/1")):
        (root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        (root / f"proc/{pid}/fd/{number}").symlink_to(target)
    found = holders(["/dev/accel0", "/dev/accel1"], root)
    assert found == {7: {"/dev/accel0"}}
    assert device_holder_text(found, root) == {"/dev/accel0": "pid 7 (python)"}


def test_a_stale_lock_of_libtpu_is_removed_and_a_held_one_is_not(tmp_path: Path) -> None:
    import fcntl

    lock = machine(tmp_path, {str(TPU_LOCK): ""}) / TPU_LOCK
    with open(lock) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert not remove_stale_lock(tmp_path)
    assert remove_stale_lock(tmp_path)
    assert not lock.exists()


def test_the_page_shows_the_table_of_variables() -> None:
    page = (Path(__file__).parents[2] / "docs/processes.md").read_text()
    rows = [line for line in (devices.__doc__ or "").splitlines() if line.startswith(("gpu ", "tpu "))]
    for row in rows:
        kind, granted, hidden = (" ".join(cell.split()) for cell in re.split(r"  +", row))
        assert f"| {kind} | {granted} | {hidden} |".replace("``", "`") in page
