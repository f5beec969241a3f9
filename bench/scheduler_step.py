"""Duration of a step of the scheduler, on a cluster of 1,000 machines: ``python -m bench.scheduler_step``.

A driver launches actors, all start, some fail and restart, some are ended. Each kind of event is timed separately;
times are those of `step` and of `next_deadline`, without the store.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from fray.model.messages.client import Launch, Role
from fray.model.messages.node import NodeHello, ObservedState
from fray.model.resources import Capacity, Demand
from fray.model.specs import ActorConfig, EndReason, EntryKind, JobSpec, ObservedAttempt, Outcome, Phase
from fray.scheduler.effects import Event, LaunchRequested, NodeJoined, NodeReported, SessionOpened, TerminateRequested
from fray.scheduler.state.state import State
from fray.scheduler.step import step

MACHINES = 1_000
ACTORS = 2_000


def events(state: State) -> Iterator[tuple[str, Event]]:
    """Yield events with the name of their kind, which depend on the state after those before."""
    yield "open session", SessionOpened(session="d", role=Role.DRIVER, namespace="ns")
    capacity = Capacity(8000, 1 << 36, 1 << 36)
    for number in range(MACHINES):
        yield (
            "join",
            NodeJoined(hello=NodeHello(node=f"n{number}", incarnation="i", boot_id="b", capacity=capacity)),
        )
    for number in range(ACTORS):
        yield "launch", LaunchRequested(session="d", ref=number, launch=Launch(jobs=(_spec(f"a{number}"),)))
    for attempt in list(state.attempts.values()):
        yield "running", _report(state, attempt.attempt_id, Phase.RUNNING)
    for number in range(0, ACTORS, 4):
        yield "failed", _report(state, f"a{number}:0:0", Phase.ENDED)
    for number in range(0, ACTORS, 5):
        yield "terminate", TerminateRequested(session="d", ref=number, jobs=(f"a{number}",), reason="")


def _spec(name: str) -> JobSpec:
    return JobSpec(
        job_id=name,
        name=name,
        namespace="ns",
        entry=EntryKind.ACTOR,
        demand=Demand(cpu_milli=1000),
        max_retries_failure=3,
        max_retries_preemption=3,
        actor=ActorConfig(max_restarts=3, restart_period_s=60.0),
    )


def _report(state: State, attempt_id: str, phase: Phase) -> Event:
    outcome = Outcome(cause=EndReason.FAILURE, message="boom") if phase is Phase.ENDED else None
    report = ObservedState(full=False, observed=(ObservedAttempt(attempt_id=attempt_id, phase=phase, outcome=outcome),))
    return NodeReported(node=state.attempts[attempt_id].node, incarnation="i", report=report)


def main() -> None:
    """Print microseconds per step: median, 99th percentile, worst."""
    state, now = State(), 0.0
    took_s: dict[str, list[float]] = {}
    for kind, event in events(state):
        now += 0.001
        began = time.perf_counter()
        step(state, event, now)
        state.next_deadline()
        took_s.setdefault(kind, []).append(time.perf_counter() - began)
        state.take_dirty()
    print(f"{'event':<14}{'count':>7}{'p50 µs':>10}{'p99 µs':>10}{'max µs':>10}")
    for kind, times in took_s.items():
        p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
        figures = "".join(f"{time_s * 1e6:>10.0f}" for time_s in (statistics.median(times), p99, max(times)))
        print(f"{kind:<14}{len(times):>7}{figures}")


if __name__ == "__main__":
    main()
