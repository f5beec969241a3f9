"""Reduces a scenario with a violation to a short one with the same violation: fewer acts, faults, machines, drivers.

Each step leaves something out and runs the scenario again; what the violation does not need stays out. Acts and faults
are left out in halves, then quarters, down to single ones (delta debugging). What is drawn for an act does not depend
on the others; the order of tasks and the delays of messages do, so a violation that needs a rare order may keep more
than it needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from attrs import define, evolve

from fray.testing.ground_truth import Violation
from tests.simulation.run import run_seed
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_files import RecordedScenario
from tests.simulation.scenario_plans import ScenarioPlan

LIMIT_S = 180.0
"""Seconds of real time after which the shortest scenario so far is taken."""

Run = Callable[[int, ScenarioPlan], ScenarioResult]
T = TypeVar("T")


class NothingToShrink(Exception):
    """The scenario has no violation."""


def kind_of(violation: Violation) -> str:
    """Return what a violation is, without what differs between scenarios: words with digits (ids, times)."""
    return f"{violation.promise}: " + re.sub(r"\S*\d\S*", "#", violation.text)


def _run(seed: int, plan: ScenarioPlan) -> ScenarioResult:
    return run_seed(seed, plan=plan)


def shrink(seed: int, plan: ScenarioPlan, *, run: Run = _run, limit_s: float = LIMIT_S) -> RecordedScenario:
    """Return the shortest scenario found that has the first violation of this one.

    Args:
        limit_s: seconds of real time to look for it.

    Raises:
        NothingToShrink: there is no violation.
    """
    result = run(seed, plan)
    if not result.breaches:
        raise NothingToShrink(f"seed {seed} has no violation")
    first = result.breaches[0]
    search = _Search(seed, plan, kind_of(first), result.digest, run, time.monotonic() + limit_s)
    # Most of what begins after the violation was seen cannot matter: one run in place of many.
    search.try_plan(_until(plan, first.time))
    size = None
    while size != _size(search.plan) and not search.is_late:
        size = _size(search.plan)
        search.reduce_all()
    return RecordedScenario(seed, search.plan, search.expects, search.digest)


def _until(plan: ScenarioPlan, time_s: float) -> ScenarioPlan:
    """Return the plan without what begins later, except the next act of each driver: it leaves after its last."""
    later = {act.driver: act.number for act in reversed(plan.acts) if act.at_s > time_s}
    return evolve(
        plan,
        acts=tuple(act for act in plan.acts if act.at_s <= time_s or act.number in later.values()),
        faults=tuple(fault for fault in plan.faults if fault.at_s <= time_s),
    )


def _size(plan: ScenarioPlan) -> tuple[int, ...]:
    flags = (plan.cloud, plan.on_disk, plan.declares)
    return len(plan.acts), len(plan.faults), len(plan.machines), plan.drivers, len(plan.terms), sum(flags)


@define
class _Search:
    seed: int
    plan: ScenarioPlan
    expects: str
    digest: str
    run: Run
    until: float
    """Time, on the monotonic clock, from which on nothing more is tried."""

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.until

    def try_plan(self, plan: ScenarioPlan) -> bool:
        """Take the plan if its scenario has the violation; return whether it has."""
        if self.is_late:
            return False
        result = self.run(self.seed, plan)
        if self.expects not in map(kind_of, result.breaches):
            return False
        self.plan, self.digest = plan, result.digest
        return True

    def reduce_all(self) -> None:
        """Leave out what can be left out, once."""
        self._leave_out(self.plan.faults, lambda faults: evolve(self.plan, faults=tuple(faults)))
        self._leave_out(self.plan.acts, lambda acts: evolve(self.plan, acts=tuple(acts)))
        if self.plan.drivers > 1:
            one = tuple(evolve(act, driver=0) for act in self.plan.acts)
            self.try_plan(evolve(self.plan, acts=one, drivers=1))
        self._leave_out(self.plan.machines, lambda machines: evolve(self.plan, machines=tuple(machines)), least=1)
        for plan in self._simpler():
            if plan != self.plan:
                self.try_plan(plan)

    def _simpler(self) -> Iterator[ScenarioPlan]:
        yield evolve(self.plan, cloud=False)
        yield evolve(self.plan, on_disk=False)
        if not self.plan.cloud:  # what has not joined yet would never be
            yield evolve(self.plan, declares=False)
        yield evolve(self.plan, terms={})

    def _leave_out(self, items: Sequence[T], plan_of: Callable[[Sequence[T]], ScenarioPlan], least: int = 0) -> None:
        """Leave out as many items as possible, in parts that become smaller."""
        size = len(items)
        while size:
            at = 0
            while at < len(items):
                rest = [*items[:at], *items[at + size :]]
                if len(rest) >= least and self.try_plan(plan_of(rest)):
                    items = rest
                else:
                    at += size
            size = min(size // 2, len(items))
