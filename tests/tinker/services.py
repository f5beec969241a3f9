"""A service with a tiny model on real processes, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fray
from fray import rl, tinker
from tests.processes.lab import TOKEN
from tests.support.warm_cluster import warm_lab

MODEL = rl.TinyLlama(layers=2, width=64, chars="0123456789+=>$ ")
REWARD = """
def share(data_source, solution_str, ground_truth, extra_info, **kw):
    return {"score": sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)}
"""


@asynccontextmanager
async def warm_cluster() -> AsyncIterator[fray.Cluster]:
    """Connect to the cluster of this process whose jobs need not import torch, with a namespace of its own."""
    async with fray.open_cluster(warm_lab().spec, token=TOKEN, logs=False) as cluster:
        yield cluster


@asynccontextmanager
async def running(directory: Path | None, **options: Any) -> AsyncIterator[tuple[fray.Cluster, Any]]:
    """Serve the tiny model from ``directory``; None: that which commands look into."""
    async with warm_cluster() as cluster:
        settings: dict[str, Any] = {"models": [MODEL], "threads": 1, "directory": directory, **options}
        async with tinker.serve(**settings, cluster=cluster) as service:
            yield cluster, service
