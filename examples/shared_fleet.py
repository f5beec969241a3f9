"""Two users share an autoscaled fleet, and a production gang arrives.

    python examples/shared_fleet.py [--tasks N] [--task-s S] [--machines N] [--keep DIR]

Everything runs on this machine: a `fray-controller` with a policy, whose group of provider ``process`` starts
`fray-node` processes when jobs wait. Alice and Bob are separate drivers, with many small batch tasks each. When the
fleet is full, Carol's production gang takes all of it: batch tasks are preempted and restart afterwards, and all of
them end. Then the machines idle and are removed. The example prints these events, and at the end the share of each
user.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import define, field

import fray
from fray import Entrypoint, JobRequest, JobState, ResourceConfig

CPUS = 2
"""CPUs of each machine."""
POLICY = """
[preemption]
shield_s = 0                          # tasks are short here, so they may be preempted at once
patience_s = 0
limit = 3

[users.carol]
bands = ["production", "interactive", "batch"]

[users."*"]
bands = ["interactive", "batch"]

[[group]]
name = "workers"
provider = "process"
cpu = {cpus}
memory = "400MB"
max = {machines}
idle_s = 1
price_per_hour = 1.0
"""
TOKEN = "only-for-this-example"
ONE_CPU = ResourceConfig.with_cpu(cpu=1, memory="100MB")


# In the jobs ----------------------------------------------------------------------------------------------------------


def compute(task_s: float) -> str:
    """Run for a while."""
    time.sleep(task_s)
    return os.environ["FRAY_JOB_ID"]


# The drivers, each a process ------------------------------------------------------------------------------------------


async def submit_tasks(tasks: int, task_s: float) -> None:
    """Submit the tasks of Alice or Bob."""
    async with fray.open_cluster(logs=False) as cluster, cluster.open_scope("sweep") as scope:
        entry = Entrypoint.from_callable(compute, args=(task_s,))
        jobs = [
            await scope.launch(JobRequest(name=f"task-{n}", entrypoint=entry, resources=ONE_CPU, priority="batch"))
            for n in range(tasks)
        ]
        done = [await job.wait() for job in jobs]
        assert done == [job.id for job in jobs]


async def submit_gang(members: int, task_s: float) -> None:
    """Submit Carol's gang, which needs every machine at the same time; start at the signal of `signal_start`."""
    async with fray.open_cluster(logs=False) as cluster, cluster.open_scope("release") as scope:
        await trio.to_thread.run_sync(sys.stdin.readline)
        whole = ResourceConfig.with_cpu(cpu=CPUS, memory="200MB", replicas=members)
        entry = Entrypoint.from_callable(compute, args=(task_s,))
        await (
            await scope.launch(JobRequest(name="gang", entrypoint=entry, resources=whole, priority="production"))
        ).wait()


def signal_start(user: subprocess.Popen[bytes]) -> None:
    """Let a driver continue."""
    assert user.stdin is not None
    user.stdin.write(b"now\n")
    user.stdin.close()


def start_user(spec: str, user: str, *arguments: object) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "FRAY_USER": user, "FRAY_CLUSTER_SPEC": spec, "FRAY_TOKEN": TOKEN}
    words = [sys.executable, __file__, "--as-user", *map(str, arguments)]
    return subprocess.Popen(words, env=environ, stdin=subprocess.PIPE)


# The cluster ----------------------------------------------------------------------------------------------------------


def start_controller(directory: Path, port: int, machines: int) -> subprocess.Popen[bytes]:
    """Start the controller with the policy."""
    policy = directory / "policy.toml"
    policy.write_text(POLICY.format(cpus=CPUS, machines=machines))
    words = ["--listen", f"127.0.0.1:{port}", "--store", str(directory / "store"), "--policy", str(policy)]
    with open(directory / "controller.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fray.controller.main", *words],
            env={**os.environ, "FRAY_TOKEN": TOKEN},
            stdout=log,
            stderr=log,
        )


