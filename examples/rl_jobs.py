"""The two kinds of jobs of `rl.py`. They know the actors by the handles they are given, and nothing of each other."""

from __future__ import annotations

import os
import signal

import numpy as np

from fray.v2 import ActorHandle
from rl_policy import improved, play

MOST_BEHIND = 50
"""Batches that weights so many versions old have made are thrown away."""
WAIT_S = 1.0


def train(curriculum: ActorHandle, coordinator: ActorHandle, most_versions: int) -> None:
    """Learn from what comes, publish, until the curriculum is over or there are so many versions.

    Who begins here again, after a failure, goes on with what was published last.
    """
    version, weights = coordinator.fetch.remote().result()
    while version < most_versions and not curriculum.over.remote().result():
        batches = coordinator.pull.remote(WAIT_S).result()
        if batches is None:
            return  # it was ended; on a cluster this process is, too
        for batch in [batch for batch in batches if version - batch.version < MOST_BEHIND]:
            weights = improved(weights, batch)
            version += 1
        coordinator.publish.remote(version, weights).result()


def rollout(
    index: int, curriculum: ActorHandle, coordinator: ActorHandle, episodes: int, seed: int, killed_after: int = 0
) -> None:
    """Play lessons with the newest weights and bring the batches, until nobody wants more of them.

    Args:
        killed_after: so many batches, by SIGKILL, the first time it runs. 0: it is not.
    """
    begun = coordinator.begin.remote(index).result()
    rng = np.random.default_rng((seed, index, begun))
    version, weights = coordinator.fetch.remote().result()
    wanted, number = True, 0
    while wanted:
        asked = curriculum.sample_lesson.remote(int(rng.integers(2**32))), coordinator.fetch.remote(version)
        lesson, newer = (future.result() for future in asked)  # both calls under way at once
        version, weights = newer or (version, weights)
        batch = play(weights, version, lesson, rng, episodes)
        curriculum.report.remote(lesson, batch.episodes, batch.won)  # nobody needs to wait for that
        if begun == 1 and number == killed_after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = coordinator.push.remote(index, batch).result()
        number += 1
