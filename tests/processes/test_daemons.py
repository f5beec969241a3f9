"""A lab's cluster in small: fray-controller, fray-node and drivers, each a process; and the controller may die (P7)."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest
import trio

import fray
from fray import Entrypoint, JobRequest
from fray.node.linux.process_tree import children
from fray.node.linux.process_wait import wait_process_end
from tests.processes.lab import (
    SMALL,
    TOKEN,
    Lab,
    connected,
    start_script,
)
from tests.processes.strength_functions import Link
from tests.support import job_functions
from tests.support.inspection import AS_ACCOUNT, can_read, needs_accounts


@pytest.mark.promise("P12")
async def test_a_driver_runs_jobs_and_actors_on_daemons(lab: Lab) -> None:
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    with trio.fail_after(60):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            (node,) = await cluster.wait_for_nodes(1)
            assert node.name == "alpha"
            assert node.cpu_milli >= 1000
            assert node.memory_bytes > 1 << 28
            async with cluster.open_scope("run") as scope:
                counter = await scope.create_actor(job_functions.Counter, 1)
                assert await scope.run(job_functions.call_actor, counter, 5, resources=SMALL) == 6
    assert lab.kill("alpha", signal.SIGTERM) == 0
    assert lab.kill("controller", signal.SIGTERM) == 0


@pytest.mark.promise("P9")
async def test_a_wrong_token_is_refused_at_once_and_never_shown(lab: Lab) -> None:
    lab.start_controller()
    await connected(lab)
    with trio.fail_after(5), pytest.raises(fray.Unauthorized) as caught:
        async with fray.open_cluster(lab.spec, token="a-wrong-one", logs=False):
            pass
    assert "a-wrong-one" not in str(caught.value)
    assert TOKEN not in (lab.directory / "controller.log").read_text()


def tree_of(lab: Lab, node: str) -> tuple[int, int, int]:
    """Return the pids of zygote, shim and job of a node with one attempt."""
    (zygote,) = children(lab.running[node].pid)
    (shim,) = children(zygote)
    (job,) = children(shim)
    return zygote, shim, job


@needs_accounts
async def test_the_memory_of_controller_node_and_shim_is_closed_to_other_processes_of_their_account(lab: Lab) -> None:
    lab.wrapper = AS_ACCOUNT
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster, cluster.open_scope("run") as scope:
        with trio.fail_after(60):
            counter = await scope.create_actor(job_functions.Counter, 0)
            assert await counter.add(1) == 1
        zygote, shim, job = tree_of(lab, "alpha")
        pids = {name: process.pid for name, process in lab.running.items()}
        pids |= {"zygote": zygote, "shim": shim, "job": job}
        assert {name for name, pid in pids.items() if can_read(pid, "environ")} == {"zygote", "job"}


@needs_accounts
async def test_a_node_ends_the_shim_of_an_earlier_one_although_it_may_not_inspect_it(lab: Lab) -> None:
    lab.wrapper = AS_ACCOUNT
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster, cluster.open_scope("run") as scope:
        with trio.fail_after(60):
            counter = await scope.create_actor(job_functions.Counter, 0, max_restarts=1)
            assert await counter.add(1) == 1
        zygote, shim, job = tree_of(lab, "alpha")
        try:
            # In this order none of them notices the end of another.
            for pid in (zygote, shim):
                os.kill(pid, signal.SIGSTOP)
            lab.kill("alpha")
            os.kill(zygote, signal.SIGKILL)
            lab.start_node("alpha")
            with trio.fail_after(60):
                for pid in (shim, job):
                    await wait_process_end(pid)
        finally:
            for pid in (zygote, shim):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_the_controller_dies_by_kill_9_and_clients_notice_only_a_pause(lab: Lab) -> None:
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    with trio.fail_after(90):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            async with cluster.open_scope("run") as scope:
                counter = await scope.create_actor(job_functions.Counter, 0)
                assert await counter.add(1) == 1
                request = JobRequest(
                    name="across",
                    entrypoint=Entrypoint.from_callable(job_functions.wait_for, (counter, 3)),
                    resources=SMALL,
                )
                across = await scope.launch(request)
                await across.wait_running()
                assert lab.kill("controller") == -signal.SIGKILL
                assert await counter.add(1) == 2  # calls never passed through it
                lab.start_controller()
                after = await scope.run(job_functions.double, 4, resources=SMALL)
                assert await counter.add(1) == 3
                assert (after, await across.wait()) == (8, 3)
                info = await cluster.poll(across)
                assert len(info.attempts) == 1
            assert [info.state.value for info in await cluster.list_jobs() if info.name == "across"] == ["succeeded"]


async def test_a_node_is_killed_and_its_job_runs_again_on_another(lab: Lab) -> None:
    lab.start_controller()
    for name in ("alpha", "beta"):
        lab.start_node(name)
    await connected(lab)
    with trio.fail_after(90):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            await cluster.wait_for_nodes(2)
            async with fray.ActorServer(cluster) as server:
                home = job_functions.Witness()
                await server.register("home", home)
                async with cluster.open_scope("run") as scope:
                    request = JobRequest(
                        name="again",
                        entrypoint=Entrypoint.from_callable(job_functions.second_time, ("home",)),
                        resources=SMALL,
                    )
                    job = await scope.launch(request)
                    await home.moved.wait()
                    lab.kill((await cluster.poll(job)).attempts[0].node)
                    assert await job.wait() == 2
                    assert [attempt.cause for attempt in job.info.attempts] == ["machine_lost", "succeeded"]


async def test_kill_9_of_a_driver_ends_its_jobs_on_daemons_of_the_same_machine(lab: Lab) -> None:
    lab.start_controller()
    lab.start_node("alpha")
    await connected(lab)
    script = f"""
