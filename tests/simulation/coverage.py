"""Coverage of a campaign: which rows of the state tables, effects, events, end reasons and faults occurred.

A row that never occurs is a rule that no scenario checks. `EXEMPT` has those that a simulation cannot reach, each with
its reason; any other fails the campaign (``python -m tests.simulation --seeds 0-999 --coverage FILE``), as does an
exempt row that occurs: its reason is wrong.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from fray.controller.connections.relay import RelayEndpoint
from fray.model.specs import EndReason
from fray.node.health import counters
from fray.runtime.calls.dedup import Admission, CallDeduplicator
from fray.scheduler import effects, lifecycle
from fray.scheduler.state import unit_rows
from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.state import State
from fray.testing.faults import FAULTS
from fray.testing.ground_truth import GroundTruth
from fray.testing.rare_faults import RARE_FAULTS
from tests.simulation.operations import ACTS

TABLES: Mapping[str, Mapping[Any, StrEnum]] = {
    "job": lifecycle.JOB_TABLE,
    "attempt": lifecycle.ATTEMPT_TABLE,
    "node": lifecycle.NODE_TABLE,
    "unit": unit_rows.UNIT_TABLE,
    "health": counters.TABLE,
}
_UNASKED = "its node was not asked to run it: its reports are ignored before the table is read"
_RESERVED_ONLY = "only reserved attempts are begun with a stage, or withdrawn"
_FIRST_LOSS = "only the first loss of a connection counts (`on_node_silent`)"
_IN_ORDER = "a node reports the phases of an attempt in their order; the row refuses what a defective node sends"
_NO_PROCESS_WATCH = "only of a node on the controller's own machine, whose process is seen to end: not simulated"
USES = ("lent CPUs", "relayed connection", "notice of a reservation", "call sent again")
"""Uses that no row or event shows, as counted in `GroundTruth.uses`."""
EXEMPT: Mapping[str, str] = {
    **{f"attempt: reserved + {what}": _UNASKED for what in ("starting", "running", "stopping", "ended", "absent")},
    **{
        f"attempt: {phase} + {what}": _RESERVED_ONLY
        for phase in ("desired", "starting", "running", "stopping")
        for what in ("stage reached", "withdrawn before start")
    },
    **{f"node: {phase} + lost connection": _FIRST_LOSS for phase in ("silent", "suspect", "lost")},
    "attempt: running + starting": _IN_ORDER,
    "attempt: stopping + running": _IN_ORDER,
    "node: lost + restarted": "a lost node is left out (`on_controller_start`)",
    **{f"node: {phase} + died": _NO_PROCESS_WATCH for phase in ("silent", "suspect", "lost")},
    "attempt ended: unschedulable": "an attempt has a place already",
    "job ended: port_taken": "100 retries with growing pauses take longer than a scenario",
    "effect: EventRefused": "only a defect of the controller causes it",
    "job ended: gang": "another member's cause is the job's, unless a node reports wrongly",
    "attempt ended: no_account": "simulated machines have no accounts",
    "job ended: no_account": "simulated machines have no accounts",
}
"""Row: why no scenario reaches it."""


class _CountedTable(dict[Any, Any]):
    """A state table that counts its rows when they are read."""

    def __init__(self, name: str, table: Mapping[Any, StrEnum], counts: Counter[str]) -> None:
        super().__init__(table)
        self._name, self._counts = name, counts

    def __getitem__(self, key: Any) -> Any:
        phase = super().__getitem__(key)
        self._counts[_row(self._name, key)] += 1
        return phase

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - counts it


def _row(table: str, key: tuple[StrEnum, StrEnum]) -> str:
    return f"{table}: {key[0].value} + {key[1].value}"


@contextmanager
def counting(counts: Counter[str], truth: GroundTruth) -> Iterator[None]:
    """Count the rows of all state tables that are read while entered, and at the end what the ground truth has."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fray.")]
    really, admit_really = RelayEndpoint.__init__, CallDeduplicator.admit

    def relayed(self: RelayEndpoint, credit_bytes: int) -> None:
        truth.uses["relayed connection"] += 1
        really(self, credit_bytes)

    def admit(self: CallDeduplicator, number: int, again: bool = False) -> Admission:
        truth.uses["call sent again"] += again
        return admit_really(self, number, again)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(RelayEndpoint, "__init__", relayed))
        stack.enter_context(mock.patch.object(CallDeduplicator, "admit", admit))
        counted = {id(table): _CountedTable(name, table, counts) for name, table in TABLES.items()}
        for module in modules:
            for attribute, value in list(vars(module).items()):
                if id(value) in counted:
                    stack.enter_context(mock.patch.object(module, attribute, counted[id(value)]))
        yield
    counts.update({f"use: {what}": truth.uses[what] for what in USES if truth.uses[what]})


def count_step(counts: Counter[str], state: State, event: object, done: Sequence[object]) -> None:
    """Count an event of the scheduler, its effects, and the ends that are new."""
    counts[f"event: {type(event).__name__}"] += 1
    counts.update(f"effect: {type(effect).__name__}" for effect in done)
    for effect in done:
        if isinstance(effect, effects.JobInfoChanged):
            job = state.jobs.get(effect.job_id)
            if job is not None:
                _count_ends(counts, state, job)


def _count_ends(counts: Counter[str], state: State, job: JobRow) -> None:
    if job.outcome is not None:
        counts[f"job ended: {job.outcome.cause.value}"] += 1
    ended = (each.outcome for each in state.attempt_records(job) if each.outcome is not None)
    counts.update(f"attempt ended: {outcome.cause.value}" for outcome in ended)


def all_rows() -> list[str]:
    """Return everything that a campaign has to reach."""
    classes = {"event": get_args(effects.Event), "effect": get_args(effects.Effect)}
    return [
        *(_row(name, key) for name, table in TABLES.items() for key in table),
        *(f"{what}: {each.__name__}" for what, each_of in classes.items() for each in each_of),
        *(f"{what} ended: {reason.value}" for what in ("attempt", "job") for reason in EndReason),
        *(f"fault: {kind}" for kind in (*FAULTS, *RARE_FAULTS)),
        *(f"act: {kind}" for kind in ACTS),
        *(f"use: {what}" for what in USES),
    ]


def missing(counts: Mapping[str, int]) -> list[str]:
    """Return what never occurred and is not exempt."""
    return [row for row in all_rows() if not counts.get(row) and row not in EXEMPT]


def wrongly_exempt(counts: Mapping[str, int]) -> list[str]:
    """Return the exempt rows that occurred."""
    return [row for row in EXEMPT if counts.get(row)]


def report(counts: Mapping[str, int], path: Path) -> list[str]:
    """Write the counts as JSON, and return the report in lines; the last says how many rows never occurred."""
    rows, never = all_rows(), missing(counts)
    data = {"counts": {row: counts.get(row, 0) for row in rows}, "never": never, "exempt": dict(EXEMPT)}
    path.write_text(json.dumps(data, indent=1) + "\n")
    found = [f"exempt, and occurred {counts[row]} times: {row}" for row in wrongly_exempt(counts)]
    total = f"coverage: {sum(counts.get(row, 0) > 0 for row in rows)} of {len(rows)} rows occurred"
    return [*(f"never: {row}" for row in never), *found, f"{total}, {len(EXEMPT)} are exempt, {len(never)} are missing"]
