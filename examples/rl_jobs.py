"""Jobs of `rl.py`: the trainer and the rollouts, which communicate only through the handles of the actors."""

from __future__ import annotations

import os
import signal

import numpy as np

from fray.v2 import ActorHandle
from rl_policy import improved, play

MOST_BEHIND = 50
"""Batches made with weights that are more versions old are dropped."""
WAIT_S = 1.0


def train(curriculum: ActorHandle, coordinator: ActorHandle, most_versions: int) -> None:
    """Learn from batches and publish weights, until the curriculum ends or there are so many versions.

    After a failure, a restarted trainer continues with the weights that were published last.
    """
    version, weights = coordinator.fetch.remote().result()
    while version < most_versions and not curriculum.over.remote().result():
        batches = coordinator.pull.remote(WAIT_S).result()
        if batches is None:
            return  # the coordinator was closed
        for batch in [batch for batch in batches if version - batch.version < MOST_BEHIND]:
            weights = improved(weights, batch)
            version += 1
        coordinator.publish.remote(version, weights).result()


def rollout(
    index: int, curriculum: ActorHandle, coordinator: ActorHandle, episodes: int, seed: int, killed_after: int = 0
) -> None:
    """Play lessons with the newest weights and push the batches, until the coordinator is closed.

    Args:
        killed_after: number of batches after which the first run ends by SIGKILL. 0: never.
    """
    begun = coordinator.begin.remote(index).result()
    rng = np.random.default_rng((seed, index, begun))
    version, weights = coordinator.fetch.remote().result()
    wanted, number = True, 0
    while wanted:
        asked = curriculum.sample_lesson.remote(int(rng.integers(2**32))), coordinator.fetch.remote(version)
        lesson, newer = (future.result() for future in asked)  # both calls run concurrently
        version, weights = newer or (version, weights)
        batch = play(weights, version, lesson, rng, episodes)
        curriculum.report.remote(lesson, batch.episodes, batch.won)  # its answer is not needed
        if begun == 1 and number == killed_after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = coordinator.push.remote(index, batch).result()
        number += 1
