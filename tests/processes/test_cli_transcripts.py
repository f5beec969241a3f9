"""Commands against a running cluster, on terminals of 60, 80 and 120 columns, as in ``tests/transcripts/cli``.

What differs from run to run (times, process ids, measurements) is replaced in the answers of the cluster before they
are shown, so that a table has the same columns in every run. With ``FRAY_WRITE_TRANSCRIPTS=1`` the transcripts are
written.
"""

from __future__ import annotations

import os
import pkgutil
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio

import fray
import fray.cli
from fray import Entrypoint, JobRequest, ReservationConfig, ResourceConfig
from fray.cli import target
from fray.cli.formatting import CUT
from fray.cli.jobs import namespace_text
from fray.cli.main import main
from fray.model.actors import ActorInfo
from fray.model.ids import ANONYMOUS_PREFIX
from fray.model.messages.client import Event, NodeInfo
from fray.model.messages.usage import LoopDelay, QueueEntry, UsageInfo
from fray.model.monitoring.accounting import Cost, Hours, UsageSum
from fray.model.monitoring.served_calls import ActorMetrics
from fray.model.reservations import ReservationEvent, ReservationInfo
from fray.model.specs import AttemptInfo, JobInfo
from tests.processes.lab import TOKEN, Lab
from tests.processes.transcript_functions import evaluate, train
from tests.support import job_functions

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts" / "cli"
WIDTHS = (60, 80, 120)
SMALL = ResourceConfig.with_cpu(cpu=0.5, memory="100MB")
COMMANDS = (
    "status",
    "top --sort id",
    "jobs",
    "jobs --namespace prod --tree",
    "jobs --failed",
    "show prod/trainer",
    "show evaluate",
    "explain sweep",
    "explain evaluate",
    "events evaluate",
    "events --reservation nightly",
    "queue",
    "nodes",
    "actor ls",
    "reservation ls",
    "reservation show nightly",
    "history",
    "history --by job",
    "cost --by job",
)
NOW = 1_767_366_245.0
"""Time at which all commands run: Friday, 15:04:05 UTC."""


# What differs from run to run ----------------------------------------------------------------------------------------

Fields = Callable[[Any], dict[str, Any]]
STEADY: dict[type, Fields] = {
    JobInfo: lambda job: {
        "launch_time": NOW - 4000,
        "start_time": job.start_time and NOW - 3900,
        "end_time": job.end_time and NOW - 300,
    },
    AttemptInfo: lambda attempt: {
        "pid": 4711,
        "start_time": attempt.start_time and NOW - 3900,
        "end_time": attempt.end_time and NOW - 300,
        "place_time": NOW - 3950,
        "memory_bytes": 0 if attempt.cause else 640 * 1024**2,
        "peak_memory_bytes": 1200 * 1024**2,
        "cpu_s": 3650.0,
    },
    ActorInfo: lambda actor: {
        "pid": 4711,
        "started": NOW - 3890,
        "calls": ActorMetrics(calls=1200, errors=1, cancelled=0, running=2, queued=14),
    },
    Event: lambda event: {"time": NOW - 3900, "text": re.sub(r"\[.*, peak .*\]", "[exit code 1, 3600 s]", event.text)},
    NodeInfo: lambda node: {"attributes": {"zone": "europe-west4-a", "isolation": "pid_namespace"}},
    UsageInfo: lambda usage: {"loop_delay": LoopDelay()},
    QueueEntry: lambda entry: {"waiting_s": 125.0},
    ReservationInfo: lambda info: {"expires_at": NOW + 3000},
    ReservationEvent: lambda event: {"time": NOW - 600},
    UsageSum: lambda one: {"cpu_idle": 1.0, "cpu_known": 4.0, "wait_h": 0.25},
    Hours: lambda hours: {"cpu": hours.cpu and 1234.5, "memory_gib": hours.memory_gib and 4938.0},
    Cost: lambda cost: {"cpu": 37.04, "memory": 19.75, "total": 56.79},
}


def steady(value: Any) -> Any:
    """Return an answer of the cluster without what differs from run to run."""
    if isinstance(value, tuple | list):
        return type(value)(map(steady, value))
    if isinstance(value, dict):
        return {key: steady(each) for key, each in value.items()}
    if not attrs.has(type(value)):
        return value
    names = [field.name for field in attrs.fields(type(value)) if field.init and not field.name.startswith("_")]
    inner = {name: steady(getattr(value, name)) for name in names}
    own = STEADY[type(value)](value) if type(value) in STEADY else {}
    return attrs.evolve(value, **inner | own)


class SteadyCluster:
    """A cluster whose answers are the same in each run."""

    def __init__(self, cluster: fray.Cluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any, **options: Any) -> Any:
            found = steady(await getattr(self._cluster, name)(*arguments, **options))
            # Sums come in the order of amounts.
            is_sums = isinstance(found, list) and found and isinstance(found[0], UsageSum | Cost)
            return sorted(found, key=lambda one: one.key) if is_sums else found

        return ask


