"""Invariants of TPU slices of several hosts (see `check`)."""

from __future__ import annotations

from collections.abc import Iterator

from fray.model.gangs import hosts_of
from fray.scheduler.pool.machine import SliceId, slice_of
from fray.scheduler.state.rows import AttemptRow, JobRow
from fray.scheduler.state.state import State


def slices_are_whole(state: State) -> Iterator[str]:
    """Yield runs of members without one slice to themselves: a host each, all of the same slice, no two runs on one
    slice."""
    for job in state.jobs.values():
        hosts = hosts_of(state.demand(job)) if not job.ended else 0
        if hosts > 1:
            yield from _of_job(state, job, hosts)


def _of_job(state: State, job: JobRow, hosts: int) -> Iterator[str]:
    runs: dict[int, list[AttemptRow]] = {}
    for attempt in state.living_members(job):
        runs.setdefault(attempt.member // hosts, []).append(attempt)
    owners: dict[SliceId, int] = {}
    for run, members in sorted(runs.items()):
        nodes = sorted(attempt.node for attempt in members)
        named = {slice_of(state.nodes[name].capacity)[0] for name in nodes}
        if len(set(nodes)) < len(nodes):
            yield f"{job.job_id}: two members of one slice are on one host: {nodes}"
        if None in named or len(named) > 1:
            yield f"{job.job_id}: run {run} of its members is on hosts of the slices {sorted(map(str, named))}"
        for name in named:
            if name is not None and owners.setdefault(name, run) != run:
                yield f"{job.job_id}: slice {name[2]} is allocated to two runs of its members"
