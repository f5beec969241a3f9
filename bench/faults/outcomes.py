"""Check of the outcomes of all jobs: none may be lost, none may have completed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import trio

import fray
from bench.faults.lab import Lab, read_lines
from fray import EndReason, JobInfo, JobState
from fray.node.environments.build_manager import TRIES

ENDED_WITHIN_S = 60.0


async def check_outcomes(
    cluster: fray.Cluster, lab: Lab, drivers: Iterable[str], lost: set[str], builder_kills: int
) -> dict[str, Any]:
    """Return the counts of outcomes and the violations, once every job has ended.

    Args:
        builder_kills: kills of processes that built environments. A job whose builder was killed `TRIES` times has to
            fail.
    """
    with trio.move_on_after(ENDED_WITHIN_S):
        while any(not job.state.finished for job in await cluster.list_jobs("*")):  # noqa: ASYNC110
            await trio.sleep(0.2)
    on_record = {job.job_id: job for job in await cluster.list_jobs("*")}
    accepted, ended = _reported_by_drivers(lab, drivers)

    def lacks_environment(error: str) -> bool:
        return builder_kills >= TRIES and f"its builder was killed {TRIES} times" in error

    broken: dict[str, list[Any]] = {"lost": [], "wrong": [], "completed twice": []}
    for job_id, (driver, detached) in accepted.items():
        job = on_record.get(job_id)
        must_succeed = driver not in lost or detached
        if job is None:
            broken["lost"].append(f"{job_id}: no record")
        elif must_succeed and job.state is not JobState.SUCCEEDED and not lacks_environment(str(job.error_message)):
            broken["lost"].append(f"{job_id}: {job.state.value}: {job.error_message}")
        if job is not None and len(_completions(job)) > 1:
            broken["completed twice"].append(f"{job_id}: generations {_completions(job)}")
    broken["lost"] += [f"{job_id}: its driver never saw its end" for job_id in _unreported(accepted, ended, lost)]
    failed = {job_id: word for job_id, word in ended.items() if word["state"] != "succeeded"}
    broken["wrong"] = [f"{job_id}: {word}" for job_id, word in failed.items() if not lacks_environment(str(word))]
    counts = Counter(f"{job.state.value}, {min(len(job.attempts), 4)} attempts" for job in on_record.values())
    return {"counts": {"accepted": len(accepted), **dict(sorted(counts.items()))}, "broken": broken}


def _reported_by_drivers(
    lab: Lab, drivers: Iterable[str]
) -> tuple[dict[str, tuple[str, bool]], dict[str, dict[str, Any]]]:
    accepted: dict[str, tuple[str, bool]] = {}
    ended: dict[str, dict[str, Any]] = {}
    for name in drivers:
        for line in read_lines(lab.ledger / f"{name}.jsonl"):
            if "accepted" in line:
                accepted[str(line["accepted"])] = (name, bool(line["detached"]))
            elif "ended" in line:
                ended[str(line["ended"])] = line
    return accepted, ended


def _unreported(accepted: dict[str, tuple[str, bool]], ended: dict[str, Any], lost: set[str]) -> list[str]:
    return [job_id for job_id, (driver, _) in accepted.items() if driver not in lost and job_id not in ended]


def _completions(job: JobInfo) -> list[str]:
    """Return the generations in which every member has succeeded. (A restart of a gang restarts all its members.)"""
    causes: dict[str, set[EndReason | None]] = {}
    for attempt in job.attempts:
        causes.setdefault(attempt.attempt_id.split(":")[1], set()).add(attempt.cause)
    return [generation for generation, found in causes.items() if found == {EndReason.SUCCEEDED}]
