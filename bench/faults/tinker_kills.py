"""Random kills of a training service: ``python -m bench.faults.tinker_kills --kills 200 --seed 1``.

Three users train at the same time: two with the Tinker SDK (supervised, and reinforcement learning with samples), and
one with a job of OpenTinker's protocol and an uploaded reward function. First without a kill; then again and again,
while the API server, an engine, a node or the controller is killed (SIGKILL) at random moments; daemons are started
again, as by a service manager. Each user must have, at each step, the loss or reward of the undisturbed run: within
1e-6, so every request took effect once and in order. At the end no process is left.

The SDK is in an environment of its own: ``tools/venv tinker-0.38``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
from attrs import define, field

import fray
from bench.faults.lab import TOKEN
from bench.faults.processes import all_processes, below, marked
from bench.faults.rl_kills import RlLab
from bench.tinker import MODELS, ROOT, output_of
from examples.opentinker_client import CONFIG, REWARD, batch_of
from fray import tinker
from fray.tinker.core.engine_scale import EngineRange
from fray.tinker.http_client import ServerUnreachable
from fray.tinker.opentinker.client import TrainingServiceError

SDK = ROOT / ".venv-tinker-0.38/bin/python"
PAUSE_S = (0.3, 5.0)
"""Seconds between two kills."""
SERVICE_SHARE = 0.35
"""Share of the API server among it and the engines."""
DAEMON_SHARE = 0.2
"""Share of the victims that are a node or the controller, where the campaign has a cluster of its own."""
NODES = ("north", "south")
DAEMON_AWAY_S = (0.0, 2.0)
"""Seconds for which a daemon is away."""
LIMIT_S = 400.0
"""Seconds in which the users of a round must be done, its kills included."""
TOLERANCE = 1e-6
STEPS = {"supervised": 60, "reinforcement": 20, "job": 20}
"""Steps of a user in one round."""
SERVICE = "tinker-service"
MORE_RANKS = (4, 8)
"""Ranks of the adapters of two more users where engines come and go."""
QUEUE_S, IDLE_S = 0.5, 2.0
"""Seconds for which requests queue before another engine is started, and for which one that ends was idle."""


@define
class TinkerCampaign:
    """Rounds of three users with kills.

    Args:
        rng: chooses victims and moments.
        most: kills in one round.
        engines: of each base model; with more than one, they come and go in each round.
        cluster: spec of a cluster whose nodes are all on this machine.
        lab: daemons of that cluster, which are victims, too; None: they are not.
    """

    rng: random.Random
    cluster: str
    lab: RlLab | None = None
    most: int = 10
    engines: EngineRange = field(factory=EngineRange)
    kills: list[str] = field(factory=list)
    seconds: list[float] = field(factory=list)
    broken: list[str] = field(factory=list)
    started: set[str] = field(factory=set)
    """Ids of the jobs of engines of adapters."""
    most_engines: int = 0

    async def run(self, count: int) -> dict[str, Any]:
        """Kill ``count`` times; return the report."""
        models = {"letters": MODELS["sft"], "digits": MODELS["rl"]}
        with TemporaryDirectory(prefix="fray-tinker-kills-") as directory:
            options: dict[str, Any] = {}
            if self.lab is not None:
                options = {"token": TOKEN, "grace_s": 600}
                await self.lab.wait_reachable()
            async with fray.open_cluster(self.cluster, logs=False, **options) as cluster:
                await cluster.wait_for_nodes(1 if self.lab is None else len(NODES))
                serving = tinker.serve(
                    models=models, threads=1, directory=Path(directory), cluster=cluster, engines=self.engines
                )
                async with serving as service:
                    wanted = await self.one_round(cluster, service.url, 0)
                    say(f"undisturbed: {self.seconds[0]:.1f} s")
                    while len(self.kills) < count and not self.broken:
                        await self.compared_round(cluster, service.url, min(self.most, count - len(self.kills)), wanted)
        found = below(os.getpid(), all_processes())
        if self.lab is not None:
            self.lab.close()
            # What a killed node has left is no longer below this process.
            found = marked(self.lab.tag, str(self.lab.directory))
        left = [f"{one.comm} ({one.pid})" for one in found if one.pid != os.getpid()]
        if left:
            self.broken.append(f"left at the end: {left}")
        undisturbed, *disturbed = self.seconds
        return {
            "kills": len(self.kills),
            "by kind": dict(sorted(Counter(self.kills).items())),
            "rounds": len(disturbed),
            "engines of adapters": {"begun": len(self.started), "most at once": self.most_engines},
            "seconds undisturbed": round(undisturbed, 1),
            "seconds of rounds": [round(each, 1) for each in disturbed],
            "broken": self.broken,
        }

    async def compared_round(self, cluster: fray.Cluster, url: str, kills: int, wanted: dict[str, list[float]]) -> None:
        before = len(self.kills)
        found = await self.one_round(cluster, url, kills)
        where = f"round {len(self.seconds) - 1} ({', '.join(self.kills[before:])})"
        for user, values in wanted.items():
            if user not in found:
                self.broken.append(f"{where}: {user} was not done within {LIMIT_S:g} s")
                continue
            apart = [abs(one - other) for one, other in zip(found[user], values, strict=False)]
            if len(found[user]) != len(values) or max(apart) > TOLERANCE:
                step = next((at for at, each in enumerate(apart) if each > TOLERANCE), len(apart))
                self.broken.append(f"{where}: {user} differs from step {step} on, {max(apart):.1e} at most")
        say(f"{where}: {self.seconds[-1]:.1f} s, {self.broken or 'nothing broken'}")

    async def one_round(self, cluster: fray.Cluster, url: str, kills: int) -> dict[str, list[float]]:
        """Have the users train; return the losses or rewards of those that are done in time."""
        found, began = dict[str, list[float]](), time.monotonic()
        client = (SDK, "-m", "bench.tinker_client")
        commands: dict[str, tuple[object, ...]] = {
            "supervised": (*client, "sft", url, "letters", "--steps", STEPS["supervised"], "--rank", 16),
            "reinforcement": (*client, "rl", url, "digits", "--steps", STEPS["reinforcement"], "--rank", 16),
            "job": (sys.executable, "-m", "bench.faults.tinker_kills", "--user", url),
        }
        if not self.engines.is_fixed:
            # Each engine of one model has as much work as it can do: only more models make requests queue.
            for rank in MORE_RANKS:
                commands[f"supervised, rank {rank}"] = (*commands["supervised"][:-1], rank)

        async def use(user: str) -> None:
            found[user] = await output_of(*commands[user])

        with trio.move_on_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.kill_at_random, cluster, kills)
                nursery.start_soon(self.count_engines, cluster)
                async with trio.open_nursery() as users:
                    for user in commands:
                        users.start_soon(use, user)
                nursery.cancel_scope.cancel()
        self.seconds.append(time.monotonic() - began)
        return found

    async def kill_at_random(self, cluster: fray.Cluster, most: int) -> None:
        # The SDK gives up when it cannot reach a service to which it has not spoken yet.
        if most:
            await running(cluster, 1 + len(STEPS))
        for _ in range(most):
            await trio.sleep(self.rng.uniform(*PAUSE_S))
            if self.lab is not None and self.rng.random() < DAEMON_SHARE:
                await self.lose_daemon(self.rng.choice(("node", "controller")))
                continue
            # The engines end with their service: another kill of it before they are there again would show nothing.
            found = await running(cluster, 2)
            is_service = self.rng.random() < SERVICE_SHARE
            kind, pid = self.rng.choice([each for each in found if (each[0] == "service") is is_service])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills.append(kind)
                say(f"{len(self.kills):4} {kind}")

    async def count_engines(self, cluster: fray.Cluster) -> None:
        """Note the engines of adapters that run, until cancelled."""
        while True:
            with contextlib.suppress(fray.FrayError):  # the controller is away
                engines = [each for each in await cluster.list_jobs() if each.name.startswith("tinker-engine")]
                self.started |= {each.job_id for each in engines if each.attempts}
                self.most_engines = max(self.most_engines, sum(not each.state.finished for each in engines))
            await trio.sleep(0.5)

    async def lose_daemon(self, kind: str) -> None:
        """Kill a node or the controller, and start it again a moment later."""
        assert self.lab is not None
        name = kind if kind == "controller" else self.rng.choice(NODES)
        self.lab.kill(name)
        self.kills.append(kind)
        say(f"{len(self.kills):4} {kind}")
        await trio.sleep(self.rng.uniform(*DAEMON_AWAY_S))
        self.lab.start(name)
        await self.lab.wait_reachable()


async def running(cluster: fray.Cluster, count: int) -> list[tuple[str, int]]:
    """Wait for ``count`` processes, of the service and of engines; return the kind and id of each."""
    kinds = {SERVICE: "service", "tinker-engine": "adapter engine", "tinker-": "job's engine"}
    while True:
        found = []
        for job in await cluster.list_jobs():
            kind = next((kind for name, kind in kinds.items() if job.name.startswith(name)), None)
            if kind is not None and job.attempts and job.attempts[-1].pid and not job.state.finished:
                found.append((kind, job.attempts[-1].pid))
        if len(found) >= count and any(kind == "service" for kind, _ in found):
            return sorted(found)
        await trio.sleep(0.1)


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def train_job(url: str) -> list[float]:
    """Train through OpenTinker's protocol; return the reward of each step."""
    scheduler = tinker.SchedulerClient(url, retry_delay_s=0.2)
    while True:
        # Sent once by the client; what a lost service has accepted ends without a client. A job whose engine is killed
        # before it has ever run has failed.
        with contextlib.suppress(ServerUnreachable, TrainingServiceError):
            job_id = scheduler.submit_job({})["job_id"]
            running_job = scheduler.wait_until_running(job_id)
            break
    service = tinker.ServiceClient(running_job["server_url"])
    service.set_config({**CONFIG, "actor_rollout_ref.model.path": "digits"}, reward=("share_right", REWARD))
    rng = random.Random(0)
    batches = (batch_of(["".join(rng.choices("0123456789", k=3)) for _ in range(32)]) for _ in range(STEPS["job"]))
    rewards = [step["training_step_reward"] for step in service.fit(batches)]
    scheduler.complete_job(job_id)
    return rewards


