"""Speed of `fray.rl`, beside what it is compared with, and the learning gate: ``python -m bench.rl gate pool learn``.

- ``gate``: copy three digits. The plain loop (`bench.rl_plain_loop`) and runs of `rl.Run` take turns; seconds a
  step, without the start. Targets: one episode a group: ``sync`` 1.3, ``fully-async`` .85 times the plain loop; one
  a sample: 2 and 1.1 times.
- ``pool``: trajectories per second through leases, episodes, delivery and batches, with a model that costs nothing
  (target 3,000); also without its server.
- ``tail``: 64 slots, 64 rollouts a step, one in ten takes 2 s, the others .2 s. Target for ``fully-async``: 85 % of
  the ideal .38 s a step.
- ``weights``: 50 MB to two servers, until the first token of the new version, beside safetensors and HTTP (target:
  half), and the pauses of trainer and servers beside a memcpy of the bytes (target: three times); also to two servers
  that share no memory with the trainer, as on another machine, by a socket (target: 200 ms, one transfer).
- ``busy``: share of the time in which the server decodes, where generation is the bottleneck (target .9).
- ``learn``: the learning gate with seeds 0 to 2, and its controls, 200 updates each: mean reward of the last ten.
  Targets: .9 or more in ``sync`` and in ``fully-async`` with thresholds 1 and 4; at most .4 where servers never get
  weights, and where the rewards are those of another prompt.
- ``recover``: seconds in which a run recovers from the kill of a rollout process, of one of two servers, of both, of
  the trainer, of the process of data and pool, and of that of a job, beside what is promised, and the seconds of the
  imports.

``gate``, ``weights``, ``busy``, ``learn`` and ``recover`` need torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import trio

import fray
from bench.faults.processes import all_processes, below
from bench.faults.rl_kills import ROLES
from bench.rl_no_op import NoOpEngine, ServedFile, timed_memcpy
from bench.rl_recover import recover
from fray import rl
from fray.rl.controller import RunController
from fray.rl.coordinator import Coordinator
from fray.rl.core.versions import VersionName
from fray.rl.inference.model_engine import ModelEngine
from fray.rl.inference.requests import GenerateRequest, Sampling
from fray.rl.inference.server import InferenceServer
from fray.rl.messages import ServerRoute
from fray.rl.rollout.process import RolloutProcess
from fray.rl.rollout.scores import MadeTrajectories
from fray.rl.trainer_process import TrainerProcess

ROOT = Path(__file__).parents[1]
clock = time.perf_counter
TINY = rl.TinyLlama(layers=1, width=16, mlp=32)
SLOW_S, FAST_S = 2.0, 0.2
PARTS = {title: part for part, title in {**ROLES, "coordinator": ROLES["pool"]}.items() if part != "pool"}
"""Parts of a run by the titles of their processes."""


# Gate ----------------------------------------------------------------------------------------------------------------


def plain_step_s(steps: int) -> float:
    """Return the seconds of a step of the plain loop, in a process of its own."""
    command = [sys.executable, "-m", "bench.rl_plain_loop", "--steps", str(steps)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    found = re.search(r"; ([\d.]+) s,", out)
    assert found, out
    return float(found[1]) / steps


def run_step_s(steps: int, sync: str, episode: str) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step of a run, without the first five, in which processes start.

    And of these steps the milliseconds of CPU time of each part of the run, a step.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from rl_digits import copy_digits, copy_digits_in_groups, digits_run

    rollout = copy_digits_in_groups if episode == "group" else copy_digits
    trainer = rl.GRPO(groups=32, group_size=16, lr=1e-3, steps=steps)
    used: list[dict[str, float]] = []
    run = digits_run(
        trainer=trainer,
        sync=sync,
        rollout=rollout,
        episode=episode,
        progress=False,
        on_step=lambda _: used.append(cpu_ms()),
    )
    at = [step["elapsed_s"] for step in trio.run(run.main).steps]
    counted = len(at) - 5
    return (at[-1] - at[4]) / counted, {part: (used[-1][part] - used[4][part]) / counted for part in used[4]}


def cpu_ms() -> dict[str, float]:
    """Return the milliseconds of CPU time that each part of this process's run has used."""
    tick_ms = 1e3 / os.sysconf("SC_CLK_TCK")
    used = {"controller": 1e3 * time.process_time()}
    for process in below(os.getpid(), all_processes()):
        part = PARTS.get(process.comm, "other")
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        used[part] = used.get(part, 0.0) + tick_ms * (int(fields[11]) + int(fields[12]))
    return used


