"""Output of jobs, and their environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trio

import fray
from fray import Entrypoint, EnvironmentConfig, JobRequest
from tests.support import job_functions

SCRIPT = """
import sys, fray, trio
from tests.support import job_functions
async def main():
    async with fray.open_cluster("machine?nodes=1", logs={logs}) as cluster:
        async with cluster.open_scope("run") as scope:
            await scope.run(job_functions.shout, "hello there", name="shouter")
trio.run(main)
"""


@pytest.mark.parametrize("logs", [True, False])
def test_what_a_job_prints_appears_under_its_name_its_last_line_included(logs: bool) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(logs=logs)], capture_output=True, text=True, env=environ, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    wanted = ["(shouter) hello there", "(shouter) no newline at the end"] if logs else []
    assert ran.stdout.splitlines() == wanted
    assert ran.stderr.splitlines() == (["(shouter) HELLO THERE"] if logs else [])


async def test_a_job_finds_who_it_is_in_its_environment_and_its_own_variables() -> None:
    with trio.fail_after(30):
        async with fray.open_cluster("machine?nodes=1", namespace="lab", logs=False) as cluster:
            request = JobRequest(
                name="who",
                entrypoint=Entrypoint.from_callable(
                    job_functions.environment,
                    ("FRAY_JOB_ID", "FRAY_JOB_NAME", "FRAY_NAMESPACE", "FRAY_CLUSTER_ADDRESS", "MINE", "FRAY_TOKEN"),
                ),
                environment=EnvironmentConfig.create(env_vars={"MINE": "7"}),
            )
            job = await cluster.launch(request)
            found = await job.wait()
            assert found.pop("FRAY_CLUSTER_ADDRESS").startswith("unix:")
            assert found == {
                "FRAY_JOB_ID": job.id,
                "FRAY_JOB_NAME": "who",
                "FRAY_NAMESPACE": "lab",
                "MINE": "7",
                "FRAY_TOKEN": None,
            }


async def test_a_child_job_inherits_the_namespace_and_ends_with_its_parent() -> None:
    with trio.fail_after(30):
        async with (
            fray.open_cluster("machine?nodes=1&cpu=4", logs=False) as cluster,
            cluster.open_scope("run") as scope,
        ):
            counter = await scope.create_actor(job_functions.Counter, 0)
            entrypoint = Entrypoint.from_callable(job_functions.launch_hanging_child, (counter,))
            parent = await scope.launch(JobRequest(name="parent", entrypoint=entrypoint))
            while await counter.add(0) == 0:  # noqa: ASYNC110 - the actor has no event for us
                await trio.sleep(0.02)
            (child,) = [info for info in await cluster.list_jobs() if info.name == "child"]
            assert (child.state, child.namespace) == (fray.JobState.RUNNING, cluster.namespace)
            await parent.terminate()
            ended = await cluster.wait(child.job_id)
            assert ended.state is fray.JobState.STOPPED