def without_ids(text: str, ids: dict[str, str], port: int) -> str:
    """Return what was printed with ids that are the same in each run and as long, and without durations."""
    for found, shown in ids.items():
        text = text.replace(found, shown)
    text = re.sub(r"\bsession-[a-z0-9]{12}\b", "session-k3x9m2p4q5r6", text)
    text = re.sub(r"waiting for \d+ s", "waiting for 12 s", text)
    text = re.sub(r"\b\d+ ports", "512 ports", text)  # as the machine has them
    return text.replace(f":{port}", ":7421")


# The cluster ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    policy = lab.directory / "policy.toml"
    policy.write_text("[prices]\ncpu = 0.03\nmemory = 0.004\n")
    try:
        lab.start_controller("--policy", str(policy))
        lab.start_node("gpu-7.lab.example", "--cpu", "4", "--memory", "8GB")
        lab.wait_serving()
        yield lab
    finally:
        lab.close()


@pytest.fixture
def terminal(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find the cluster, print no colors, and know but one time."""
    for name, value in {
        "FRAY_CLUSTER_SPEC": lab.spec,
        "FRAY_TOKEN": TOKEN,
        "FRAY_USER": "ada",
        "NO_COLOR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FRAY_NAMESPACE", raising=False)
    opened = target.open_target

    @asynccontextmanager
    async def open_steady(options: Any, **more: Any) -> AsyncIterator[Any]:
        async with opened(options, **more) as cluster:
            yield SteadyCluster(cluster)

    clock = SimpleNamespace(
        time=lambda: NOW, localtime=lambda seconds=NOW: time.gmtime(seconds), strftime=time.strftime
    )
    for found in pkgutil.walk_packages(fray.cli.__path__, "fray.cli."):
        if found.name.startswith(("fray.cli.rl", "fray.cli.tinker", "fray.cli.__main__")):
            continue
        module = import_module(found.name)
        if getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", clock)
        if getattr(module, "open_target", None) is opened:
            monkeypatch.setattr(module, "open_target", open_steady)


@asynccontextmanager
async def seeded(lab: Lab) -> AsyncIterator[dict[str, str]]:
    """Jobs, actors and a reservation in several states; yields what to show in place of their ids and namespaces."""
    async with fray.open_cluster(lab.spec, token=TOKEN, namespace="prod", logs=False) as cluster:
        await cluster.wait_for_nodes(1)
        trainer = await cluster.launch(request("prod/trainer", train, detached=True))
        await trainer.wait_running()
        while (await cluster.poll(trainer.id)).progress is None:  # noqa: ASYNC110
            await trio.sleep(0.05)
        rollouts = await cluster.launch(request("prod/trainer/rollouts", job_functions.hang, detached=True))
        await rollouts.wait_running()
        reserved = await cluster.create_reservation(ReservationConfig(SMALL, name="nightly", detached=True))
        await (await cluster.follow_reservation(reserved)).wait_held(60)
        await cluster.launch(request("sweep", job_functions.hang, ResourceConfig.with_cpu(cpu=64), detached=True))
    async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
        failed = await cluster.launch(request("evaluate", evaluate))
        await failed.wait_ended()
        scratch = await cluster.create_actor(job_functions.Counter, 1, name="scratch", resources=SMALL)
        assert await scratch.add(1) == 2
        jobs = await cluster.list_jobs("*")
        tokens = {one.rpartition("-")[2] for one in (reserved, *(info.job_id for info in jobs))}
        (namespace,) = {info.namespace for info in jobs if info.namespace.startswith(ANONYMOUS_PREFIX)}
        short = namespace_text(namespace, 80)
        yield {
            **dict.fromkeys(tokens, "k3x9m2p4q5r6"),
            namespace: f"{ANONYMOUS_PREFIX}dc5f98679bf8",
            short: f"{ANONYMOUS_PREFIX}dc5f{CUT}",
        }


def request(name: str, fn: Any, resources: ResourceConfig = SMALL, *, detached: bool = False) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint.from_callable(fn), resources=resources, detached=detached)


def test_commands_are_as_in_the_transcripts(
    lab: Lab, terminal: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def shown(width: int, ids: dict[str, str]) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        text = ""
        for command in COMMANDS:
            capfd.readouterr()
            code = main(command.split())
            captured = capfd.readouterr()
            text += f"$ fray {command}\n{captured.out}{captured.err}" + (f"exit code {code}\n" if code else "") + "\n"
        return without_ids(text, ids, lab.port)

    async def converse() -> dict[int, str]:
        async with seeded(lab) as ids:
            return {width: await trio.to_thread.run_sync(shown, width, ids) for width in WIDTHS}

    found = trio.run(converse)
    for width, text in found.items():
        file = TRANSCRIPTS / f"{width}.txt"
        if os.environ.get("FRAY_WRITE_TRANSCRIPTS"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert text == file.read_text(), f"{width} columns"