def gate(steps: int) -> dict[str, Any]:
    runs = {
        f"{sync}, one episode a {episode}": (sync, episode)
        for episode in ("group", "sample")
        for sync in ("sync", "fully-async")
    }
    plain, found, cpu = [plain_step_s(steps)], dict[str, float](), dict[str, float]()
    for name, (sync, episode) in runs.items():
        found[name], used = run_step_s(steps, sync, episode)
        cpu |= {f"{name}: CPU ms a step, {part}": ms for part, ms in {**used, "all": sum(used.values())}.items()}
        plain.append(plain_step_s(steps))
    base = median(plain)
    ratios = {f"{name} / plain loop": seconds / base for name, seconds in found.items()}
    return {"plain loop, s a step": base, "lowest": min(plain), "highest": max(plain), **found, **ratios, **cpu}


# Pool and tail -------------------------------------------------------------------------------------------------------


async def answered(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=4)
    return rl.score(reply, reward=1.0)


async def made(task: dict[str, Any], llm: rl.LLM) -> MadeTrajectories:
    tokens = [4, 0, 7, 11, 4, 0, 7, 13]
    mask = [0] * 4 + [1] * 4
    versions = [(VersionName(0, task["version"]), 4)]
    return MadeTrajectories(
        ({"tokens": tokens, "loss_mask": mask, "logprobs": [-1.0] * 8, "versions": versions, "reward": 1.0},)
    )


