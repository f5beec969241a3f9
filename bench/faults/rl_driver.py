"""Driver of one run of a campaign of kills: ``python -m bench.faults.rl_driver OUTPUT MODE STEPS SETTINGS [JOB]``.

Continues from what is in OUTPUT. SETTINGS are more arguments of `fray.rl.Run`, as JSON. With JOB, a name, the run is a
job, for whose end the driver waits. Its last line is the status of the run as JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import attrs
import trio

import fray
from fray import rl
from fray.rl import run_job

GROUPS, GROUP_SIZE, THRESHOLD, SAVE_EVERY = 4, 4, 2, 5
LIVENESS_S = 4.0
SERVERS = 2
VALIDATION_ROWS = 8
STALL_S = 10.0
"""Seconds without progress after which a job is taken for frozen."""


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    """Roll out two turns, with a pause between them in which the weights may change."""
    first = await llm.completion(task["prompt"], max_tokens=2, ignore_eos=True)
    await trio.sleep(0.02)
    last = await llm.completion([*first.prompt_ids, *first.token_ids], max_tokens=2, ignore_eos=True)
    return rl.score(last, reward=float(last.text.startswith("1")))


def run_of(output: Path, mode: str, steps: int, settings: dict[str, Any]) -> rl.Run:
    """Return the run; with ``validate_freq`` it validates with a few rows, with ``reference`` it has a KL penalty."""
    rows = [{"prompt": f"{''.join(digits)}>"} for digits in itertools.product("0123456789", repeat=2)]
    return rl.Run(
        model=rl.TinyLlama(layers=1, width=16, mlp=32),
        data=rows,
        rollout=solve,
        trainer=rl.GRPO(
            groups=GROUPS, group_size=GROUP_SIZE, lr=1e-2, steps=steps, kl=0.01 if "reference" in settings else None
        ),
        rollout_workers=GROUPS * GROUP_SIZE,
        rollout_processes=2,
        inference_servers=SERVERS,
        sync=mode,
        staleness_threshold=THRESHOLD,
        output=output,
        save_every=SAVE_EVERY,
        keep_checkpoints=True,
        liveness_s=LIVENESS_S,
        validation_data=rows[:VALIDATION_ROWS] if "validate_freq" in settings else None,
        **settings,
    )


async def wait_for_job(run: rl.Run) -> rl.RunStatus:
    """Launch a run as a job, and wait for its end."""
    async with fray.open_cluster() as cluster:
        job = await run.submit(cluster)
        return await job.wait()


def main() -> None:
    # By its name, and not as part of this program: the nodes import it.
    from bench.faults.rl_driver import run_of as make

    output, mode, steps, settings, *job = sys.argv[1:]
    given = json.loads(settings) | ({"name": job[0]} if job else {})
    run = make(Path(output), mode, int(steps), given)
    run_job.LEAST_STALL_S = STALL_S
    status = trio.run(wait_for_job, run) if job else trio.run(run.main).status
    assert status is not None
    print(json.dumps(attrs.asdict(status)), flush=True)


if __name__ == "__main__":
    main()
