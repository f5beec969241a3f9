"""Elastic training on slices that come and go.

    python examples/elastic_slices.py [CLUSTER] [--steps N] [--slice-cpu N] [--no-rival] [--kill] [--check] [--json]

A reservation guarantees one slice and grows to three while no other job needs the machines. One worker runs on each
slice; the leader makes a multi-slice of the present ones, step by step, and hears of a slice that is to leave before it
leaves. The model (`elastic_model`) is trained data-parallel: each worker takes its part of the step's rows, and the
gradients are reduced through the leader. A rival job takes a slice for a while; training never stops, and --check
compares the weights with those of a single loop, which are equal.

CLUSTER is `machine?nodes=3&cpu=2` (three nodes here), `local`, or fray://HOST:PORT; make `unit` a TPU type there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import trio

import elastic_model as model
import fray
from elastic_leader import Leader
from fray import Entrypoint, FrayError, Job, JobRequest, ReservationConfig, ResourceConfig

MACHINES = "machine?nodes=3&cpu=2"
SLICES = 3
STEPS = 15
"""Smallest number of steps before the rival comes, with it, and after it."""
LOOK_S = 0.02
PHASE_S = 60.0


async def slice_worker() -> None:
    """Worker of a slice: trains in step with the others, and stops when its slice is to leave."""
    me = fray.current_job().attempt
    leader = await fray.current_cluster().get_actor("leader")
    data = await trio.to_thread.run_sync(model.load)
    presence = leader.stay.start(me)  # lasts as long as this process
    at = await leader.exchange(me, None, None)
    while at is not None:
        gradient = await trio.to_thread.run_sync(model.gradient, at.weights, data, at.step, at.rank, at.size)
        if at.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        at = await leader.exchange(me, at.number, gradient)
    presence.cancel()
    await trio.sleep_forever()  # stopped: the job is ended soon, and restarts once it has a slice again


async def train(cluster: fray.Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """Train, while a rival comes and goes; return the result."""
    cpu = options.slice_cpu or (await cluster.wait_for_nodes(1))[0].cpu_milli // SLICES / 1000
    unit = ResourceConfig.with_cpu(cpu=cpu, memory="300MB")  # or ResourceConfig.with_tpu("v5litepod-16")
    config = ReservationConfig(
        min_resources=unit,
        max_resources=ResourceConfig.with_cpu(cpu=cpu, memory="300MB", replicas=SLICES),
        notice_s=0.3,
    )
    request = JobRequest("slice", unit, Entrypoint.from_callable(slice_worker), max_retries_failure=3)
    leader = await cluster.create_actor(Leader, options.kill, name="leader")
    async with cluster.open_reservation(config, wait_limit_s=30) as reservation:
        following = leader.follow.start(reservation.id)
        await reservation.keep(request)
        if options.rival:
            await steps_with(leader, SLICES)
            rival: Job = await cluster.launch(JobRequest("rival", unit, Entrypoint.from_callable(trio.sleep_forever)))
            await rival.wait_running()
            await steps_with(leader, SLICES - 1)
            await rival.terminate()
            await steps_with(leader, SLICES)
        result = await leader.result(options.steps)
        following.cancel()
    return dict(result)


async def steps_with(leader: fray.ActorHandle, members: int) -> None:
    """Wait until the last few steps were made by so many members. Raises TimeoutError."""
    with trio.move_on_after(PHASE_S) as within:
        while not await leader.ran_with(members, STEPS):  # noqa: ASYNC110 (the event is in another process)
            await trio.sleep(LOOK_S)
    if within.cancelled_caught:
        raise TimeoutError(
            f"no {STEPS} steps with {members} slices within {PHASE_S:g} s: choose --slice-cpu so that {SLICES} slices "
            "fill the cluster, or --no-rival"
        )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the example; return the report."""
    began = time.perf_counter()
    async with fray.open_cluster(options.cluster) as cluster:
        trained = await train(cluster, options)
    weights, sizes = trained["weights"], trained["sizes"]
    data = model.load()
    report = {
        "steps": len(sizes),
        "phases": [[size, len(run)] for size, run in phases(sizes)],
        "redone": trained["redone"],
        "accuracy": {"untrained": model.accuracy(model.fresh(), data), "trained": model.accuracy(weights, data)},
        "seconds": round(time.perf_counter() - began, 3),
    }
    if options.check:
        same = np.allclose(weights, model.plain(data, len(sizes)), rtol=1e-9, atol=1e-12)
        report["check"] = "the same" if same else "different"
    return report


def phases(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the phases of equal size: the size, and the steps."""
    found: list[tuple[int, list[int]]] = []
    for step, size in enumerate(sizes):
        if not found or found[-1][0] != size:
            found.append((size, []))
        found[-1][1].append(step)
    return found


def print_report(report: dict[str, Any]) -> None:
    slices = ", then ".join(f"{count} with {size}" for size, count in report["phases"])
    again = f", {report['redone']} repeated" if report["redone"] else ""
    print(f"{report['steps']} steps{again}: {slices} slices, in {report['seconds']:.1f} s")
    accuracy = report["accuracy"]
    before, after = f"{accuracy['untrained']:.1%}", f"{accuracy['trained']:.1%}"
    print(f"code or prose: {before} of the unseen lines right untrained, {after} trained")
    if "check" in report:
        print(f"compared with a single loop: {report['check']}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="elastic_slices.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("cluster", nargs="?", default=MACHINES, help="or local, or fray://HOST:PORT")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="smallest number of steps")
    parser.add_argument("--slice-cpu", type=float, metavar="N", help="CPUs of a slice; else a third of one machine")
    parser.add_argument("--no-rival", dest="rival", action="store_false", help="without the rival job")
    parser.add_argument("--kill", action="store_true", help="SIGKILL a worker during a step")
    parser.add_argument("--check", action="store_true", help="train in a single loop as well and compare the weights")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    if options.slice_cpu is not None and options.slice_cpu <= 0:
        parser.error("--slice-cpu must be more than 0")
    if options.kill and options.cluster.partition("?")[0] == "local":
        parser.error("--kill needs processes, on local it would kill this one: choose machine")
    if options.slice_cpu is None and options.cluster == MACHINES:
        options.slice_cpu = 2  # a whole machine
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if the check fails, 2 if it could not be done, 130 after Ctrl-C."""
    options = arguments(argv)
    try:
        report = trio.run(run, options)
    except KeyboardInterrupt:
        print("elastic_slices: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, FrayError) as error:
        print(f"elastic_slices: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_report(report)
    return int(report.get("check") == "different")


if __name__ == "__main__":
    sys.exit(main())
