"""Contract suite on `RayClient`, and each of its translations, on a real Ray of this machine."""

from __future__ import annotations

import builtins
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from v2_contract import *  # noqa: F403
from v2_contract import (
    LATE_S,
    Broken,
    Capabilities,
    Counter,
    Wrong,
    begin_and_wait,
    do_nothing,
    new,
    program,
    request,
    wait_for_file,
    wait_until,
    write,
)
from v2_ray_bodies import (
    Frail,
    always_fails,
    killed_until,
    leave_things_behind,
    rank_1_fails_once,
    read_workspace,
    through_ray,
    write_assigned,
    write_member,
)

from fray.v2 import (
    ActorConfig,
    Entrypoint,
    JobRequest,
    JobStatus,
    ResourceConfig,
    create_environment,
    current_client,
)
from fray.v2.ray_backend.backend import RayClient
from fray.v2.ray_backend.environments import runtime_env
from fray.v2.ray_backend.handles import RayActorHandle
from fray.v2.ray_backend.uploads import with_uploaded_workspace


@pytest.fixture(scope="module")
def ray_here() -> Iterator[RayClient]:
    """Start a small Ray with pretended TPUs, in a short directory: socket paths have at most 107 characters."""
    directory = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    token = directory / "token"
    token.write_text("0123456789abcdef" * 4)
    before = builtins.print, logging.getLogRecordFactory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)]))
        client = RayClient(
            "local",
            num_cpus=4,
            resources={"TPU": 16, "TPU-v4-16-head": 2, "TPU-v4-8-head": 1, "slice-a": 4},
            labels={"ray.io/tpu-slice-name": "slice-a"},
            object_store_memory=100 * 1024 * 1024,
            logging_level="ERROR",
            _temp_dir=str(directory),
        )
        try:
            yield client
        finally:
            client.shutdown(wait=False)
            shutil.rmtree(directory, ignore_errors=True)
            builtins.print = before[0]  # Ray replaces it and does not restore it
            logging.setLogRecordFactory(before[1])


@pytest.fixture
def client(ray_here: RayClient) -> RayClient:
    return ray_here


@pytest.fixture
def make_client(ray_here: RayClient) -> Callable[[], RayClient]:
    return RayClient


@pytest.fixture
def capabilities() -> Capabilities:
    return Capabilities()


# Translations on a real Ray -----------------------------------------------------------------------------------------


def test_jobs_and_actors_with_preemptible_false_reserve_the_head_node(client: RayClient, tmp_path: Path) -> None:
    steady = ResourceConfig(cpu=0.1, preemptible=False)
    entrypoint = Entrypoint.from_callable(write_assigned, [tmp_path / "job"])
    client.submit(JobRequest(name=new("steady"), entrypoint=entrypoint, resources=steady)).wait(timeout=LATE_S)
    assert "'head_node': 0.0001" in (tmp_path / "job").read_text()


def test_actors_reserve_no_cpu_and_have_the_name_of_their_ray_actor(client: RayClient) -> None:
    name = new("frail")
    frail = client.create_actor(Frail, name=name, resources=ResourceConfig(preemptible=False))
    held = frail.assigned()
    assert "CPU" not in held
    assert held["head_node"] == 0.0001
    assert ray.get(ray.get_actor(name).call.remote("add")) == 1, "plain Ray reaches it too"
    assert frail.name_in_a_thread() == name, "it is the current actor in its own threads"
    with pytest.raises(SystemExit):
        frail.quit()
    assert frail.add() == 2


def test_losses_and_failures_are_retried_within_their_budgets(client: RayClient, tmp_path: Path) -> None:
    lost = request(killed_until, tmp_path / "lost", 3, max_retries_failure=1, max_retries_preemption=1)
    fails = request(always_fails, tmp_path / "fails", max_retries_failure=1, max_retries_preemption=5)
    jobs = [client.submit(lost), client.submit(fails)]
    with pytest.raises(ValueError, match="attempt 2"):
        jobs[1].wait(timeout=LATE_S)
    assert jobs[0].wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    assert ((tmp_path / "lost").read_text(), (tmp_path / "fails").read_text()) == ("xxx", "xx")


def test_a_job_lost_too_often_has_failed(client: RayClient, tmp_path: Path) -> None:
    job = client.submit(request(killed_until, tmp_path / "lost", 9, max_retries_preemption=0))
    with pytest.raises(RuntimeError, match=r"died|crash"):
        job.wait(timeout=LATE_S)
    assert job.status() == JobStatus.FAILED


