"""Drivers of a running cluster that come and go: real sockets that are cut, real processes that are stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest, JobState, ResourceConfig
from tests.support import job_functions

sys.path.insert(0, str(Path(__file__).parent))
from cut_network import as_wire, open_saboteur

from tests.processes.lab import TOKEN, Lab, open_lab

SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="50MB")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab:
        yield lab


def small(name: str, fn: object, *args: object, detached: bool = False) -> JobRequest:
    entrypoint = Entrypoint.from_callable(fn, args)  # type: ignore[arg-type]
    return JobRequest(name=name, entrypoint=entrypoint, resources=SMALL, detached=detached)


class Script:
    """A driver in a process of its own; it says where it is, line by line."""

    def __init__(self, lab: Lab, source: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=lab.environ(**more),
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await trio.to_thread.run_sync(self.process.stdout.readline)).strip()

    async def until(self, wanted: str) -> None:
        seen = []
        while (line := await self.line()) != wanted:
            seen.append(line)
            assert line, f"it ended before it said {wanted!r}: {seen} {self.errors()}"

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read() if self.process.poll() is not None else "(it lives)"

    async def ended(self) -> tuple[int, str, str]:
        """Exit status, and what it said at the end, on both streams."""
        out, errors = await trio.to_thread.run_sync(self.process.communicate)
        return self.process.returncode, out, errors


# A network that drops ------------------------------------------------------------------------------------------------


async def test_waits_calls_and_logs_go_on_over_a_network_that_drops_again_and_again(
    lab: Lab, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_wire(monkeypatch, f"tcp:127.0.0.1:{lab.port}")
    with trio.fail_after(60):
        async with open_saboteur(f"tcp:127.0.0.1:{lab.port}", seed=3) as saboteur:
            saboteur.calm = True  # until it is connected: what comes before has no session to resume
            async with fray.open_cluster(saboteur.address.replace("tcp:", "fray://"), token=TOKEN) as cluster:
                await cluster.wait_for_nodes(1)
                session = cluster._runtime.session
                async with cluster.open_scope("run") as scope:
                    counter = await scope.create_actor(job_functions.Counter, 0)
                    teller = await scope.launch(small("teller", job_functions.tell_until, counter, 40))
                    await teller.wait_running()
                    saboteur.calm = False
                    jobs = 0
                    while saboteur.cuts < 10:
                        assert await scope.run(job_functions.double, jobs, resources=SMALL) == 2 * jobs
                        assert await counter.add(1) == jobs + 1
                        jobs += 1
                        assert len(await cluster.list_jobs()) >= jobs
                    saboteur.calm = True
                    await counter.add(1000)
                    assert await teller.wait() == 40
                assert cluster._runtime.session == session
                assert await cluster.events(teller)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("(teller)")]
    assert lines == [f"(teller) line {number}" for number in range(40)], "each line once, in order"


# A driver that is stopped --------------------------------------------------------------------------------------------

SLEEPER = """
import fray, trio
from tests.support import job_functions
from fray import Entrypoint, JobRequest, ResourceConfig

def request(name, **more):
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(job_functions.hang),
                      resources=ResourceConfig.with_cpu(cpu=0.1, memory="50MB"), **more)

async def main():
    try:
        async with fray.open_cluster(namespace="sleeper", grace_s=1.0) as cluster, cluster.open_scope("run") as scope:
            job = await scope.launch(request("owned"))
            await scope.launch(request("kept", detached=True))
            await job.wait_running()
            print("asleep", flush=True)
            await trio.sleep_forever()
    except* fray.SessionEnded as group:
        print(*{f"{type(error).__name__}: {error}" for error in group.exceptions}, sep="\\n", flush=True)
    async with fray.open_cluster(namespace="sleeper") as cluster:
        kept = await cluster.get_job("kept")
        print("found", kept.id, kept.info.state, flush=True)
        await kept.terminate()
        print("ended", (await kept.wait_ended()).state, flush=True)

trio.run(main)
"""


BLOCKING_SLEEPER = """
import fray
from fray.blocking import open_cluster
from tests.support import job_functions
from fray import Entrypoint, JobRequest, ResourceConfig

request = JobRequest(name="owned", entrypoint=Entrypoint.from_callable(job_functions.hang),
                     resources=ResourceConfig.with_cpu(cpu=0.1, memory="50MB"))
