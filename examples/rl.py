"""Reinforcement learning on `fray.v2`: a trainer, N rollouts, and the two actors between them.

    python examples/rl.py [--client SPEC] [--rollouts N] [--kill-rollout] [--seed N] [--json]

A softmax policy learns a bandit, then its way through three grids, the last a maze; the curriculum advances by the
share of episodes that are won. The driver (this process) makes the curriculum and the weight coordinator, and passes
both to the jobs as pickled handles. Rollouts fetch weights by version, play, and send their episodes; the trainer
learns and publishes. On a cluster of several machines the directory of these files must be there on all of them.

In the order of reading: `rl_worlds` (environments), `rl_policy` (the model), `rl_actors` and `rl_jobs`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from fray.v2 import (
    ActorConfig,
    ActorHandle,
    Client,
    Entrypoint,
    JobFailed,
    JobHandle,
    JobRequest,
    JobStatus,
    LocalClient,
    ResourceConfig,
    wait_all,
)
from fray.v2.client import client_of
from rl_actors import Curriculum, WeightCoordinator
from rl_jobs import rollout, train
from rl_policy import success_rate, untrained
from rl_worlds import LESSONS

STABLE = ResourceConfig(preemptible=False)  # for actors on which all others depend
TRAINER = ResourceConfig(cpu=0.5, ram="512m")
ROLLOUT = ResourceConfig(cpu=0.25, ram="512m")  # may run on spot machines
RETRIES = 3
LOOK_S = 0.2
KILLED_AFTER = 3


def run(client: Client, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the example on this client; return the report."""
    began = time.perf_counter()
    curriculum = client.create_actor(Curriculum, name=f"{options.name}-curriculum", resources=STABLE)
    coordinator = client.create_actor(
        WeightCoordinator,
        untrained(),
        room=options.rollouts,
        name=f"{options.name}-weights",
        resources=STABLE,
        actor_config=ActorConfig(max_concurrency=options.rollouts + 4),  # each rollout may wait in a call
    )
    jobs: list[JobHandle] = []
    try:
        for request in requests(options, curriculum, coordinator):
            jobs.append(client.submit(request, adopt_existing=False))  # noqa: PERF401 (the ones submitted before an error are ended)
        wait_for_trainer(jobs, curriculum, coordinator, say)
    except JobFailed as failed:
        next(job for job in jobs if job.job_id == failed.job_id).wait()  # raises the error of that job itself
        raise
    finally:
        terminate([job for job in jobs if not JobStatus.finished(job.status())], coordinator)
    return report(options, jobs, curriculum, coordinator, time.perf_counter() - began)


def requests(options: argparse.Namespace, curriculum: ActorHandle, coordinator: ActorHandle) -> list[JobRequest]:
    """Return the requests of the trainer and the rollouts."""
    trainer = Entrypoint.from_callable(train, args=[curriculum, coordinator, options.versions])
    wanted = [JobRequest(f"{options.name}-train", trainer, resources=TRAINER, max_retries_failure=RETRIES)]
    for index in range(options.rollouts):
        killed_after = KILLED_AFTER if options.kill_rollout and index == 0 else 0
        args = [index, curriculum, coordinator, options.episodes, options.seed, killed_after]
        played = Entrypoint.from_callable(rollout, args=args)
        name = f"{options.name}-rollout-{index}"
        wanted.append(JobRequest(name, played, resources=ROLLOUT, max_retries_failure=RETRIES))
    return wanted


def wait_for_trainer(
    jobs: Sequence[JobHandle], curriculum: ActorHandle, coordinator: ActorHandle, say: Callable[[str], None]
) -> None:
    """Wait until the first of the jobs, the trainer, has ended.

    Raises:
        JobFailed: as soon as any job has failed for good.
        RuntimeError: as soon as an actor is lost. The jobs would fail too, but only after their retries.
    """
    shown = 0
    while not JobStatus.finished(jobs[0].status()):
        try:
            wait_all(jobs, timeout=LOOK_S)
        except TimeoutError:
            pass
        passed = curriculum.standing.remote().result()
        coordinator.standing.remote().result()
        for one in passed[shown:]:
            share, episodes = f"{one['passed_at']:.0%}", f"{one['episodes']:,}"
            say(f"{one['seconds']:6.1f} s  passed {one['lesson']}: {share}, after {episodes} episodes")
        shown = len(passed)


