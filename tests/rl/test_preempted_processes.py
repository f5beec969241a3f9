"""A machine leaves a run: its server is replaced before it ends, and its episodes are given back at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import trio

import fray
from fray import ResourceConfig, rl
from fray.api.cluster import Cluster
from fray.rl.checkpoint import latest_checkpoint
from fray.rl.records.run_files import read_status

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
]
STEPS = 100_000
SPOT_PARTS = ("InferenceServer", "RolloutProcess")


async def slow(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    reply = await llm.completion(task["prompt"], max_tokens=2)
    await trio.sleep(0.3)
    return rl.score(reply, reward=float(reply.text.startswith("1")))


class Filler:
    def ping(self) -> None: ...


async def place(cluster: Cluster, part: str) -> str:
    """Return the node of the part of the run that started last; empty if none runs."""
    actors = [one for one in await cluster.list_actors() if one.name.startswith(part) and one.started is not None]
    return max(actors, key=lambda one: one.started or 0.0).node if actors else ""


async def moved(cluster: Cluster, part: str, before: str = "") -> None:
    while await place(cluster, part) in ("", before):  # noqa: ASYNC110 - another process changes it
        await trio.sleep(0.1)


def test_a_run_leaves_a_drained_machine_with_its_server_replaced_and_its_episodes_given_back(tmp_path: Path) -> None:
    one, two = (ResourceConfig(cpu=cpu, memory=0) for cpu in (1, 2))
    run = rl.Run(
        model=rl.TinyLlama(layers=1, width=16, mlp=32),
        data=[{"prompt": f"{number}>"} for number in range(100)],
        rollout=slow,
        trainer=rl.GRPO(groups=4, group_size=4, lr=1e-2, steps=STEPS),
        sync="fully-async",
        rollout_workers=8,
        output=tmp_path,
        save_every=STEPS,
        progress=False,
        resources={"server": one, "rollout": one},
    )

    async def updated() -> None:
        before = read_status(tmp_path)["step"]
        while read_status(tmp_path)["step"] < before + 2:  # noqa: ASYNC110 - the run changes it
            await trio.sleep(0.1)

    async def main() -> rl.RunStatus | None:
        async with fray.open_cluster("machine?nodes=3&cpu=2&memory=1GB", logs=False) as cluster:
            await cluster.wait_for_nodes(3)
            full, spot, other = [node.name for node in await cluster.nodes()]
            async with trio.open_nursery() as nursery:
                begun = trio.Event()
                run.on_step = lambda metrics: begun.set()
                # On the full machine are the parts that reserve nothing: trainer, data and pool.
                await cluster.cordon(spot, other)
                filler = await cluster.create_actor(Filler, resources=two, max_restarts=1)
                await filler.ping()
                nursery.start_soon(run.run_on, cluster)
                for part in ("Coordinator", "TrainerProcess"):
                    await moved(cluster, part)
                await cluster.uncordon(spot)
                await begun.wait()
                assert {await place(cluster, part) for part in SPOT_PARTS} == {spot}
                await cluster.uncordon(other)
                await cluster.drain(spot, reason="spot")
                for part in SPOT_PARTS:
                    await moved(cluster, part, spot)
                await updated()
                status = await run.status()
                # Now the trainer, and the process of data and pool.
                await cluster.drain(full, reason="spot")
                for part in ("Coordinator", "TrainerProcess"):
                    await moved(cluster, part, full)
                await updated()
                nursery.cancel_scope.cancel()
        return status

    status = trio.run(within_limit, main)
    assert status is not None
    said = (tmp_path / "progress.log").read_text()
    assert "server-0 is preempted, or its machine leaves: server-1 takes its place" in said
    assert "server-0 has left" in said
    # Nothing else was lost, and that costs the tasks none of their attempts.
    assert status.version.incarnation == 0
    assert status.repeated.keys() == {"preempted"}
    assert not status.dropped
    # It finished an update and saved, although no checkpoint was due, and continued after it.
    saved = latest_checkpoint(tmp_path / "checkpoints")
    assert saved is not None
    assert f"continues after step {saved.step}" in said
    assert saved.step >= status.version.number


async def within_limit(main: Any) -> Any:
    with trio.fail_after(240):
        return await main()