def test_handles_pickle_to_names_only(client: RayClient) -> None:
    handle = RayActorHandle("counter")
    assert handle.__reduce__() == (RayActorHandle, ("counter",))
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert len(pickle.dumps(handle)) < 100


def test_a_handle_waits_for_its_actor(client: RayClient) -> None:
    name = new("later")
    heard: list[Any] = []
    early = threading.Thread(target=lambda: heard.append(RayActorHandle(name).add(3)))
    early.start()
    client.create_actor(Counter, name=name)
    early.join(LATE_S)
    assert heard == [3]


def test_a_tpu_job_has_one_member_per_vm_of_its_slices(client: RayClient, tmp_path: Path) -> None:
    resources = ResourceConfig.with_tpu("v4-16", slice_count=2, cpu=0.1, ram="1m")
    entrypoint = Entrypoint.from_callable(write_member, [tmp_path])
    job = client.submit(JobRequest(name=new("slices"), entrypoint=entrypoint, resources=resources))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED
    members = [(tmp_path / f"member-{rank}").read_text().split() for rank in range(4)]
    port = members[0][4]
    assert members == [[str(rank), "4", "2", str(rank // 2), port, "TPU:4", "slice-a:1"] for rank in range(4)]
    assert sorted(job.logs().splitlines()) == [f"[{rank}] here" for rank in range(4)]
    wait_until(lambda: ray.available_resources().get("TPU-v4-16-head") == 2, "the release of the slices")


def test_a_failure_in_a_gang_ends_the_others_and_restarts_all(client: RayClient, tmp_path: Path) -> None:
    job = client.submit(request(rank_1_fails_once, tmp_path, replicas=2, max_retries_failure=1))
    assert job.wait(timeout=LATE_S) == JobStatus.SUCCEEDED


def test_a_stopped_gang_releases_its_machines(client: RayClient, tmp_path: Path) -> None:
    resources = ResourceConfig.with_tpu("v4-8", cpu=0.1, ram="1m")
    entrypoint = Entrypoint.from_callable(begin_and_wait, [tmp_path / "began", tmp_path / "never"])
    job = client.submit(JobRequest(name=new("stopped"), entrypoint=entrypoint, resources=resources))
    wait_for_file(tmp_path / "began")
    job.terminate()
    assert job.status() == JobStatus.STOPPED
    entrypoint = Entrypoint.from_callable(do_nothing)
    following = client.submit(JobRequest(name=new("following"), entrypoint=entrypoint, resources=resources))
    assert following.wait(timeout=LATE_S) == JobStatus.SUCCEEDED, "there is one such slice"


def test_terminate_ends_the_process_of_a_program(client: RayClient, tmp_path: Path) -> None:
    part = tmp_path / "part"
    job = client.submit(program("sh", "-c", f"echo $$ > {part}; mv {part} {tmp_path}/pid; exec sleep 99"))
    wait_for_file(tmp_path / "pid")
    job.terminate()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the program")


def test_jobs_and_actors_made_by_a_job_end_with_it(client: RayClient, tmp_path: Path) -> None:
    client.submit(request(leave_things_behind, tmp_path)).wait(timeout=LATE_S)
    with pytest.raises(RuntimeError, match="dead"):
        _ = RayActorHandle(f"left-{tmp_path.name}").add
    again = client.submit(request(write, tmp_path / "again", name=f"child-{tmp_path.name}"))
    assert again.wait(timeout=LATE_S) == JobStatus.SUCCEEDED, "its child is stopped, and the name is free"
    assert (tmp_path / "again").exists()


def test_fray_client_spec_ray_is_the_rayclient_of_this_process(
    client: RayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAY_CLIENT_SPEC", "ray")
    found = current_client()
    assert type(found) is RayClient
    assert found is current_client() is pickle.loads(pickle.dumps(client)), "one per process, also after unpickling"


def test_a_task_of_plain_ray_has_a_rayclient(client: RayClient, tmp_path: Path) -> None:
    assert type(current_client()) is RayClient, "the same in this process, as Ray is initialized"
    task = ray.remote(num_cpus=0.1)(through_ray)
    assert ray.get(task.remote(tmp_path), timeout=LATE_S) == "RayClient"
    assert (tmp_path / "file").exists()


def test_an_actor_that_dies_is_a_runtimeerror_and_its_job_has_failed(client: RayClient) -> None:
    name = new("frail")
    group = client.create_actor_group(Frail, name=name, count=1)
    [frail] = group.wait_ready(timeout=LATE_S)
    crash = frail.crash.remote()
    with pytest.raises(RuntimeError, match="dead"):
        crash.result(timeout=LATE_S)
    wait_until(group.is_done, "the end of the group")
    assert group.statuses() == [JobStatus.FAILED]
    with pytest.raises(RuntimeError):
        group.wait_ready(timeout=LATE_S)
    assert client.create_actor_group(Frail, name=name, count=1).wait_ready(timeout=LATE_S)[0].add() == 1


def test_an_actor_restarts_and_its_calls_are_repeated_within_the_budgets(client: RayClient, tmp_path: Path) -> None:
    config = ActorConfig(max_restarts=1, max_task_retries=1)
    frail = client.create_actor(Frail, name=new("frail"), actor_config=config)
    assert frail.crash_once.remote(tmp_path / "mark").result(timeout=LATE_S) == "second time"
    assert frail.add() == 1


def test_an_actor_ends_itself_in_order_or_as_failed(client: RayClient) -> None:
    group = client.create_actor_group(Frail, name=new("frail"), count=2)
    one, other = group.wait_ready(timeout=LATE_S)
    assert one.leave() == "bye"
    other.give_up()
    wait_until(group.is_done, "the end of the group")
    assert group.statuses() == [JobStatus.SUCCEEDED, JobStatus.FAILED]
    with pytest.raises(RuntimeError, match="no use"):
        group.jobs[1].wait(timeout=LATE_S)


def test_the_error_of_a_constructor_is_the_error_of_the_members_job(client: RayClient) -> None:
    group = client.create_actor_group(Broken, name=new("broken"), count=1)
    with pytest.raises(RuntimeError, match="not to be made"):
        group.wait_ready(timeout=LATE_S)
    with pytest.raises(Wrong, match="not to be made"):
        group.jobs[0].wait(timeout=LATE_S)


def test_a_running_call_sees_the_shutdown_event_of_its_actor(client: RayClient, tmp_path: Path) -> None:
    group = client.create_actor_group(Frail, name=new("frail"), count=1)
    future = group.wait_ready(timeout=LATE_S)[0].stopped_softly.remote(tmp_path / "began", tmp_path / "stopping")
    wait_for_file(tmp_path / "began")
    group.shutdown()
    future.result(timeout=LATE_S)
    assert (tmp_path / "stopping").exists()


def test_a_name_in_use_and_unpicklable_arguments_are_valueerrors(client: RayClient) -> None:
    name = new("counter")
    client.create_actor(Counter, name=name)
    with pytest.raises(ValueError, match="living actor has the name"):
        client.create_actor(Counter, name=name)
    with pytest.raises(ValueError, match="cannot be pickled"):
        client.submit(request(print, threading.Lock()))


def test_a_workspace_is_uploaded_by_content(client: RayClient, tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("WORD = 'from the workspace'")
    wanted, _ = runtime_env(create_environment(workspace=str(tmp_path)), None, one_machine=False)
    made = with_uploaded_workspace(wanted)
    assert made["working_dir"].startswith("gcs://")
    word, directory = ray.get(ray.remote(read_workspace).options(runtime_env=made, num_cpus=0.1).remote())
    assert word == "from the workspace"
    assert directory != str(tmp_path)
    with pytest.raises(ValueError, match="cannot be sent to Ray"):
        with_uploaded_workspace({"working_dir": str(tmp_path / "none")})


OTHER_TOKEN = """
import sys
from fray.v2.ray_backend.backend import RayClient
try:
    RayClient(sys.argv[1])
except RuntimeError as error:
    print(error)
"""


def test_a_wrong_token_is_refused_and_no_token_is_printed(client: RayClient, tmp_path: Path) -> None:
    wrong = "f" * 64
    (tmp_path / "token").write_text(wrong)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_TOKEN, ray.get_runtime_context().gcs_address],
        env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_NUM_REDIS_GET_RETRIES": "1"},
        capture_output=True,
        text=True,
        timeout=LATE_S,
        check=False,
    )
    assert "RAY_AUTH_TOKEN_PATH" in done.stdout, done.stderr
    for token in (wrong, Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()):
        assert token not in done.stdout + done.stderr + repr(client)