import fray, trio
from tests.support import job_functions
from tests.support.inspection import AS_ACCOUNT, can_read, needs_accounts
from tests.processes.lab import SMALL, TOKEN, Lab, connected, start_script
from tests.processes.strength_functions import Link
async def main():
    async with fray.open_cluster({lab.spec!r}, namespace="lost") as cluster:
        async with cluster.open_scope("run") as scope:
            entrypoint = fray.Entrypoint.from_callable(job_functions.hang)
            job = await scope.launch(fray.JobRequest(name="hang", entrypoint=entrypoint))
            await job.wait_running()
            print("running", flush=True)
            await trio.sleep_forever()
trio.run(main)
"""
    driver = start_script(script)
    assert driver.stdout is not None
    assert await trio.to_thread.run_sync(driver.stdout.readline) == b"running\n"
    with trio.fail_after(30):
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="watch", logs=False) as cluster:
            (info,) = await cluster.list_jobs("lost")
            driver.kill()
            driver.wait()
            driver.stdout.close()
            ended = await cluster.wait(info.job_id)
            assert (ended.state, ended.cause) == (fray.JobState.STOPPED, fray.EndReason.OWNER_ENDED)


async def test_a_job_that_waits_for_a_machine_in_quarantine_says_so(lab: Lab) -> None:
    """Three actors were killed on one of two machines: a pool that needs both has one worker, and why."""
    lab.start_controller("--quarantine-share", "0.5")
    for name in ("alpha", "beta"):
        lab.start_node(name)
    await connected(lab)
    with trio.fail_after(40):
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            nodes = await cluster.wait_for_nodes(2)
            await cluster.cordon("beta")
            for name in ("encoder", "decoder", "tokenizer"):
                await kill_one(cluster, name)
            await cluster.uncordon("beta")
            most = min(node.cpu_milli for node in nodes) / 1000
            large = fray.ResourceConfig.with_cpu(cpu=0.6 * most, memory="100MB")
            async with fray.WorkerPool(cluster, 2, large) as pool:
                await pool.wait_for_workers(1)
                with pytest.raises(fray.DeadlineExceeded, match="alpha is in quarantine"):
                    await pool.wait_for_workers(2, timeout=0.5)
                await cluster.uncordon("alpha")
                await pool.wait_for_workers(2)


async def kill_one(cluster: fray.Cluster, name: str) -> None:
    """An actor of this name is created and dies."""
    async with cluster.open_scope("run") as scope:
        actor = await scope.create_actor(Link, name=name, on_failure="absorb")
        os.kill(await actor.pid(), signal.SIGKILL)
        assert not (await fray.monitor(actor)).will_restart
