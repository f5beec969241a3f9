"""People with keys of their own on a cluster, and a service that one of them has started: jobs there are theirs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fray import rl, tinker
from fray.tinker.core.keys import tinker_key_of
from fray.tinker.http_client import JsonConnection
from fray.tinker.opentinker.client import TrainingServiceError
from fray.tinker.tinker_client import TinkerClient
from tests.processes.lab import Lab
from tests.processes.test_login_real import run
from tests.tinker.services import MODEL
from tests.tinker.test_opentinker_service import CONFIG, NUMBERS, batch_of, configure

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

POLICY = """
[users."*"]
bands = ["interactive", "batch"]

[users.ada]
quota = { cpu = 1 }
borrow = false

[users.trainer]
launches_for = ["ada", "bob"]
"""


class People:
    """Commands of people with a key of `fray login` each, on one cluster. ``admin`` has its token."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self._directory = directory
        self.environs = {"admin": lab.environ()}
        self._spec = lab.spec

    def log_in(self, name: str) -> None:
        invitation = self.said("admin", "user", "add", name, "--role", "user")
        mine = {key: value for key, value in os.environ.items() if not key.startswith("FRAY_")}
        home = self._directory / name
        self.environs[name] = mine | {"PYTHONPATH": os.getcwd(), "XDG_CONFIG_HOME": str(home), "HOME": str(home)}
        assert self.said(name, "login", self._spec, stdin=invitation).startswith(f"logged in to {self._spec} as {name}")

    def said(self, name: str, *words: str, stdin: str = "") -> str:
        ran = run(self.environs[name], "-m", "fray.cli", *words, stdin=stdin)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def refused(self, name: str, *words: str) -> str:
        ran = run(self.environs[name], "-m", "fray.cli", *words)
        assert ran.returncode != 0, ran.stdout
        return ran.stderr

    def jobs(self, name: str) -> dict[str, Any]:
        """Return the jobs that ``fray jobs`` shows to a person, by name."""
        return {job["name"]: job for job in json.loads(self.said(name, "jobs", "--namespace", "*", "--json"))}


@pytest.fixture
def people(tmp_path: Path) -> Iterator[People]:
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "node.toml").write_text(f"cpu = 3\nparent_pid = {os.getpid()}\n")
    lab = Lab(tmp_path)
    try:
        lab.start_controller("--policy", str(tmp_path / "policy.toml"))
        lab.start_node("warm", "--config", str(tmp_path / "node.toml"), module="tests.support.warm_node")
        lab.wait_serving()
        people = People(lab, tmp_path)
        for name in ("trainer", "ada", "bob"):
            people.log_in(name)
        yield people
    finally:
        lab.close()