try:
    with open_cluster(namespace="sleeper-2", grace_s=1.0) as cluster, cluster.open_scope("run") as scope:
        job = scope.launch(request)
        job.wait_running()
        print("asleep", flush=True)
        try:
            job.wait()
        except fray.SessionEnded:
            print("ended in the block", flush=True)
            raise
except* fray.SessionEnded:
    print("ended by the block", flush=True)
with open_cluster(namespace="sleeper-2") as cluster:
    print([info.state.value for info in cluster.list_jobs()], flush=True)
"""


@pytest.mark.promise("P5")
async def test_drivers_that_were_stopped_for_longer_than_their_grace_go_on_with_a_clear_error_and_a_fresh_session(
    lab: Lab,
) -> None:
    with trio.fail_after(40):
        native, blocking = Script(lab, SLEEPER), Script(lab, BLOCKING_SLEEPER)
        for script in (native, blocking):
            await script.until("asleep")
        for script in (native, blocking):
            script.process.send_signal(signal.SIGSTOP)
        stopped_at = trio.current_time()
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="sleeper", logs=False) as watcher:
            owned, kept = await watcher.get_job("owned"), await watcher.get_job("kept")
            ended = await owned.wait_ended()
            took_s = trio.current_time() - stopped_at
            assert (ended.state, ended.cause) == (JobState.STOPPED, fray.EndReason.OWNER_ENDED)
            assert "the driver was gone for 1 s" in (ended.error_message or "")
            assert took_s <= 1.5 + 1 + 5 + 2, "silence noticed, grace, termination policy, and a busy machine"
            await (await watcher.get_job("owned", "sleeper-2")).wait_ended()
            for script in (native, blocking):
                script.process.send_signal(signal.SIGCONT)
            code, out, errors = await native.ended()
        lines = out.splitlines()
        assert code == 0, errors
        assert len(lines) == 3
        assert lines[0].startswith("SessionEnded: session session-")
        assert f"Detached jobs still run: {kept.id}. Open the cluster again" in lines[0]
        assert lines[1:] == [f"found {kept.id} running", "ended stopped"]
        code, out, errors = await blocking.ended()
        assert code == 0, errors
        assert out.splitlines() == ["ended in the block", "ended by the block", "['stopped']"]


async def test_what_is_detached_outlives_its_driver_and_is_adopted_by_its_name(lab: Lab) -> None:
    """Launched by a driver that dies by kill -9; without a namespace, it has that of its name."""
    source = """
