"""Where this process is: in which Ray, with which board, in whose job or actor."""

from __future__ import annotations

from typing import Any

import ray

untyped: Any = ray
"""Ray has types for a part of its functions, and none where it is not installed."""

BOARD = "fray-board-{}"
"""One a driver: names of jobs and actors never clash between drivers, whatever namespace they are in."""
AT_THE_HEAD = {"node:__internal_head__": 0.001}
"""Ray's own name for the machine that is there as long as the cluster is."""
CALLS_AT_ONCE = 100_000
"""Of the board: each waiting caller is one."""

_boards: dict[str, Any] = {}
_owner: str | None = None


def board() -> Any:
    """The board of this driver and of all that it began; it is made when there is none, and ends with the driver.

    Raises:
        RuntimeError: there is no Ray here.
    """
    if not ray.is_initialized():
        raise RuntimeError("there is no Ray here: make a RayClient, or use this in a job or an actor of one")
    context = ray.get_runtime_context()
    connection = f"{context.get_worker_id()}"
    found = _boards.get(connection)
    if found is None:
        from fray.v2.ray_backend.registry import RayRegistry

        _boards.clear()
        made = ray.remote(RayRegistry).options(
            name=BOARD.format(context.get_job_id()),
            get_if_exists=True,
            num_cpus=0,
            resources=AT_THE_HEAD,
            max_concurrency=CALLS_AT_ONCE,
        )
        found = _boards[connection] = made.remote()
    return found


def forget_board() -> None:
    """It has died: the next who asks makes another."""
    _boards.clear()


def enter(job_id: str, its_board: Any) -> None:
    """From here on, this process runs the code of that job or actor."""
    global _owner
    _owner = job_id
    _boards[f"{ray.get_runtime_context().get_worker_id()}"] = its_board


def leave() -> None:
    """That code has ended."""
    global _owner
    _owner = None


def owner() -> str | None:
    """The job or actor whose code this process runs."""
    return _owner