def with_daemons(rng: random.Random, kills: int, engines: EngineRange) -> dict[str, Any]:
    """Kill in a cluster of this campaign's own; return the report."""
    with TemporaryDirectory(prefix="fray-tinker-lab-", ignore_cleanup_errors=True) as directory:
        lab = RlLab(Path(directory))
        try:
            lab.open(list(NODES))
            return trio.run(TinkerCampaign(rng, lab.spec, lab, engines=engines).run, kills)
        finally:
            lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.tinker_kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (default 1)")
    parser.add_argument(
        "--cluster", metavar="SPEC", help="whose nodes are all on this machine, and stay (default: one of its own)"
    )
    parser.add_argument("--engines", default="1", metavar="MIN..MAX", help="of each base model, by load (default 1)")
    parser.add_argument("--user", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.user:
        print(json.dumps(train_job(options.user)))
        return
    if not SDK.exists():
        parser.error("the Tinker SDK is missing: tools/venv tinker-0.38")
    least, _, most = options.engines.partition("..")
    engines = EngineRange(int(least), int(most or least), QUEUE_S, IDLE_S)
    rng = random.Random(options.seed)
    if options.cluster:
        report = trio.run(TinkerCampaign(rng, options.cluster, engines=engines).run, options.kills)
    else:
        report = with_daemons(rng, options.kills, engines)
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["broken"]))


if __name__ == "__main__":
    main()