@pytest.fixture
def service(people: People, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """``fray tinker serve`` of the person ``trainer``: what it prints."""
    from fray.rl.tensors.language_model import load_model

    load_model(MODEL).save(tmp_path / "tiny")
    words = ["tinker", "serve", "--base-model", str(tmp_path / "tiny"), "--directory", str(tmp_path / "service")]
    serving = subprocess.Popen(
        [sys.executable, "-m", "fray.cli", *words, "--auth", "--json", "--engine-cpu", "1"],
        env=people.environs["trainer"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        lines = itertools.takewhile(lambda line: line not in ("", "}\n"), iter(serving.stdout.readline, None))
        yield json.loads("".join(lines) + "}")
    finally:
        serving.terminate()
        serving.wait(20)


def message_with(scheduler: tinker.SchedulerClient, job_id: str, text: str) -> None:
    """Wait until the message of a job has a text."""
    until, message = time.monotonic() + 60, ""
    while text not in message:
        assert time.monotonic() < until, message
        message = scheduler.job_status(job_id)["message"]


@pytest.mark.within(500)
def test_jobs_of_people_who_have_logged_in_are_theirs(people: People, service: dict[str, Any], tmp_path: Path) -> None:
    url, here = service["url"], ("--directory", service["directory"])

    def key_of(name: str) -> str:
        key: str = json.loads(people.said("trainer", "tinker", "key", "create", name, *here, "--json"))["api_key"]
        return key

    # The grant names ada and bob.
    people.said("admin", "user", "add", "eve", "--role", "user")
    assert "may launch jobs for none of this name" in people.refused("trainer", "tinker", "key", "create", "eve", *here)
    keys = {name: key_of(name) for name in ("ada", "bob")}
    ada, bob = (tinker.InferenceSchedulerClient(url, key, retry_delay_s=0.2) for key in keys.values())

    # The quota is one CPU, as one engine takes.
    first = ada.submit_job(CONFIG)["job_id"]
    client = tinker.HTTPTrainingClient(ada.wait_until_running(first)["server_url"], retry_delay_s=0.2)
    configure(client)
    assert [client.train_step(batch_of(NUMBERS[:8]))["global_steps"] for _ in range(2)] == [1, 2]
    second = ada.submit_job({"fray.priority": "batch"})["job_id"]
    message_with(ada, second, "over the quota of user ada")
    seen = people.jobs("ada")
    ours = [seen[f"tinker-{job_id}"] for job_id in (first, second)]
    assert [(job["user"], job["state"]) for job in ours] == [("ada", "running"), ("ada", "pending")]
    (waiting,) = json.loads(people.said("ada", "queue", "--json"))["entries"]
    assert (waiting["id"], waiting["user"], waiting["band"]) == (ours[1]["job_id"], "ada", "batch")
    assert people.jobs("trainer")["tinker-service"]["user"] == "trainer"
    above = bob.submit_inference_job("tiny", priority="production")["job_id"]
    with pytest.raises(TrainingServiceError, match=r"is FAILED: .*production"):
        bob.wait_until_running(above)
    below = bob.submit_inference_job("tiny", priority="batch")["job_id"]
    bob.wait_until_running(below)

    # Bob neither sees nor stops what is ada's: on the cluster, by the service's commands, and by its routes.
    assert f"tinker-{first}" not in people.jobs("bob")
    assert "no job" in people.refused("bob", "stop", ours[0]["job_id"])
    key_file = tmp_path / "key"
    key_file.write_text(keys["bob"])
    words = ("tinker", "cancel", first, "--url", url, "--key-file", str(key_file))
    assert f"no job '{first}'; fray tinker ls" in people.refused("bob", *words)
    assert [job["job_id"] for job in bob.list_jobs()] == [above, below]
    for call, status in ((bob.job_status, 404), (bob.cancel_job, 403), (bob.complete_job, 403)):
        with pytest.raises(TrainingServiceError) as refused:
            call(first)
        assert refused.value.status == status
    assert client.train_step(batch_of(NUMBERS[:8]))["global_steps"] == 3

    # What its owner stops on the cluster has failed here, with the cause, and the owner's other job has its turn.
    people.said("ada", "stop", ours[0]["job_id"])
    ada.wait_until_running(second)
    stopped = ada.job_status(first)
    assert stopped["status"] == "FAILED"
    assert f"actor tinker-{first} is gone: `fray stop` by " in stopped["error_message"]
    with pytest.raises(TrainingServiceError, match=f"job {first} has ended: FAILED: ") as refused:
        client.train_step(batch_of(NUMBERS[:8]))
    assert refused.value.status == 409

    # Who is removed from the cluster has no key here any more, nor what was given for it.
    session = TinkerClient(url, key=tinker_key_of(keys["ada"]))
    saved = session.create_model("tiny", rl.LoRA(rank=4)).save_state("here")
    session.close()
    route = saved.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    api = JsonConnection(url, headers={"X-API-Key": tinker_key_of(keys["ada"])})
    address = urlsplit(api.request("GET", f"/api/v1/training_runs/{route}/archive").body["url"]).path
    assert api.exchange("GET", address).status == 200
    people.said("admin", "user", "remove", "ada")
    until = time.monotonic() + 60
    while (answer := api.request("GET", "/api/v1/sessions")).status != 401:
        assert time.monotonic() < until, answer
        time.sleep(0.2)
    ended = api.request("GET", address)
    assert (ended.status, ended.body["detail"]) == (404, "this address has ended with the key of its user")
    with pytest.raises(TrainingServiceError, match="401: Invalid API key"):
        ada.list_jobs()
    assert [job["job_id"] for job in bob.list_jobs()] == [above, below]