async def with_a_long_tail(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    await trio.sleep(SLOW_S if task["number"] % 10 == 0 else FAST_S)
    return await answered(task, llm)


@asynccontextmanager
async def rolling(run: rl.Run) -> AsyncIterator[tuple[Any, Any]]:
    """Start coordinator, rollout processes and a server without a model; yield the coordinator and the server."""
    parts = run.parts
    async with fray.open_cluster("machine", logs=False) as cluster, cluster.open_scope("bench") as scope:
        host = await scope.create_host("main")
        coordinator: Any = await host.create_actor(Coordinator, parts.plan, parts.rows)
        server: Any = await scope.create_actor(InferenceServer, NoOpEngine)
        await server.is_paused()
        await coordinator.set_routes([ServerRoute("server-0", server, VersionName(0, 0))])
        async with trio.open_nursery() as nursery:
            for _ in range(parts.processes):
                process: Any = await scope.create_actor(RolloutProcess, parts.episodes, coordinator)
                nursery.start_soon(process.run)
            yield coordinator, server
            nursery.cancel_scope.cancel()


async def step_times(run: rl.Run, steps: int) -> tuple[list[float], list[int]]:
    """Take batches as a trainer that costs nothing; return when each was there, and the age of its oldest token."""
    from fray.runtime.serialization.pickling import loads

    times, ages = [], []
    async with rolling(run) as (coordinator, server):
        for number in range(1, steps + 1):
            batch = await coordinator.next_batch(0)
            times.append(clock())
            trajectories = [one for group in batch.groups for content in group for one in loads(content)]
            ages.append(number - 1 - min(name.number for one in trajectories for name, _ in one["versions"]))
            version, is_due, _ = await coordinator.finish_update(0, number)
            if is_due:
                await server.load_weights(version, None, b"")
                await coordinator.finish_sync(version)
                await coordinator.set_routes([ServerRoute("server-0", server, version)])
    return times, ages


def no_op_run(rollout: Any, groups: int, rows: list[dict[str, Any]], **options: Any) -> rl.Run:
    trainer = rl.GRPO(groups=groups, group_size=1, advantage="reinforce", steps=100_000)
    return rl.Run(model=TINY, data=rows, rollout=rollout, trainer=trainer, progress=False, shuffle=False, **options)


def pool(steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rollout in {"with the server": answered, "without the server": made}.items():
        rows = [{"prompt": "407>", "version": 0} for _ in range(512)]
        options = {"sync": "fully-async", "stale": "keep", "staleness_threshold": 4, "rollout_workers": 512}
        run = no_op_run(rollout, 512, rows, rollout_processes=1, **options)
        times, _ = trio.run(step_times, run, steps)
        found[f"{name}: trajectories a second"] = 512 * (len(times) - 3) / (times[-1] - times[2])
    return found


def tail(steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sync, threshold, count in (("fully-async", 8, steps), ("sync", 0, max(steps // 8, 4))):
        rows = [{"prompt": "407>", "number": number} for number in range(640)]
        options = {"rollout_workers": 64, "rollout_processes": 1, "staleness_threshold": threshold or 1}
        times, ages = trio.run(step_times, no_op_run(with_a_long_tail, 64, rows, sync=sync, **options), count)
        skip = 12 if sync == "fully-async" else 1
        step_s = (times[-1] - times[skip]) / (len(times) - 1 - skip)
        found |= {f"{sync}: s a step": step_s, f"{sync}: highest age": max(ages)}
        if sync == "fully-async":
            found["share of the ideal .38 s"] = 0.38 / step_s
    return found


# Weights -------------------------------------------------------------------------------------------------------------


WAYS = ("memory", "http", "another host")
"""Ways of the weights to servers, which take turns."""


def on_another_host(directory: str, make: Callable[[], Any]) -> Any:
    """Make an engine in a process that shares no memory with those of this machine, as one on another machine."""
    os.environ["FRAY_SEGMENT_DIRECTORY"] = directory
    return make()


async def weight_times(rounds: int) -> dict[str, Any]:
    model = rl.TinyLlama(layers=4, width=512, heads=8, mlp=1376)
    request = GenerateRequest("first", (4, 0, 7, 11), Sampling(max_tokens=1))
    times: dict[str, list[float]] = {name: [] for name in (*WAYS, "publish", "load", "memcpy")}
    copies = 0
    with TemporaryDirectory() as directory, serving(Path(directory)) as url:
        async with fray.open_cluster("machine", logs=False) as cluster, cluster.open_scope("bench") as scope:
            host = await scope.create_host("main")
            unused: Any = await host.create_actor(
                Coordinator, no_op_run(answered, 1, [{"prompt": "1"}]).parts.plan, [{}]
            )
            trainer: Any = await scope.create_actor(
                TrainerProcess, unused, model, rl.GRPO(groups=1, group_size=2, lr=1e-3), 1
            )
            await trainer.start(0, None)

            async def two_servers(make: Callable[[], Any]) -> list[Any]:
                found: list[Any] = [await scope.create_actor(InferenceServer, make) for _ in range(2)]
                for server in found:
                    await server.is_paused()
                return found

            make = ModelEngine(model, slots=8, threads=1)
            here, there = await two_servers(make), await two_servers(partial(on_another_host, directory, make))

            async def load(server: Any, version: VersionName, table: Any, content: Any) -> None:
                began = clock()
                await server.load_weights(version, table, content)
                times["load"].append(clock() - began)
                (answer,) = await server.generate(GenerateRequest(f"{version}", request.prompt_ids, request.sampling))
                assert answer.segments == [(version, 1)]

            for number in range(1, len(WAYS) * (rounds + 1) + 1):
                version, way = VersionName(0, number), WAYS[number % len(WAYS)]
                path = Path(directory) / f"{number}.safetensors" if way == "http" else None
                kept, times["load"] = times["load"], []
                began = clock()
                weights = await trainer.publish(version, path)
                published = clock() - began
                content = ServedFile(f"{url}/{number}.safetensors") if path else weights.content
                async with trio.open_nursery() as nursery:
                    for server in there if way == "another host" else here:
                        nursery.start_soon(load, server, version, weights.table, content)
                whole = clock() - began
                if number > len(WAYS):  # the first of each warms up
                    times[way].append(whole)
                    if way == "memory":
                        times["publish"].append(published)
                        kept += times["load"]
                times["load"] = kept
                if way == "another host":
                    copies = (await weights.content.stats()).transfers
                if way == "memory":
                    size = weights.table.total_bytes
                    times["memcpy"].append(timed_memcpy(size))
                await weights.content.release()
    ms = {name: 1e3 * median(values) for name, values in times.items()}
    return {
        "MB": size / 1e6,
        "memory: publish to first token, ms": ms["memory"],
        "safetensors and HTTP, ms": ms["http"],
        "memory / safetensors and HTTP": ms["memory"] / ms["http"],
        "to two servers of another host, by a socket, ms": ms["another host"],
        "transfers to that host": copies,
        "memcpy, ms": ms["memcpy"],
        "trainer publishes, ms": ms["publish"],
        "trainer publishes / memcpy": ms["publish"] / ms["memcpy"],
        "server loads (two at once), ms": ms["load"],
        "server loads / memcpy": ms["load"] / ms["memcpy"],
    }


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


class serving:
    """Serve a directory over HTTP on the loopback, in a thread."""

    def __init__(self, directory: Path) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Files(*args, directory=str(directory)))

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


# Busy ----------------------------------------------------------------------------------------------------------------


async def long_answers(task: dict[str, Any], llm: rl.LLM) -> list[rl.Score]:
    replies = await llm.completion(task["prompt"], max_tokens=96, n=16, ignore_eos=True)
    return [rl.score(reply, reward=float(len(set(reply.token_ids)))) for reply in replies]


class StepTimes:
    """`RunLog` of the times of updates."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def add_step(self, *_: Any) -> None:
        self.at.append(clock())

    def ignore(self, *_: Any) -> None:
        pass

    add_samples = add_validation = add_posts = rewind = take_over = note = ignore


async def busy_share(sync: str, steps: int) -> tuple[float, float]:
    """Return the share of the time in which the server decoded, and seconds a step, without the first three steps."""
    trainer = rl.GRPO(groups=4, group_size=16, lr=1e-4, steps=steps)
    run = rl.Run(
        model=rl.TinyLlama(),
        data=[{"prompt": f"{n}>"} for n in range(64)],
        rollout=long_answers,
        trainer=trainer,
        rollout_workers=8,
        sync=sync,
        staleness_threshold=2,
        episode="group",
        progress=False,
    )
    seen: list[tuple[float, float]] = []
    log = StepTimes()
    at = log.at
    async with fray.open_cluster("machine", logs=False) as cluster:
        controller = RunController(cluster, run.parts, log)

        async def watch() -> None:
            with contextlib.suppress(fray.ActorDied):  # at the end of the run
                while True:
                    await trio.sleep(0.1)
                    if len(at) >= 3 and controller._servers.handles:
                        server: Any = controller._servers.handles["server-0"]
                        seen.append((clock(), (await server.status())["busy_s"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await controller.run()
            nursery.cancel_scope.cancel()
    seen = [each for each in seen if each[0] <= at[-1]]
    (then, before), (now, after) = seen[0], seen[-1]
    return (after - before) / (now - then), (at[-1] - at[2]) / (len(at) - 3)


def busy(steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sync in ("fully-async", "sync"):
        share, step_s = trio.run(busy_share, sync, steps)
        found |= {f"{sync}: busy share": share, f"{sync}: s a step": step_s}
    return found


# Learn ---------------------------------------------------------------------------------------------------------------

LEARNERS: dict[str, dict[str, Any]] = {
    "sync": {},
    "fully-async, threshold 1": {"sync": "fully-async", "staleness_threshold": 1},
    "fully-async, threshold 4": {"sync": "fully-async", "staleness_threshold": 4},
    "control: servers never get weights": {"sync": "fully-async", "stale": "keep", "weight_sync": "none"},
    "control: rewards of another prompt": {},
}
SEEDS = (0, 1, 2)


def learn(steps: int) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "examples"))
    from rl_digits import copy_digits_in_groups, digits_run

    found: dict[str, Any] = {}
    for name, options in LEARNERS.items():
        for seed in SEEDS:
            numbers = [f"{number:03}" for number in range(1000)]
            answers = random.Random(seed).sample(numbers, len(numbers)) if "another prompt" in name else numbers
            run = digits_run(
                model=rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ ", seed=seed),
                data=[
                    {"prompt": f"{one}>", "answer": f"{other}$"} for one, other in zip(numbers, answers, strict=True)
                ],
                trainer=rl.GRPO(groups=32, group_size=16, lr=1e-3, steps=steps),
                rollout=copy_digits_in_groups,
                episode="group",
                seed=seed,
                progress=False,
                **options,
            )
            rewards = [step["reward_mean"] for step in trio.run(run.main).steps]
            first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
            print(f"{name}, seed {seed}: {first:.3f}, then {last:.3f}", file=sys.stderr, flush=True)
            found |= {f"{name}, seed {seed}: first ten": first, f"{name}, seed {seed}: last ten": last}
    return found


SECTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gate": gate,
    "pool": pool,
    "tail": tail,
    "weights": lambda steps: trio.run(weight_times, steps),
    "busy": busy,
    "learn": learn,
    "recover": lambda rounds: trio.run(recover, rounds),
}
STEPS = {"gate": 40, "pool": 40, "tail": 60, "weights": 8, "busy": 20, "learn": 200, "recover": 3}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default all)")
    what = "updates of each section; of recover: kills of each part"
    parser.add_argument("--steps", type=int, help=f"{what} (default {STEPS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {min(unknown)!r}: expected one of {', '.join(SECTIONS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = {}
    for name in options.sections or SECTIONS:
        results[name] = SECTIONS[name](options.steps or STEPS[name])
        print(f"{name}:", flush=True)
        for what, value in results[name].items():
            print(f"  {what:96} {value:10,.3f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
