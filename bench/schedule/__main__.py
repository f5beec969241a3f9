"""Benchmarks of the scheduler on simulated fleets.

    python -m bench.schedule [--nodes N] [--queued Q] [--only steady] [--json FILE]

- **burst**: small tasks come a hundred a request to an empty fleet, are placed, and end. Placements a second.
- **steady**: a full fleet with Q mixed tasks of 20 users waiting; tasks end, others come. p50 and p99 of a step.
- **starve**: the same, until and after all that waits begins to starve: p50, p99 and worst step before, in and after
  these seconds, in CPU time.
- **quality**: a day's load of bursts, gangs and small work on a small fleet: utilisation, waiting and fragmentation,
  beside a naive first-fit on the same load and an upper bound.
- **restart**: a controller starts on a store of 100,000 living tasks.

``--grid`` runs burst and steady on 100, 1,000 and 10,000 nodes with up to 1,000,000 waiting tasks. All on one core,
without processes: times are CPU times of this thread in `step` and `next_deadline`, so that other work on the machine
does not count; saving is timed in ``restart``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from bench.schedule.baselines import first_fit, fluid
from bench.schedule.fleet import RULES, Fleet
from bench.schedule.loads import GB, Work, backlog, day, odd, small
from fray import gc_tuning
from fray.controller.serve import restore_state
from fray.controller.store import Store
from fray.model.resources import Demand
from fray.scheduler.effects import ControllerStarted
from fray.scheduler.step import step

REQUEST = 100
"""Tasks of a burst in one launch."""
GRID = ((100, 10_000), (1_000, 10_000), (1_000, 100_000), (10_000, 100_000), (1_000, 1_000_000))


def burst(nodes: int, tasks: int, seed: int) -> dict[str, float]:
    """Run tasks that all fit, in requests of `REQUEST`; then all of them end."""
    figures = _burst(Fleet(nodes), nodes, tasks, seed)
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(nodes, store=Store(Path(directory) / "store"))
        saved = _burst(fleet, nodes, min(tasks, 10_000), seed)
    return figures | {"placements_per_s_saved": saved["placements_per_s"]}


def _burst(fleet: Fleet, nodes: int, tasks: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    tasks = min(tasks, nodes * 25)
    works = [_light(small(f"b{number}", rng, 0.0)) for number in range(tasks)]
    _freeze_heap()
    began = time.perf_counter()
    for at in range(0, tasks, REQUEST):
        fleet.now += 0.01
        fleet.launch(works[at : at + REQUEST])
    took_s = sum(fleet.took_s["launch"]) + sum(fleet.took_s["save"])
    if fleet.store is None:
        fleet.finish()
    return {
        "placements": fleet.placed,
        "placements_per_s": fleet.placed / took_s,
        "ends_per_s": len(fleet.took_s["end"]) / (sum(fleet.took_s["end"]) or 1.0),
        "wall_s": time.perf_counter() - began,
    }


def _light(work: Work) -> Work:
    """Return the work with demands so small that all of a burst fit at once."""
    return evolve(work, spec=evolve(work.spec, demand=Demand(1000, GB), time_limit_s=None), runs_s=60.0)


def _filled(nodes: int, queued: int, rng: random.Random) -> tuple[Fleet, dict[str, float]]:
    """Return a full fleet with a long queue, and what it took to fill it."""
    fleet = Fleet(nodes)
    before_mb = _rss_mb()
    began = time.perf_counter()
    line: list[Work] = []
    room = nodes * 30
    for work in backlog(queued + room, rng):
        line.append(work)
        if len(line) == REQUEST:
            fleet.launch(line, "fill")
            line = []
        if len(fleet.state.queue) >= queued:
            break
    filled = {"fill_s": time.perf_counter() - began, "memory_mb": _rss_mb() - before_mb}
    fleet.took_s.clear()
    fleet.placed = 0
    _freeze_heap()
    return fleet, filled


def _end_and_arrive(fleet: Fleet, number: int, rng: random.Random) -> None:
    """Let the next attempt end, and another job arrive."""
    fleet.happen()
    make = small if rng.random() < 0.9 else odd
    fleet.launch([make(f"s{number}", rng, fleet.now)])


def steady(nodes: int, queued: int, seed: int, events: int) -> dict[str, float]:
    """Measure the cost of every end and every arrival, with a full fleet and a long queue."""
    rng = random.Random(seed)
    fleet, filled = _filled(nodes, queued, rng)
    for number in range(events):
        _end_and_arrive(fleet, number, rng)
    times = fleet.took_s["end"] + fleet.took_s["launch"] + fleet.took_s["tick"]
    return {
        "queued": len(fleet.state.queue),
        "shapes": len({applicant.shape for applicant in fleet.state.queue}) if queued <= 100_000 else -1,
        **filled,
        "steps": len(times),
        "placements": fleet.placed,
        "decisions_per_s": len(times) / sum(times),
        "p50_ms": statistics.median(times) * 1e3,
        "p99_ms": statistics.quantiles(times, n=100)[98] * 1e3,
        "max_ms": max(times) * 1e3,
        "end_p99_ms": statistics.quantiles(fleet.took_s["end"], n=100)[98] * 1e3,
        "launch_p99_ms": statistics.quantiles(fleet.took_s["launch"], n=100)[98] * 1e3,
    }


def starve(nodes: int, queued: int, seed: int) -> dict[str, Any]:
    """Measure the same, from before until after the time at which all that waits begins to starve."""
    rng = random.Random(seed)
    fleet, _ = _filled(nodes, queued, rng)
    onset_s = fleet.now + fleet.state.config.starve_s
    figures: dict[str, Any] = {}
    numbers = itertools.count()
    for name, until_s in (("before", onset_s - 2), ("onset", onset_s + 4), ("after", onset_s + 11)):
        fleet.took_s.clear()
        fleet.placed = 0
        while fleet.now < until_s:
            _end_and_arrive(fleet, next(numbers), rng)
        times = sorted(time_s for took_s in fleet.took_s.values() for time_s in took_s)
        figures[name] = {
            "steps": len(times),
            "placements": fleet.placed,
            "p50_ms": statistics.median(times) * 1e3,
            "p99_ms": statistics.quantiles(times, n=100)[98] * 1e3,
            "over_20_ms": sum(time_s > 0.02 for time_s in times),
            "max_ms": times[-1] * 1e3,
            "cpu_s": sum(times),
        }
    return figures


def quality(nodes: int, tasks: int, seed: int) -> dict[str, Any]:
    """Measure utilisation and waiting times on a day's load."""
    works = day(tasks, nodes, random.Random(seed))
    fleet = Fleet(nodes)
    for work in works:
        fleet.happen_until(work.arrives_s)
        fleet.launch([work])
    until = works[-1].arrives_s
    ours = fleet.utilisation(until)
    broken = _free_but_waiting(fleet)
    shares = dict(fleet.shares())
    fleet.finish()
    naive = first_fit(works, nodes)
    bound = fluid(works, nodes, until)
    return {
        "utilisation": ours,
        "utilisation_first_fit": naive.utilisation(nodes, until),
        "utilisation_bound": bound,
        "of_bound": ours / bound if bound else 1.0,
        "free_cpus_while_waiting": broken,
        "wait_s": _waits(works, fleet.waited_s),
        "wait_first_fit_s": _waits(works, naive.waited_s),
        "wait_by_user_s": _by_user(works, fleet.waited_s),
        "wait_by_user_first_fit_s": _by_user(works, naive.waited_s),
        "shares_at_the_end": shares,
        "started": len(fleet.waited_s),
        "tasks": len(works),
    }


