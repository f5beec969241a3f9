"""A launcher on its own, without a node: what tests start with it, and what it tells of that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from fray.model.log_records import LogChunk, unpack
from fray.model.specs import AttemptSpec, EntryKind, JobSpec, ObservedAttempt, Outcome, Phase
from fray.node.attempts.process_launcher import ProcessLauncher

HERE = str(Path(__file__).parent)
LIMIT_S = 90.0
"""Seconds allowed for each wait, for a busy machine."""


@define
class Bench:
    """A launcher and all its reports."""

    launcher: ProcessLauncher
    reports: list[tuple[ObservedAttempt, bytes | None]] = field(factory=list)
    lines: list[tuple[str, str, str]] = field(factory=list)
    moved: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def on_observed(self, observed: ObservedAttempt, value: bytes | None) -> None:
        self.reports.append((observed, value))
        self.moved.unpark_all()

    def on_log(self, attempt_id: str, chunk: LogChunk) -> None:
        self.lines += [(attempt_id, stream, text) for _, stream, _, texts in unpack(chunk.data) for text in texts]
        self.moved.unpark_all()

    def start(self, name: str, *, entry: EntryKind = EntryKind.CALLABLE, **more: Any) -> str:
        """Start the function of `job_bodies` that the name begins with; returns the attempt id."""
        payload, devices = more.pop("payload", None), more.pop("devices", ())
        spec = JobSpec(job_id=name, name=name, namespace="space", entry=entry, sys_path=(HERE,), **more)
        attempt = f"{name}:0:0"
        self.launcher.start(
            AttemptSpec(attempt_id=attempt, spec=spec, controller="unix:/c", key="key", node="n", devices=devices),
            payload,
        )
        return attempt

    async def until_phase(self, attempt: str, phase: Phase) -> tuple[ObservedAttempt, bytes | None]:
        with trio.fail_after(LIMIT_S):
            while True:
                for observed, value in self.reports:
                    if observed.attempt_id == attempt and observed.phase is phase:
                        return observed, value
                await self.moved.park()

    async def until_line(self, attempt: str, text: str) -> None:
        with trio.fail_after(LIMIT_S):
            while not any(line[0] == attempt and line[2] == text for line in self.lines):
                await self.moved.park()

    async def outcome(self, attempt: str) -> Outcome:
        outcome = (await self.until_phase(attempt, Phase.ENDED))[0].outcome
        assert outcome is not None
        return outcome

    async def value(self, attempt: str) -> bytes | None:
        return (await self.until_phase(attempt, Phase.ENDED))[1]


@asynccontextmanager
async def open_bench(state_dir: Path, **options: Any) -> AsyncIterator[Bench]:
    launcher = ProcessLauncher(state_dir, **{"entry": "job_functions:dispatch", "warm": ("fray.net.codec",), **options})
    bench = Bench(launcher)
    launcher.on_observed, launcher.on_log = bench.on_observed, bench.on_log
    async with trio.open_nursery() as nursery:
        await nursery.start(launcher.run)
        yield bench
        nursery.cancel_scope.cancel()
