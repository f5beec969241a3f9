"""`ActorBackend` of the pipeline example, which executes datasets with a coordinator and workers on any client."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal, TypeAlias

from fray.v2 import (
    ActorConfig,
    ActorGroup,
    ActorHandle,
    Client,
    Entrypoint,
    JobHandle,
    JobRequest,
    ResourceConfig,
    current_client,
    set_current_client,
)
from pipeline_plan import Dataset, Plan, Row
from pipeline_shards import Store, stored_rows
from pipeline_workers import Coordinator, ExecutionHint, ZephyrWorker

Style: TypeAlias = Literal["actor", "job"]

SMALL = ResourceConfig(cpu=0.1, ram="256m", preemptible=False)
"""Resources of a coordinator: it computes little, and should not be preempted."""
WORKER = ActorConfig(max_concurrency=10, max_restarts=3)
SUMMARY_FILE = "summary.json"


def coordinator_of(workers: int) -> ActorConfig:
    """Return options with room for `run_pipeline`, which runs all the time, and for calls of all workers."""
    return ActorConfig(max_concurrency=2 * workers + 10)


class ActorBackend:
    """Executes datasets with ``num_workers`` workers, which end with its ``with`` block.

        with ActorBackend(client, 8, resources) as backend:
            rows = backend.execute(dataset, ExecutionHint(output="gs://bucket/run"))

    Args:
        coordinator: ``"actor"``: an actor that lives as long as the workers. ``"job"``: for each execution a job that
            hosts the coordinator, and has its own workers.
        board: actor whose method ``show`` is called with the progress.
    """

    def __init__(
        self,
        client: Client,
        num_workers: int,
        resources: ResourceConfig,
        *,
        coordinator: Style = "actor",
        board: ActorHandle | None = None,
        name: str = "zephyr",
    ) -> None:
        self._client, self._num_workers, self._resources, self._board = client, num_workers, resources, board
        self._name = f"{name}-{uuid.uuid4().hex[:6]}"
        self._groups: list[ActorGroup] = []
        self._job: JobHandle | None = None
        self._coordinator: ActorHandle | None = None
        self.summary: dict[str, Any] = {}
        """Summary of the last execution: its stages, and the lost workers."""
        if coordinator == "actor":
            self._begin()

    def _begin(self) -> None:
        """Start coordinator and workers. The coordinator is a group of one, as groups can be ended."""
        single = self._client.create_actor_group(
            Coordinator,
            self._board,
            name=f"{self._name}-coordinator",
            count=1,
            resources=SMALL,
            actor_config=coordinator_of(self._num_workers),
        )
        self._groups.append(single)
        (self._coordinator,) = single.wait_ready()
        workers = workers_of(self._client, self._name, self._coordinator, self._num_workers, self._resources)
        self._groups.insert(0, workers)

    def __enter__(self) -> ActorBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """End the actors; after an error or Ctrl-C, without waiting for running calls."""
        jobs = [job for group in reversed(self._groups) for job in group.jobs] if kind is not None else []
        for job in [self._job, *jobs] if self._job is not None else jobs:
            job.terminate()
        for group in self._groups:
            group.shutdown()

    def execute(self, dataset: Dataset, hint: ExecutionHint) -> list[Row]:
        """Return the rows of the last stage. Shards that an earlier execution has finished are not computed again.

        Raises:
            ShardFailed: a shard failed too often.
            OtherPlan: the output belongs to another plan.
            RuntimeError: the workers, or the coordinator, have ended.
        """
        plan = dataset.plan()
        self.summary = self._by_job(plan, hint) if self._coordinator is None else self._by_actor(plan, hint)
        return stored_rows(hint.output, plan, plan.stages[-1].name)

    def _by_actor(self, plan: Plan, hint: ExecutionHint) -> dict[str, Any]:
        assert self._coordinator is not None
        summary: dict[str, Any] = self._coordinator.run_pipeline.submit(plan, hint, self._groups[0]).result()
        return summary

    def _by_job(self, plan: Plan, hint: ExecutionHint) -> dict[str, Any]:
        args = (plan, hint, self._name, self._num_workers, self._resources, self._board)
        entrypoint = Entrypoint.from_callable(coordinate, args=args)
        with set_current_client(self._client):
            self._job = self._client.submit(JobRequest(self._name, entrypoint, SMALL))
        self._job.wait()
        store = Store(hint.output)
        with store.fs.open(store.at(SUMMARY_FILE), "rb") as file:
            summary: dict[str, Any] = json.load(file)
        return summary


def workers_of(
    client: Client, name: str, coordinator: ActorHandle, count: int, resources: ResourceConfig
) -> ActorGroup:
    return client.create_actor_group(
        ZephyrWorker, coordinator, name=f"{name}-worker", count=count, resources=resources, actor_config=WORKER
    )


def coordinate(
    plan: Plan, hint: ExecutionHint, name: str, count: int, resources: ResourceConfig, board: ActorHandle | None
) -> None:
    """Job that hosts the coordinator. It stores the summary, as return values of jobs are dropped."""
    client = current_client()
    how = coordinator_of(count)
    with client.host_actor(Coordinator, board, name=f"{name}-coordinator", actor_config=how) as hosted:
        workers = workers_of(client, name, hosted.handle, count, resources)
        try:
            summary = hosted.handle.run_pipeline(plan, hint, workers)
        finally:
            workers.shutdown()
    Store(hint.output).write(SUMMARY_FILE, lambda file: file.write(json.dumps(summary).encode()))