def _waits(works: Sequence[Work], waited_s: Mapping[str, float]) -> dict[str, float]:
    """Return waiting times of single tasks and of gangs, which are few and which a naive scheduler starves."""
    singles = [waited_s[work.spec.job_id] for work in works if work.spec.members == 1]
    gangs = [waited_s[work.spec.job_id] for work in works if work.spec.members > 1] or [0.0]
    single = {"single_mean": statistics.mean(singles), "single_p99": statistics.quantiles(singles, n=100)[98]}
    return {**single, "gang_mean": statistics.mean(gangs), "gang_max": max(gangs)}


def _by_user(works: Sequence[Work], waited_s: Mapping[str, float]) -> dict[str, float]:
    """Return the mean wait of each user's single tasks."""
    found: dict[str, list[float]] = {}
    for work in works:
        if work.spec.members == 1:
            found.setdefault(work.user, []).append(waited_s[work.spec.job_id])
    return {user: statistics.mean(waits) for user, waits in sorted(found.items())}


def _free_but_waiting(fleet: Fleet) -> float:
    """Return the fragmentation: the part of the CPUs that are idle while jobs wait for CPUs."""
    if not len(fleet.state.queue):
        return 0.0
    machines = fleet.state.pool.machines.values()
    return sum(machine.cpu_milli for machine in machines) / sum(machine.capacity.cpu_milli for machine in machines)


