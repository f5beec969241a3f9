"""Cost of the records of finished jobs in the controller: ``python -m bench.records [--json FILE]``.

Short jobs pass through the scheduler and a store on disk, without processes: each is launched, placed, connects, runs,
and ends with its own result. Memory of this process, size of the store, and rows of each table are measured on the way.
Records that the scheduler's limits bound are flat from there on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fray.controller.store import Store
from fray.model.messages.client import Launch, Role
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.resources import Capacity, Demand
from fray.model.specs import EndReason, EntryKind, JobSpec, ObservedAttempt, Outcome, Phase
from fray.scheduler.effects import (
    DeleteBlobs,
    Effect,
    Event,
    EventRecorded,
    LaunchRequested,
    NodeJoined,
    NodeReported,
    SessionOpened,
)
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.state.state import State
from fray.scheduler.step import step

BATCH = 50
"""Jobs whose events are saved in one transaction, as under load."""


class Controller:
    """Work of the controller's loop without the loop: step, save, carry out effects."""

    def __init__(self, store: Store, rules: SchedulerConfig) -> None:
        self.store, self.now = store, 1_000_000.0
        self.state = State(self.now, rules)
        capacity = Capacity(64_000, 1 << 40, 1 << 40)
        self.submit(SessionOpened(session="driver", role=Role.DRIVER, namespace="ns", user="alice"))
        self.submit(NodeJoined(hello=NodeHello(node="n1", incarnation="i", boot_id="b", capacity=capacity)))

    def submit(self, *events: Event) -> None:
        effects: list[Effect] = []
        for event in events:
            self.now += 0.001
            effects += step(self.state, event, self.now)
        upserts, deletes = self.state.take_dirty()
        happened = [effect.event for effect in effects if isinstance(effect, EventRecorded)]
        self.store.save(upserts, deletes, happened, {"now": self.now})
        for effect in effects:
            if isinstance(effect, DeleteBlobs):
                self.store.forget(blob for blob in effect.blobs if not self.state.is_blob_used(blob))

    def run(self, first: int, count: int) -> None:
        """Run so many jobs, from launch to end."""
        payload = self.store.put_blob(b"one payload for all")
        specs = [_spec(number, payload) for number in range(first, first + count)]
        attempts = [f"{spec.job_id}:0:0" for spec in specs]
        self.submit(*(LaunchRequested(session="driver", ref=n, launch=Launch(jobs=(s,))) for n, s in enumerate(specs)))
        self.submit(*(_opened(attempt) for attempt in attempts))
        self.submit(*(_report(attempt, Phase.RUNNING) for attempt in attempts))
        values = [self.store.put_blob(f"the result of {attempt}".encode() * 8) for attempt in attempts]
        self.submit(*(_report(a, Phase.ENDED, value) for a, value in zip(attempts, values, strict=True)))


def _spec(number: int, payload: str) -> JobSpec:
    name = f"alice/etl/part/{number}"
    return JobSpec(
        job_id=f"{name}-k3j9x2m4q8w7",
        name=name,
        namespace="ns",
        entry=EntryKind.CALLABLE,
        payload=payload,
        demand=Demand(cpu_milli=1000),
        env_vars={"STAGE": "test", "PART": str(number)},
        sys_path=tuple(f"/home/alice/project/src/lib{n}" for n in range(6)),
        cwd="/home/alice/project",
        signature="etl.part#0123456789abcdef",
        user="alice",
    )


def _opened(attempt: str) -> Event:
    return SessionOpened(session=attempt, role=Role.JOB, namespace="ns", attempt_id=attempt)


def _report(attempt: str, phase: Phase, value: str | None = None) -> Event:
    ended = Outcome(cause=EndReason.SUCCEEDED, exit_code=0, value=value, duration_s=0.001, peak_memory_bytes=9 << 20)
    outcome = ended if phase is Phase.ENDED else None
    report = ObservedState(
        full=False, observed=(ObservedAttempt(attempt_id=attempt, phase=phase, pid=4711, outcome=outcome),)
    )
    return NodeReported(node="n1", incarnation="i", report=report)


# Measuring -----------------------------------------------------------------------------------------------------------


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def size_bytes(directory: Path) -> int:
    """Return the size of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def look(controller: Controller, directory: Path, jobs: int, took_s: float) -> dict[str, Any]:
    """Return a line of the table."""
    tables = ("job", "attempt", "session", "job_tombstone")
    return {
        "finished_jobs": jobs,
        "rss_bytes": rss_bytes(),
        "store_bytes": size_bytes(directory),
        "blobs": len(controller.store.blobs()),
        "rows": {table: len(controller.state.rows(table)) for table in tables},
        "us_per_job": round(took_s * 1e6 / jobs) if jobs else 0,
    }


def measure(total: int, every: int, rules: SchedulerConfig) -> Iterator[dict[str, Any]]:
    """Yield a line at the start and after each ``every`` jobs."""
    with tempfile.TemporaryDirectory(prefix="fray-records-") as directory:
        store = Store(Path(directory) / "store", synchronous="OFF")
        controller = Controller(store, rules)
        began = time.perf_counter()
        yield look(controller, Path(directory), 0, 0.0)
        for first in range(0, total, BATCH):
            controller.run(first, BATCH)
            if (first + BATCH) % every == 0:
                yield look(controller, Path(directory), first + BATCH, time.perf_counter() - began)
        store.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; write it as JSON if requested."""
    parser = argparse.ArgumentParser(prog="bench.records", description="Cost of finished jobs in the controller.")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=2_500)
    parser.add_argument("--json", type=Path)
    found = parser.parse_args(argv)
    heads = ("finished", "RSS MB", "store MB", "blobs", "jobs", "attempts", "sessions", "past")
    print("".join(f"{head:>10}" for head in heads))
    lines = []
    for line in measure(found.jobs, found.every, SchedulerConfig()):
        lines.append(line)
        size = (line["rss_bytes"], line["store_bytes"])
        megabytes = "".join(f"{amount / 1e6:>10.1f}" for amount in size)
        counts = "".join(f"{count:>10}" for count in (line["blobs"], *line["rows"].values()))
        print(f"{line['finished_jobs']:>10}{megabytes}{counts}", flush=True)
    print(f"{lines[-1]['us_per_job']} µs for each job, saved in batches of {BATCH}")
    if found.json is not None:
        found.json.write_text(json.dumps({"pid": os.getpid(), "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
