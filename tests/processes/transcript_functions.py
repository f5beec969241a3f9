"""Jobs of the transcripts of the command line."""

from __future__ import annotations

import sys

import trio

import fray
from tests.support.job_functions import Counter


async def train() -> None:
    """Create an actor, report progress, and run until the end."""
    cluster = fray.current_cluster()
    await cluster.create_actor(
        Counter, name="policy/learner", resources=fray.ResourceConfig.with_cpu(cpu=0.5, memory="100MB")
    )
    fray.progress(1200, 5000, "steps")
    await trio.sleep_forever()


def evaluate() -> None:
    """Fail with a message that is longer than a line of a terminal."""
    print("loading /data/eval.jsonl", flush=True)
    sys.exit("no such file: /data/eval.jsonl; run prepare.py first, which downloads it and takes ten minutes")