def restart(nodes: int, tasks: int, seed: int) -> dict[str, float]:
    """Measure how long the scheduler takes to load a store of so many running tasks."""
    rng = random.Random(seed)
    fleet = Fleet(nodes, unsaved=False)
    for at in range(0, tasks, REQUEST):
        works = [small(f"r{number}", rng, 0.0) for number in range(at, min(at + REQUEST, tasks))]
        fleet.launch([evolve(w, spec=evolve(w.spec, demand=Demand(cpu_milli=100))) for w in works])
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "store", "NORMAL")
        began = time.perf_counter()
        store.save(*fleet.state.take_dirty())
        save_s = time.perf_counter() - began
        store.close()
        living = len(fleet.state.attempts)
        del fleet
        _freeze_heap()
        began = time.perf_counter()
        with gc_tuning.gc_frozen():
            again = Store(Path(directory) / "store", "NORMAL")
            state = restore_state(again, again.load(), 0.0, RULES)
            step(state, ControllerStarted(epoch=2), 1.0)
        ready_s = time.perf_counter() - began
        again.close()
    assert len(state.attempts) == living
    return {"living": living, "save_s": save_s, "ready_s": ready_s}


def _freeze_heap() -> None:
    """Exempt all objects from garbage collection, as a controller does after it has loaded its store."""
    gc.collect()
    with gc_tuning.gc_frozen():
        pass


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _show(name: str, figures: dict[str, Any]) -> None:
    flat = ", ".join(f"{key} {_short(value)}" for key, value in figures.items() if not isinstance(value, dict))
    print(f"{name:<28} {flat}", flush=True)
    for key, value in figures.items():
        if isinstance(value, dict):
            print(f"{'':<28}   {key}: " + ", ".join(f"{k} {_short(v)}" for k, v in value.items()), flush=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.schedule", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--events", type=int, default=5_000, help="ends (and as many arrivals) timed in steady")
    parser.add_argument("--quality", type=int, nargs=2, default=(50, 6_000), metavar=("NODES", "TASKS"))
    parser.add_argument("--living", type=int, default=100_000, help="tasks in the store of restart")
    parser.add_argument("--only", default="burst,steady,quality,restart", help="benchmarks, separated by commas")
    parser.add_argument("--grid", action="store_true", help="burst and steady on fleets of 100 to 10,000 nodes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    probes: dict[str, Callable[[], dict[str, Any]]] = {}
    sizes = GRID if args.grid else ((args.nodes, args.queued),)
    for nodes, queued in sizes:
        probes[f"burst {nodes:,}"] = lambda nodes=nodes, queued=queued: burst(nodes, queued, args.seed)
        probes[f"steady {nodes:,} / {queued:,}"] = lambda nodes=nodes, queued=queued: steady(
            nodes, queued, args.seed, args.events
        )
        probes[f"starve {nodes:,} / {queued:,}"] = lambda nodes=nodes, queued=queued: starve(nodes, queued, args.seed)
    probes["quality"] = lambda: quality(*args.quality, args.seed)
    probes["restart"] = lambda: restart(args.nodes, args.living, args.seed)
    wanted = args.only.split(",")
    found = {}
    for name, probe in probes.items():
        if name.split()[0] in wanted:
            found[name] = probe()
            _show(name, found[name])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
