"""Deliberate bugs in the core of Fray, and within how many seeds the random scenarios find each.

A bug is a patch of one function: a piece of its source, and what takes its place. A patch whose piece is no longer
there fails by its name: what is not in the code is neither found nor missed.

``python -m tests.simulation.mutants`` prints the table.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from tests.simulation.directed_plans import draw_directed
from tests.simulation.progress import Progress, add_option
from tests.simulation.run import run_seed

SEEDS = 24
"""Seeds within which a bug must be found."""


class PatchDoesNotApply(Exception):
    """The function of a deliberate bug is gone, or has changed."""


@frozen
class Mutant:
    """One deliberate bug."""

    where: str
    """Function, as ``module:name`` or ``module:Class.name``."""
    old: str
    """Piece of its source, which is in it once."""
    new: str
    directed: str = ""
    """Directed scenario that has to find it. Default: the random ones."""


_TRANSITIONS = "fray.scheduler.jobs.transitions"
MUTANTS: Mapping[str, Mutant] = {
    "children of an ended attempt are forgotten": Mutant(
        f"{_TRANSITIONS}:_release_attempt",
        "    stop_owned(state, out, attempt.attempt_id,",
        "    (lambda *given: None)(",
    ),
    "names outlive their process": Mutant(
        f"{_TRANSITIONS}:_release_attempt",
        "if attempt.attempt_id in state.registrations_by_incarnation:",
        "if False:",
    ),
    "a success does not free its generation": Mutant(
        f"{_TRANSITIONS}:_apply_attempt_end", "        _succeed(state, out, job)", "        pass"
    ),
    "missing attempts are not given up": Mutant(
        f"{_TRANSITIONS}:reconcile_missing_attempt",
        "if next_phase(ATTEMPT_TABLE, attempt.phase, AttemptObservation.ABSENT) is AttemptPhase.ENDED:",
        "if False:",
        directed="restored store",
    ),
    "busy devices are given to jobs": Mutant(
        "fray.scheduler.nodes.nodes:on_node_reported",
        "if node.busy != report.busy:",
        "if False:",
        directed="busy devices",
    ),
    "a lost node keeps its attempts": Mutant(
        "fray.scheduler.nodes.nodes:_give_up", "        if attempt.living:", "        if False:"
    ),
    "the history lacks attempts of lost machines": Mutant(
        f"{_TRANSITIONS}:end_attempt",
        "    out.record(attempt_record(state, attempt))",
        "    if outcome.cause is not EndReason.MACHINE_LOST:\n        out.record(attempt_record(state, attempt))",
    ),
    "a restarted node's attempts live on": Mutant(
        "fray.scheduler.nodes.nodes:on_node_joined",
        '_give_up(state, out, node, f"the node {node.name} was restarted", last_seen_at(state, node))',
        "pass",
    ),
    "a node ignores orders to stop": Mutant(
        "fray.node.reconcile:_act_on_observed", "return Stop(observed.attempt_id, desired.notice_s)", "return None"
    ),
    "a node ends nothing that is not desired": Mutant(
        "fray.node.reconcile:_act_on_observed",
        "if observed.phase is Phase.ENDED else Kill(observed.attempt_id)",
        "if observed.phase is Phase.ENDED else None",
        directed="late machines",
    ),
    "the maximum of a machine group is ignored": Mutant(
        "fray.scheduler.autoscaler.plan:_close_surplus", "if len(units) <= most:", "if True:"
    ),
    "idle machines stay": Mutant(
        "fray.scheduler.autoscaler.plan:_delete_idle", "if idle_s >= config.idle_s:", "if False:"
    ),
    "changes without an event are not saved": Mutant(
        "fray.controller.loop:Loop._save", "if upserts or deletes or recorded:", "if deletes or recorded:"
    ),
    "events of one turn are handled in reverse": Mutant(
        "fray.controller.loop:Loop._take_batch", "self._inbox.popleft()", "self._inbox.pop()"
    ),
    "a wake-up of the controller's loop is missed": Mutant(
        "fray.controller.loop:Loop.post",
        "    self._wakeup.unpark_all()",
        "    len(self._inbox) > 1 and self._wakeup.unpark_all()",
    ),
    "devices of a preempted job are free at once": Mutant(
        f"{_TRANSITIONS}:end_generation",
        "        attempt.stop_cause = cause\n",
        "        attempt.stop_cause = cause\n"
        "        if cause is EndReason.PREEMPTED:\n"
        "            pool = state.pool_for(job.spec.reservation_id)\n"
        "            pool.release(attempt.node, state.share_of(attempt), attempt.devices, ())\n",
    ),
    "a job is running with its first member": Mutant(
        f"{_TRANSITIONS}:_mark_succeeded_or_running", "counts.ran == job.spec.members", "counts.ran == 1"
    ),
    "a stage does not wait for the earlier ones": Mutant(
        f"{_TRANSITIONS}:is_stage_open", "return blocking is None or stage_of(job.spec) <= blocking", "return True"
    ),
    "usage of a quota is not given back": Mutant(
        "fray.scheduler.state.tables:Tables.release_attempt", "self._charge_attempt(attempt, -1)", "pass"
    ),
    "ports of ended attempts stay taken": Mutant(
        "fray.scheduler.state.tables:Tables.release_attempt",
        "attempt.devices, attempt.ports.values())",
        "attempt.devices, ())",
    ),
    "lent CPUs stay lent when the lender ends": Mutant(
        "fray.scheduler.state.tables:Tables.release_attempt", "self._end_loans(attempt)", "pass"
    ),
    "a retry does not wait for its back-off": Mutant(
        f"{_TRANSITIONS}:_retry", "if job.held_until is not None or budget", "if budget"
    ),
    "preemptions of a job have no limit": Mutant(
        "fray.scheduler.preemption.preemption:protection_reason", "if times >= rule.limit:", "if False:"
    ),
    "a drained node keeps its jobs": Mutant("fray.scheduler.nodes.drain:_evict", "if meant(job):", "if False:"),
    "retries are not counted": Mutant(
        "fray.scheduler.jobs.retries:charge_retry",
        "job.retries[first.cause] = job.retries.get(first.cause, 0) + 1",
        "job.retries.setdefault(first.cause, 1)",
    ),
    "jobs that were ended are retried": Mutant(
        "fray.scheduler.jobs.retries:retry_budget",
        "return None if job.stop_cause is not None else affordable_budget(state, job, first)",
        "return affordable_budget(state, job, first)",
    ),
    "members outlive the decision about their group": Mutant(
        "fray.scheduler.jobs.groups:_decide",
        "        stop_job(state, out, state.jobs[other], EndReason.GROUP,",
        "        (lambda *given: None)(state, out, state.jobs[other], EndReason.GROUP,",
    ),
    "jobs of a driver that has left live on": Mutant(
        "fray.scheduler.sessions:_stop_everything_owned",
        "            stop_job(state, out, job, EndReason.OWNER_ENDED, reason)",
        "            pass",
    ),
    "jobs of a closed reservation live on": Mutant(
        "fray.scheduler.reservations.reservations:close_reservation",
        "        stop_job(state, out, state.jobs[job_id], cause,",
        "        (lambda *given: None)(state, out, state.jobs[job_id], cause,",
    ),
    "frames of a lost connection are not sent again": Mutant(
        "fray.net.channel.session:SendQueue.rewind",
        "again = [frame for _, _, frames in self.sent for frame in frames]",
        "again = []",
    ),
    "requests are not sent again to a new controller": Mutant(
        "fray.net.channel.requests:Requests.on_reset",
        "self.channel.send_nowait(Kind.REQUEST, ref, pending.body)",
        "pass",
    ),
    "a retry does not wait for members on silent machines": Mutant(
        f"{_TRANSITIONS}:retry_or_commit",
        "if budget is not None and not living:",
        "if budget is not None:",
        directed="silent members",
    ),
    "a node keeps its attempts for 10 minutes longer than its lease": Mutant(
        "fray.node.run:_dial",
        "give_up_s=member.patience_s,",
        "give_up_s=member.config.lease_s + 600.0,",
        directed="beyond the lease",
    ),
    "claims of jobs that are gone stay": Mutant(
        "fray.scheduler.preemption.preemption:drop_stale_claims",
        "if claim.applicant not in state.queue or not served:",
        "if not served:",
        directed="withdrawn claims",
    ),
    "lost units of a reservation are not replaced": Mutant(
        "fray.scheduler.reservations.reservations:drop_node_units",
        "_short(state, reservation)",
        "pass",
        directed="lost units",
    ),
    "a node that came back gets work before its report": Mutant(
        "fray.scheduler.nodes.nodes:_rejoined",
        "node.has_reported = False",
        "pass",
        directed="devices of late machines",
    ),
    "a call that is sent again runs again": Mutant(
        "fray.runtime.calls.dedup:CallDeduplicator.admit",
        "if again and not self.is_complete:",
        "if False:",
        directed="sleeping callers",
    ),
}


def _function(name: str, mutant: Mutant) -> Callable[..., Any]:
    module, _, path = mutant.where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PatchDoesNotApply(f"the deliberate bug {name!r} no longer applies: {error}") from None
    return found  # type: ignore[no-any-return]


@contextmanager
def applied(name: str, mutant: Mutant) -> Iterator[None]:
    """Have the bug while entered.

    Raises:
        PatchDoesNotApply: its function is gone, or does not have its piece of source exactly once.
    """
    function = _function(name, mutant)
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(mutant.old)
    if count != 1:
        raise PatchDoesNotApply(
            f"the deliberate bug {name!r} no longer applies: {mutant.where} has {count} times {mutant.old.strip()!r}"
        )
    text = "from __future__ import annotations\n" + source.replace(mutant.old, mutant.new)
    names = dict(function.__globals__)  # for the defaults of its arguments
    exec(compile(text, "<mutant>", "exec"), names)
    before = function.__code__
    # The code and not the function: other modules have imported it by name.
    function.__code__ = names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


def first_seed(
    name: str, mutant: Mutant, seeds: Sequence[int], progress: Progress | None = None
) -> tuple[int, str] | None:
    """Return how many seeds it took to find the bug, and the violation; None: it was not found."""
    with applied(name, mutant):
        for count, seed in enumerate(seeds, start=1):
            if progress is not None:
                progress.show(f"{name}: seed {count} of {len(seeds)}")
            plan = draw_directed(seed, mutant.directed) if mutant.directed else None
            breaches = run_seed(seed, plan=plan).breaches
            if breaches:
                return count, str(breaches[0]).partition("\n")[0]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a bug was not found, 2 if a patch does not apply."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", metavar="WORD", default="", help="only those with this in their name")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds to try (default: %(default)s)")
    add_option(parser)
    options = parser.parse_args(argv)
    missed, progress = 0, Progress(options.progress_s)
    for name, mutant in MUTANTS.items():
        if options.only not in name:
            continue
        try:
            found = first_seed(name, mutant, range(options.first, options.first + options.seeds), progress)
        except PatchDoesNotApply as error:
            print(error, file=sys.stderr)
            return 2
        missed += found is None
        print(f"{name}: " + (f"seed {found[0]}: {found[1][:160]}" if found else "not found"), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