@asynccontextmanager
async def open_fleet(directory: Path, machines: int) -> AsyncIterator[tuple[str, fray.Cluster]]:
    """Start a cluster; yield its spec, and an operator's connection to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start_controller(directory, port, machines)
    try:
        with trio.fail_after(30):
            while not await serves(port):  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)
        spec = f"fray://127.0.0.1:{port}"
        async with fray.open_cluster(spec, token=TOKEN, logs=False) as cluster:
            yield spec, cluster
    finally:
        process.terminate()
        process.wait()


async def serves(port: int) -> bool:
    try:
        await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
    except OSError:
        return False
    return True


# Sequence -------------------------------------------------------------------------------------------------------------


@define
class Watch:
    """Polls the cluster, prints changes, and adds up the usage."""

    cluster: fray.Cluster
    began: float = field(factory=time.monotonic)
    looked: float = field(factory=time.monotonic)
    had_s: defaultdict[str, float] = field(factory=lambda: defaultdict(float))
    """CPU seconds by user."""
    there_s: float = 0.0
    """CPU seconds of machines that were alive."""
    preempted: Counter[str] = field(factory=Counter)
    """Number of preemptions of each job."""
    machines: tuple[int, int] = (0, 0)
    """Requested and live machines."""
    using: Counter[str] = field(factory=Counter)
    """CPUs by user."""

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    async def look(self) -> None:
        groups = (await self.cluster.list_machines()).groups
        jobs = await self.cluster.list_jobs("*")
        machines = sum(group.wanted for group in groups), sum(group.joined for group in groups)
        using: Counter[str] = Counter()
        for info in jobs:
            if info.state is JobState.RUNNING:
                using[info.user] += len(info.members) * CPUS if info.name == "gang" else 1
            while self.preempted[info.job_id] < info.retries.get("preempted", 0):
                self.preempted[info.job_id] += 1
                self.say(f"{info.user}'s {info.name} is preempted by carol's gang, and waits again")
        if machines != self.machines:
            self.say(f"machines: {machines[0]} requested, {machines[1]} alive")
        if using != self.using:
            self.say(
                "CPUs in use: " + (", ".join(f"{user} {count}" for user, count in sorted(using.items())) or "none")
            )
        self._book(machines, using)

    def _book(self, machines: tuple[int, int], using: Counter[str]) -> None:
        past_s, self.looked = time.monotonic() - self.looked, time.monotonic()
        self.there_s += self.machines[1] * CPUS * past_s
        for user, count in self.using.items():
            self.had_s[user] += count * past_s
        self.machines, self.using = machines, using

    async def until(self, what: Callable[[], bool], within_s: float = 120.0) -> None:
        """Poll until a condition holds."""
        with trio.fail_after(within_s):
            while not what():
                await trio.sleep(0.1)
                await self.look()

    def summary(self) -> None:
        whole = sum(self.had_s.values())
        print(f"\nmachines were alive for {self.there_s:.0f} CPU seconds, {whole / self.there_s:.0%} of them in use:")
        for user, had_s in sorted(self.had_s.items()):
            print(f"  {user:<6} {had_s:6.1f} CPU s  {'#' * round(40 * had_s / whole)}")
        print(f"{sum(self.preempted.values())} preemptions of tasks; every task has succeeded")


async def play(tasks: int, task_s: float, machines: int, directory: Path) -> Counter[str]:
    """Run the example; return the number of preemptions of each job."""
    async with open_fleet(directory, machines) as (spec, cluster):
        watch = Watch(cluster)
        users = [start_user(spec, user, "tasks", tasks, task_s) for user in ("alice", "bob")]
        carol = start_user(spec, "carol", "gang", machines, task_s)
        watch.say(f"alice and bob submit {tasks} tasks of {task_s:g} s each; there is no machine yet")
        await watch.until(lambda: sum(watch.using.values()) >= machines * CPUS)
        watch.say(f"the fleet is full; carol submits a gang of {machines}, a whole machine each")
        signal_start(carol)
        await watch.until(lambda: all(user.poll() is not None for user in (*users, carol)))
        watch.say("everything has ended")
        await watch.until(lambda: watch.machines == (0, 0))
        watch.say("no machine is left")
        watch.summary()
        if any(user.returncode for user in (*users, carol)):
            raise SystemExit("a driver has failed; see above")
        return watch.preempted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=12, help="tasks of each user (default: %(default)s)")
    parser.add_argument("--task-s", type=float, default=2.0, help="seconds that each task takes (default: %(default)s)")
    parser.add_argument("--machines", type=int, default=3, help="largest number of machines (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="directory for store and logs")
    parser.add_argument("--as-user", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_user:
        what, count, task_s = options.as_user
        trio.run({"tasks": submit_tasks, "gang": submit_gang}[what], int(count), float(task_s))
        return
    with tempfile.TemporaryDirectory(prefix="fray-shared-") as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(exist_ok=True)
        trio.run(play, options.tasks, options.task_s, options.machines, directory)


if __name__ == "__main__":
    main()
