"""A service on a machine with accounts for jobs: engines of users run under their accounts, and reach theirs alone."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import ResourceConfig, tinker
from fray.node.accounts.leftovers import uid_of
from fray.tinker.opentinker.client import TrainingServiceError
from tests.processes.account_lab import needs_accounts, open_account_lab
from tests.processes.lab import TOKEN
from tests.tinker.services import MODEL, REWARD
from tests.tinker.test_opentinker_service import CONFIG, NUMBERS, batch_of
from tests.tinker.test_users_of_cluster import engine_of

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, needs_accounts]

POLICY = """
[users.service]
launches_for = ["*"]
"""
ENGINE = ResourceConfig.with_cpu(cpu=0.2, memory="1GB")
SPY = """
import json, os

def spy(data_source, solution_str, ground_truth, extra_info, **kw):
    found = {}
    for path in json.loads(ground_truth):
        try:
            found[path] = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(4).hex()
        except OSError as error:
            found[path] = error.strerror
    raise ValueError(json.dumps({"uid": os.getuid(), "found": found}))
"""
"""Uploaded code that reports what it can read."""


def begun(url: str, key: str, reward: tuple[str, str]) -> tuple[str, tinker.HTTPTrainingClient]:
    """A job that is ready to train."""
    scheduler = tinker.SchedulerClient(url, key, retry_delay_s=0.2)
    job_id = scheduler.submit_job({})["job_id"]
    client = tinker.HTTPTrainingClient(scheduler.wait_until_running(job_id)["server_url"], retry_delay_s=0.2)
    client.upload_reward_function(*reward)
    client.set_config(CONFIG)
    client.init_workers()
    return job_id, client


def seen_by(client: tinker.HTTPTrainingClient, paths: list[Path]) -> dict[str, Any]:
    """Return what the uploaded code of a job can read of some paths, and its uid."""
    truth = json.dumps([str(path) for path in paths])
    with pytest.raises(TrainingServiceError) as failed:
        client.validate({"non_tensor_batch": {"raw_prompt": ["407>"], "ground_truth": [truth]}})
    found: dict[str, Any] = json.loads(str(failed.value).partition("ValueError: ")[2])
    return found


@pytest.mark.within(400)
async def test_engines_of_users_reach_their_own_jobs_and_nothing_else_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FRAY_USER", "service")
    with open_account_lab(policy=POLICY, module="tests.support.warm_node") as lab, trio.fail_after(380):
        # As an operator makes it: the account of the service may make a directory there.
        above = lab.directory / "services"
        above.mkdir()
        above.chmod(0o1777)
        directory = above / "training"
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            for person in ("ada", "bob"):
                await cluster.add_user(person, "user")
            async with tinker.serve(
                models=[MODEL], directory=directory, threads=1, resources=ENGINE, auth=True, cluster=cluster
            ) as service:
                keys = {name: await service.create_key(name) for name in ("ada", "bob")}
                await trio.to_thread.run_sync(train_and_spy, service.url, keys, directory)
                await engines_of_ada(cluster, service.url, keys["ada"])


def train_and_spy(url: str, keys: dict[str, str], directory: Path) -> None:
    first, ada = begun(url, keys["ada"], ("share", REWARD))
    steps = [ada.train_step(batch_of(NUMBERS[:8]))["global_steps"] for _ in range(2)]
    assert steps == [1, 2]
    saved = ada.save_checkpoint()
    place = Path(saved["checkpoint_dir"]).parents[1]
    assert (place.name, place.parent.parent) == (first, directory / "jobs")
    weights = Path(saved["actor_path"], "model.safetensors")
    # The service itself reads what ada's engine wrote, and so does another job of ada; here is who owns it.
    account, own = weights.stat().st_uid, directory.stat().st_uid
    assert len({account, own, os.geteuid()}) == 3
    scheduler = tinker.InferenceSchedulerClient(url, keys["ada"])
    served = scheduler.submit_inference_job(saved["actor_path"])["job_id"]
    scheduler.wait_until_running(served)
    scheduler.complete_job(served)
    again, other = begun(url, keys["ada"], ("spy", SPY))
    assert other.resume(saved["checkpoint_dir"])["global_steps"] == 2

    stores = [directory / name for name in ("service.sqlite", "service.sqlite-wal", "tinker.sqlite", "operator.json")]
    private = [directory, directory / "jobs", directory / "models", *stores]
    assert all(path.exists() for path in private)
    ada_sees = seen_by(other, [*private, weights])
    assert ada_sees["uid"] == account
    assert ada_sees["found"].pop(str(weights)) == weights.read_bytes()[:4].hex()
    _, bob = begun(url, keys["bob"], ("spy", SPY))
    without_name = directory / "jobs" / first
    bob_sees = seen_by(bob, [*private, without_name])
    assert bob_sees["uid"] not in (account, own, 0)
    assert bob_sees["found"].pop(str(without_name)) == "No such file or directory"
    for found in (ada_sees["found"], bob_sees["found"]):
        assert set(found.values()) == {"Permission denied"}, found
    with pytest.raises(TrainingServiceError, match="not the checkpoint_dir of a checkpoint that a job of yours"):
        bob.resume(saved["checkpoint_dir"])
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in stores)
    scheduler.complete_job(again)


async def engines_of_ada(cluster: fray.Cluster, url: str, key: str) -> None:
    """Kill the engine: the next one continues from what the first one wrote."""
    scheduler = tinker.SchedulerClient(url, key, retry_delay_s=0.2)
    (job,) = [each for each in await trio.to_thread.run_sync(scheduler.list_jobs) if each["status"] == "RUNNING"]
    engine = await engine_of(cluster, job["job_id"])
    assert engine.user == "ada"
    pid = engine.attempts[-1].pid
    assert pid is not None
    assert uid_of(pid) not in (0, -1)
    client = tinker.HTTPTrainingClient(job["server_url"], retry_delay_s=0.2)
    # A step takes a snapshot of those before it.
    await trio.to_thread.run_sync(client.train_step, batch_of(NUMBERS[:8]))
    os.kill(pid, signal.SIGKILL)
    answer = await trio.to_thread.run_sync(client.train_step, batch_of(NUMBERS[:8]))
    assert answer["global_steps"] == 4