import fray, trio
from tests.support import job_functions
async def main():
    async with fray.open_cluster() as cluster:
        request = fray.JobRequest(name="nightly/report", detached=True,
                                  entrypoint=fray.Entrypoint.from_callable(job_functions.print_and_return, ("hello",)))
        await (await cluster.launch(request)).wait_running()
        print("launched", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""
    with trio.fail_after(30):
        script = Script(lab, source)
        await script.until("launched")
        script.process.kill()
        await script.ended()
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            job = await cluster.get_job("nightly/report")
            assert job.info.namespace == "nightly/report"
            assert await job.wait() == "hello"
            with pytest.raises(fray.NoSuchJob, match="no job 'nightly/none' in namespace"):
                await cluster.get_job("nightly/none")


# Ctrl-C --------------------------------------------------------------------------------------------------------------

STAGES = """
import os, sys, fray, trio
from tests.support import job_functions
from fray import Entrypoint, JobRequest, ResourceConfig

def request(name, fn, *args):
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn, args),
                      resources=ResourceConfig.with_cpu(cpu=0.5, memory="50MB"))

async def connecting():
    print("now", flush=True)
    async with fray.open_cluster():
        raise AssertionError("no controller answers there")

async def launching():
    async with fray.open_cluster(namespace="launching") as cluster, cluster.open_scope("run") as scope:
        for number in range(100_000):
            await scope.launch(request(f"job-{number}", job_functions.hang))
            if number == 3:
                print("now", flush=True)

async def calling():
    async with fray.open_cluster(namespace="calling") as cluster, cluster.open_scope("run") as scope:
        counter = await scope.create_actor(job_functions.Counter, 0)
        await counter.add(1)
        print("now", flush=True)
        await counter.slow_add(1, 1000)

async def leaving():
    async with fray.open_cluster(namespace="leaving") as cluster, cluster.open_scope("run") as scope:
        await (await scope.launch(request("stubborn", job_functions.hang))).wait_running()
        print("now", flush=True)

trio.run(globals()[os.environ["STAGE"]])
"""


async def test_ctrl_c_at_any_stage_of_a_driver_leaves_nothing(lab: Lab) -> None:
    with trio.fail_after(40), socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        nowhere = {"FRAY_CLUSTER_SPEC": f"fray://127.0.0.1:{deaf.getsockname()[1]}"}

        async def interrupted(stage: str) -> None:
            script = Script(lab, STAGES, STAGE=stage, **(nowhere if stage == "connecting" else {}))
            await script.until("now")
            script.process.send_signal(signal.SIGINT)
            code, _, errors = await script.ended()
            assert code == -signal.SIGINT, f"{stage}: {errors}"
            assert errors.rstrip().endswith("KeyboardInterrupt"), f"{stage}: {errors}"

        stages = ("connecting", "launching", "calling", "leaving")
        async with trio.open_nursery() as nursery:
            for stage in stages:
                nursery.start_soon(interrupted, stage)
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            for stage in stages[1:]:
                infos = await cluster.list_jobs(stage)
                assert infos, stage
                ended = await cluster.wait([info.job_id for info in infos])
                assert {info.state for info in ended} <= {JobState.STOPPED, JobState.FAILED}, stage


# Two drivers ---------------------------------------------------------------------------------------------------------


async def test_two_drivers_in_two_namespaces_never_meet(lab: Lab) -> None:
    with trio.fail_after(30):
        async with (
            fray.open_cluster(lab.spec, token=TOKEN, namespace="left", logs=False) as left,
            fray.open_cluster(lab.spec, token=TOKEN, namespace="right", logs=False) as right,
        ):
            mine = await left.launch(small("same", job_functions.hang))
            theirs = await right.launch(small("same", job_functions.hang))
            actor = await left.create_actor(job_functions.Counter, 1, name="counter")
            other = await right.create_actor(job_functions.Counter, 100, name="counter")
            assert (await actor.add(1), await other.add(1)) == (2, 101)
            assert [info.job_id for info in await left.list_jobs(prefix="same")] == [mine.id]
            assert [info.job_id for info in await right.list_jobs(prefix="same")] == [theirs.id]
            assert (await left.get_job("same")).id == mine.id
            assert [info.namespace for info in await left.list_actors()] == ["left"]
            assert await (await right.get_actor("counter")).add(1) == 102
            await left.delete_actor("counter")
            assert await (await right.get_actor("counter")).add(1) == 103
            await (await left.get_job("same")).terminate()
            await mine.wait_ended()
            assert not (await right.poll(theirs)).state.finished
            await theirs.terminate()  # a block waits for its jobs


async def test_two_drivers_that_launch_the_same_at_the_same_time_get_the_same_job(lab: Lab) -> None:
    with trio.fail_after(30):
        async with (
            fray.open_cluster(lab.spec, token=TOKEN, namespace="race", logs=False) as one,
            fray.open_cluster(lab.spec, token=TOKEN, namespace="race", logs=False) as two,
        ):
            got: dict[str, list[fray.Job]] = {"id": [], "name": []}

            async def by_id(cluster: fray.Cluster) -> None:
                got["id"].append(await cluster.launch(small("by-id", job_functions.hang), job_id="by-id-2026"))

            async def by_name(cluster: fray.Cluster) -> None:
                got["name"].append(await cluster.launch(small("by-name", job_functions.hang), adopt_existing=True))

            async with trio.open_nursery() as nursery:
                for launch in (by_id, by_name):
                    for cluster in (one, two):
                        nursery.start_soon(launch, cluster)
            for jobs in got.values():
                assert len({job.id for job in jobs}) == 1
                assert len(jobs) == 2
            with pytest.raises(fray.NameInUse, match="resources"):
                other = ResourceConfig.with_cpu(cpu=0.2, memory="50MB")
                request = JobRequest(
                    name="by-name", entrypoint=Entrypoint.from_callable(job_functions.hang), resources=other
                )
                await two.launch(request, adopt_existing=True)
            with pytest.raises(fray.NameInUse):
                await two.launch(small("by-name", job_functions.double, 1))
            for job, _ in got.values():
                await job.terminate()
            assert [(await job.wait_ended()).state for jobs in got.values() for job in jobs] == [JobState.STOPPED] * 4