def terminate(unfinished: Sequence[JobHandle], coordinator: ActorHandle) -> None:
    """End the rollouts, which would run forever. On a cluster their processes end; threads of `LocalClient` return."""
    for job in unfinished:
        job.terminate()
    wait_all(unfinished, raise_on_failure=False)  # returns at once: terminated jobs are STOPPED
    coordinator.close.remote()


def report(
    options: argparse.Namespace,
    jobs: Sequence[JobHandle],
    curriculum: ActorHandle,
    coordinator: ActorHandle,
    seconds: float,
) -> dict[str, Any]:
    """Return the report: the share of successes before and after, in episodes that no job has played."""
    version, weights = coordinator.fetch.remote().result()
    passed = {one["lesson"]: one for one in curriculum.standing.remote().result()}
    lessons = [
        {
            "lesson": lesson.name,
            "untrained": success_rate(untrained(), number),
            "trained": success_rate(weights, number),
            **{what: passed.get(lesson.name, {}).get(what) for what in ("passed_at", "episodes", "seconds")},
        }
        for number, lesson in enumerate(LESSONS)
    ]
    return {
        "lessons": lessons,
        "passed": len(passed) == len(LESSONS),
        "versions": version,
        "rollouts": [{"rollout": index, **counts} for index, counts in coordinator.standing.remote().result().items()],
        "jobs": {job.job_id: job.status().value for job in jobs},
        "seconds": round(seconds, 3),
    }


def print_report(report: dict[str, Any]) -> None:
    print(f"{'lesson':18} {'untrained':>9} {'trained':>9} {'episodes':>9}")
    for one in report["lessons"]:
        episodes = "never passed" if one["episodes"] is None else f"{one['episodes']:9,}"
        print(f"{one['lesson']:18} {one['untrained']:9.1%} {one['trained']:9.1%} {episodes}")
    again = sum(one["begun"] - 1 for one in report["rollouts"])
    batches = sum(one["batches"] for one in report["rollouts"])
    brought = f"{batches:,} batches of {len(report['rollouts'])} rollouts{f', {again} of them restarted' * bool(again)}"
    print(f"{report['versions']:,} versions of the weights from {brought}, in {report['seconds']:.1f} s")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rl.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    spec = os.environ.get("FRAY_CLIENT_SPEC", "local")
    parser.add_argument("--client", default=spec, help="local, machine, or fray://HOST:PORT with FRAY_TOKEN")
    parser.add_argument("--rollouts", type=int, default=2, metavar="N", help="rollout jobs")
    parser.add_argument("--episodes", type=int, default=32, metavar="N", help="episodes in a batch")
    parser.add_argument("--versions", type=int, default=3000, metavar="N", help="give up after so many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rollouts' episodes")
    parser.add_argument("--name", default="rl", help="prefix of the names of jobs and actors")
    parser.add_argument("--kill-rollout", action="store_true", help="SIGKILL one after some batches; it restarts")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON on stdout")
    options = parser.parse_args(argv)
    for name in ("rollouts", "episodes", "versions"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.seed < 0:
        parser.error("--seed must be 0 or more")
    if options.kill_rollout and options.client == "local":
        parser.error("--kill-rollout needs processes, on local it would kill this one: add --client machine")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if not all lessons were passed, 2 if the job could not be done, 130 after Ctrl-C."""
    options = arguments(argv)
    try:
        # a thread for each job: the trainer waits for the rollouts
        client = LocalClient(options.rollouts + 1) if options.client == "local" else client_of(options.client)
        try:
            result = run(client, options, lambda line: print(line, file=sys.stderr, flush=True))
        finally:
            client.shutdown(wait=False)
    except KeyboardInterrupt:
        print("rl: interrupted", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"rl: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_report(result)
    return int(not result["passed"])


if __name__ == "__main__":
    sys.exit(main())
