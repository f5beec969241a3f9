"""Archives of ``fray report`` are replayed in the simulator."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import trio
from attrs import evolve

from fray import Cluster, Entrypoint, JobRequest, ResourceConfig
from fray.cli.inspection import report as reports
from fray.model.policy.policy import Policy
from fray.model.resources import Capacity, Device, PortRange
from fray.scheduler.state.rows import SchedulerConfig
from fray.testing.fakes import SimNetwork
from fray.testing.ground_truth import GroundTruth
from fray.testing.seed import Seed, Trace
from fray.testing.sim_cluster import EPOCH_S, DriverProcess, MachineSpec, SimCluster, open_sim_cluster
from tests.simulation import report_replay
from tests.simulation.commands import main
from tests.simulation.run import run_in_virtual_time
from tests.simulation.workloads import book, request, stumble

SERVER = Capacity(4000, 8 * 1024**3, 2**40, (), {"zone": "z"}, PortRange(20_000, 100))
Story = Callable[[SimCluster, Cluster], Awaitable[None]]


def reported(path: Path, story: Story, machines: Sequence[Capacity] = (SERVER, SERVER)) -> Path:
    """Return an archive that ``fray report`` has written of a job of another simulated cluster, after the story."""
    seed = Seed(3)

    async def inline(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    async def run() -> None:
        truth = GroundTruth(trio.current_time)
        specs = [MachineSpec(f"m{number}", capacity) for number, capacity in enumerate(machines)]
        network = SimNetwork(seed.stream("network"), Trace())

        async def body(cluster: Cluster) -> None:
            await trio.sleep(5)
            await story(sim, cluster)
            words = {"job": "train", "lines": 100, "output": path, "json": True, "cluster": "fray://simulated:1"}
            assert await reports.report(cluster, argparse.Namespace(**words, namespace="*", all=False)) == 0

        clock = SimpleNamespace(time=lambda: EPOCH_S + trio.current_time())
        with book(truth), mock.patch.object(reports, "time", clock):
            async with open_sim_cluster(
                seed, network, truth, specs, rules=SchedulerConfig(), policy=Policy(), run_in_thread=inline
            ) as sim:
                await DriverProcess(sim, "ada").run(body, namespace=None, grace_s=10)
        assert truth.breaches == []

    run_in_virtual_time(seed, run)
    return path


def program(seconds: float, **more: Any) -> JobRequest:
    entrypoint = Entrypoint.from_binary("work", [str(seconds), "0"])
    return JobRequest("train", entrypoint=entrypoint, resources=ResourceConfig(cpu=1), **more)


async def lose_a_machine(sim: SimCluster, cluster: Cluster) -> None:
    job = await cluster.launch(program(100.0))
    await trio.sleep(40)
    sim.remove_machine(next(iter(sim.truth.living.values())).machine)
    await job.wait()


def causes(path: Path) -> list[str]:
    """Return the causes of the recorded attempts."""
    found = report_replay.read(path).attempts
    return [found[each].cause for each in sorted(found)]


def assert_same(path: Path) -> None:
    code, lines = report_replay.replay(path)
    assert code == 0, "\n".join(lines)


def test_a_job_that_lost_its_machine_is_retried_on_another_one_again(tmp_path: Path) -> None:
    path = reported(tmp_path / "train.tar.gz", lose_a_machine)
    assert causes(path) == ["machine_lost", "succeeded"]
    assert_same(path)


def test_of_two_like_machines_the_one_is_lost_on_which_the_job_runs(tmp_path: Path) -> None:
    async def lose_the_other(sim: SimCluster, cluster: Cluster) -> None:
        filler = await cluster.launch(evolve(program(60.0), name="filler", resources=ResourceConfig(cpu=4)))
        await filler.wait_running()
        job = await cluster.launch(program(100.0))
        await trio.sleep(40)
        sim.remove_machine(sim.truth.living[f"{job.id}:0:0"].machine)
        await job.wait()

    # Machines of a provider, of which each has the name of its unit.
    machines = [evolve(SERVER, attributes={"zone": "z", "machine": f"unit-{number}"}) for number in range(2)]
    path = reported(tmp_path / "train.tar.gz", lose_the_other, machines)
    assert causes(path) == ["machine_lost", "succeeded"]
    assert_same(path)


def test_a_job_continues_on_its_machine_once_that_is_back(tmp_path: Path) -> None:
    async def restart_twice(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(program(100.0))
        machine = sim.machines["m0"]
        for up_s in (30.0, 50.0):
            await trio.sleep(up_s)
            machine.kill()
            await trio.sleep(20.0)
            machine.boot()
        await job.wait()

    path = reported(tmp_path / "train.tar.gz", restart_twice, [SERVER])
    assert causes(path) == ["machine_lost", "machine_lost", "succeeded"]
    assert_same(path)


def test_a_job_that_failed_twice_succeeds_with_its_third_attempt_again(tmp_path: Path) -> None:
    async def fail_twice(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(request("train", stumble, "t", 2, 30.0, max_retries_failure=2))
        await job.wait()

    path = reported(tmp_path / "train.tar.gz", fail_twice)
    assert causes(path) == ["failure", "failure", "succeeded"]
    assert_same(path)


def test_a_gang_ends_with_its_killed_member_and_runs_again(tmp_path: Path) -> None:
    async def kill_a_member(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(program(60.0, replicas=3, max_retries_failure=1))
        await trio.sleep(20)
        victim = f"{job.id}:0:1"
        launcher = sim.machines[sim.truth.living[victim].machine].launcher
        assert launcher is not None
        assert launcher.crash(victim)
        await job.wait()

    path = reported(tmp_path / "train.tar.gz", kill_a_member)
    assert causes(path) == ["gang", "killed", "gang", *["succeeded"] * 3]
    assert_same(path)


def test_a_gang_with_accelerators_that_loses_a_machine_runs_again_on_others(tmp_path: Path) -> None:
    devices = tuple(Device(f"gpu-{number}", "gpu", "h100") for number in range(4))

    async def lose_a_member(sim: SimCluster, cluster: Cluster) -> None:
        resources = ResourceConfig.with_gpu("h100", count=4, cpu=1, memory="1GB")
        job = await cluster.launch(evolve(program(1000.0, replicas=2), resources=resources))
        await trio.sleep(20)
        sim.remove_machine(sim.truth.living[f"{job.id}:0:1"].machine)
        await job.wait()

    path = reported(tmp_path / "train.tar.gz", lose_a_member, [evolve(SERVER, devices=devices)] * 3)
    assert causes(path) == ["gang", "machine_lost", "succeeded", "succeeded"]
    assert_same(path)


def test_limits_of_the_request_end_the_job_again(tmp_path: Path) -> None:
    async def run_too_long(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(program(500.0, time_limit_s=50.0, max_retries_failure=3))
        await job.wait_ended()

    async def use_too_much(sim: SimCluster, cluster: Cluster) -> None:
        resources = ResourceConfig(cpu=1, memory="100MB")
        entrypoint = Entrypoint.from_binary("hog", ["20.0", "0"])
        hog = evolve(program(20.0, max_retries_out_of_memory=1), entrypoint=entrypoint, resources=resources)
        await (await cluster.launch(hog)).wait_ended()

    for story, cause in ((run_too_long, ["time_limit"]), (use_too_much, ["out_of_memory", "out_of_memory"])):
        path = reported(tmp_path / "train.tar.gz", story)
        assert causes(path) == cause
        assert_same(path)


def test_a_job_that_runs_or_was_stopped_does_so_again(tmp_path: Path) -> None:
    async def run(sim: SimCluster, cluster: Cluster) -> None:
        await cluster.launch(program(500.0, detached=True))
        await trio.sleep(70)

    async def stop(sim: SimCluster, cluster: Cluster) -> None:
        job = await cluster.launch(program(500.0))
        await trio.sleep(70)
        await job.terminate()
        await job.wait_ended()

    for story, cause in ((run, ""), (stop, "stopped")):
        path = reported(tmp_path / "train.tar.gz", story)
        assert causes(path) == [cause]
        assert_same(path)


# Archives that differ ------------------------------------------------------------------------------------------------


def unpacked(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file is not None}


def pack(path: Path, files: dict[str, str]) -> Path:
    """Write an archive; names with a slash are those of its members, others are put into a directory."""
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name if "/" in name else f"train/{name}")
            member.size = len(text.encode())
            member.type = tarfile.GNUTYPE_SPARSE if name == "log.sparse" else tarfile.REGTYPE
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return unpacked(reported(tmp_path_factory.mktemp("report") / "train.tar.gz", lose_a_machine))


def changed(files: dict[str, str], name: str, **values: Any) -> dict[str, str]:
    """Return the files, with other values in one of them; in a list, in its first element."""
    content = json.loads(files[name])
    (content[0] if isinstance(content, list) else content).update(values)
    return files | {name: json.dumps(content)}


def test_a_scheduler_that_decides_otherwise_is_shown_by_attempt(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pack(
        tmp_path / "train.tar.gz",
        changed(files, "request.json", max_retries_machine_loss=0, max_retries_preemption=0),
    )
    assert main(["--report", str(path)]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS state of the job: succeeded in the record, failed in the simulation" in out
    assert "DIFFERS attempt 1:0: succeeded in the record, never placed in the simulation" in out


BIG = "9" * 5000
BAD: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], str]] = {
    "no versions": (lambda files: {"job.json": "{}"}, "it lacks versions.json"),
    "another format": (lambda files: changed(files, "versions.json", format=7), "it has format 7, and this is the"),
    "no request": (
        lambda files: {name: text for name, text in files.items() if name != "request.json"} | {"missing.txt": ""},
        "it lacks request.json",
    ),
    "why it is missing": (
        lambda files: (
            {name: text for name, text in files.items() if name != "request.json"}
            | {"missing.txt": "request.json: an earlier fray\n"}
        ),
        "it lacks request.json: an earlier fray",
    ),
    "no JSON": (lambda files: files | {"job.json": "{"}, "job.json has another form: not the JSON"),
    "deep JSON": (lambda files: files | {"job.json": "[" * 100_000}, "job.json has another form"),
    "another type": (lambda files: changed(files, "job.json", state="great"), "job.json has another form"),
    "a long number": (lambda files: changed(files, "attempts.json", placed_at=10**400), "attempts.json has another"),
    "no number": (lambda files: changed(files, "attempts.json", ended_at=float("inf")), "it has times of more than"),
    "years": (lambda files: changed(files, "job.json", end_time=9e9), "it has times of more than 14 days"),
    "no attempts": (lambda files: files | {"attempts.json": "[]"}, "its job was never placed"),
    "preempted": (lambda files: changed(files, "attempts.json", cause="preempted"), "what it made room for is not in"),
    "unknown cause": (lambda files: changed(files, "attempts.json", cause="bored"), "'bored' is not a valid EndReason"),
    "a long id": (
        lambda files: changed(files, "attempts.json", attempt_id=f"{json.loads(files['job.json'])['job_id']}:{BIG}:0"),
        "are of several jobs",
    ),
    "another job": (
        lambda files: changed(files, "attempts.json", attempt_id="x-1:0:0"),
        "its files are of several jobs",
    ),
    "no machine": (lambda files: changed(files, "attempts.json", node="m9"), "machine m9 of attempt"),
    "a group": (lambda files: changed(files, "request.json", job_group="g-1"), "is a member of a job group"),
    "an impossible request": (lambda files: changed(files, "request.json", members=-1), "its request is refused"),
    "a path": (lambda files: {"../../x": ""}, "it has '../../x', which fray report does not write"),
    "an absolute path": (lambda files: {"/etc/x": ""}, "it has '/etc/x', which fray report does not write"),
    "two directories": (lambda files: {"a/x": "", "b/x": ""}, "which fray report does not write|it has other files"),
    "many": (lambda files: {f"{number}.txt": "" for number in range(40)}, "it has other files than fray report"),
    "zeros": (lambda files: files | {"log.sparse": "x"}, "it has 'train/log.sparse', which fray report does not write"),
    "too much": (lambda files: files | {"log.txt": " " * 70_000_000}, "more than 64 MiB unpacked"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_archive_that_cannot_be_replayed_is_refused_with_the_reason(
    what: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, reason = BAD[what]
    assert main(["--report", str(pack(tmp_path / "train.tar.gz", change(files)))]) == 2
    out = capsys.readouterr().out
    assert "train.tar.gz cannot be replayed: " in out
    assert any(each in out for each in reason.split("|")), out


PACKED = gzip.compress(b"none", mtime=0)  # the names of the tests must be the same in all of pytest's workers


@pytest.mark.parametrize("content", [None, b"", b"none", PACKED, PACKED[:9], PACKED[:10] + b"\xff" * 40])
def test_other_files_are_no_archives(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.tar.gz"
    if content is not None:
        path.write_bytes(content)
    assert main(["--report", str(path)]) == 2
    assert "it is not an archive of fray report" in capsys.readouterr().out
