"""Run random scenarios of whole clusters: one seed (--seed 7), many (--seeds 0-999 --jobs 2), or a scenario file.

--seed 7 --shrink FILE writes a short scenario that has the violation of the seed; --scenario FILE runs it again.
--report ARCHIVE replays the job of an archive of ``fray report`` (`tests.simulation.report_replay`).
--directed NAME runs the scenario of this name and the seed (`tests.simulation.directed_plans`) instead of a random one.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from fray.model.messages.session import VERSION
from fray.model.text import visible_text
from fray.testing.seed import Seed
from tests.simulation import coverage, report_replay, scenario_files, shrink
from tests.simulation.code_version import code_version
from tests.simulation.directed_plans import DIRECTED, draw_directed
from tests.simulation.fresh_seeds import first_fresh_seed
from tests.simulation.progress import Progress, add_option
from tests.simulation.run import counts_text, run_seed, summary
from tests.simulation.scenario import ScenarioResult
from tests.simulation.scenario_plans import ScenarioPlan, draw_plan

QUEUED_PER_JOB = 3
"""Runs that wait or run, or whose results wait for an earlier one, for each process."""
DIRECTED_EVERY = 5
"""Seeds of a campaign for each directed scenario."""
NOT_COVERED = 3
"""Exit status of a campaign without a violation in which a row of the coverage never occurred, or an exempt one did."""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, default=0, help="run the scenario of this seed (default: 0)")
    what.add_argument("--seeds", metavar="A-B", help="run all of these and count")
    what.add_argument("--fresh", metavar="N", type=int, help="run this many seeds that are derived from the commit")
    what.add_argument("--scenario", metavar="FILE", type=Path, help="run the scenario of a file")
    what.add_argument("--report", metavar="ARCHIVE", type=Path, help="replay the job of an archive of fray report")
    parser.add_argument("--directed", metavar="NAME", choices=sorted(DIRECTED), help="instead of a random scenario")
    parser.add_argument(
        "--version", metavar="V", help="version of the code that printed the seed: say if it is another"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes to use (default: 1)")
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="begin no more of --seeds or --fresh after this many seconds"
    )
    parser.add_argument(
        "--shrink", metavar="FILE", type=Path, help="reduce the scenario of --seed to a short one with its violation"
    )
    parser.add_argument(
        "--shrink-s", type=float, default=shrink.LIMIT_S, help="seconds to look for one (default: %(default)s)"
    )
    parser.add_argument(
        "--coverage",
        metavar="FILE",
        type=Path,
        help="fail if a rule, an end or a fault never occurred in --seeds or --fresh; as JSON",
    )
    add_option(parser)
    parser.add_argument("--verbose", action="store_true", help="also what the parts log")
    options = parser.parse_args(argv)
    is_one = options.seeds is None and options.fresh is None
    if options.coverage is not None and is_one:
        parser.error("--coverage is of many seeds: --seeds A-B --coverage FILE")
    if options.limit_s != math.inf and is_one:
        parser.error("--limit-s is of many seeds: --seeds A-B --limit-s 600")
    if options.directed is not None and (not is_one or options.scenario is not None):
        parser.error("--directed needs one seed: --seed N --directed NAME")
    if options.report is not None and (options.directed is not None or options.shrink is not None):
        parser.error("--report replays the job of an archive: without --directed and --shrink")
    if options.shrink is not None and not is_one:
        parser.error("--shrink needs one seed: --seed N --shrink FILE")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit status 0 if every promise held, 1 if not, 2 for a scenario file that cannot be read. With
    ``--report``: 0 if the simulation did the same, 1 if not, 2 for an archive that cannot be replayed.

    With ``--coverage`` also `NOT_COVERED` if every promise held and the coverage is not as it should be.
    """
    options = _parse(argv)
    if options.verbose:
        logging.getLogger("fray").setLevel(logging.INFO)
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
    if options.version not in (None, code_version()):
        print(
            f"seed {options.seed} was run by Fray {options.version}, and this is {code_version()}: its scenario differs"
        )
    if options.seeds is not None:
        first, _, last = options.seeds.partition("-")
        return _run_many(range(int(first), int(last or first) + 1), options)
    if options.fresh is not None:
        first, source = first_fresh_seed()
        print(f"seeds {first}-{first + options.fresh - 1}, derived from {source}", flush=True)
        return _run_many(range(first, first + options.fresh), options)
    if options.report is not None:
        return _replay(options.report)
    try:
        if options.shrink is not None:
            return _shrink(options)
        return _run_file(options.scenario) if options.scenario is not None else _run_one(options.seed, options.directed)
    except scenario_files.BadScenarioFile as error:
        print(f"{options.scenario}: {error}", file=sys.stderr)
        return 2


def _run_one(number: int, directed: str | None) -> int:
    return 1 if _print_run(number, _plan_of(number, directed), directed or "").breaches else 0


def _plan_of(number: int, directed: str | None) -> ScenarioPlan:
    return draw_plan(Seed(number).stream("plan")) if directed is None else draw_directed(number, directed)


def _print_run(number: int, plan: ScenarioPlan, directed: str = "") -> ScenarioResult:
    began = time.perf_counter()
    result = run_seed(number, plan=plan)
    print("\n".join(result.lines))
    print(summary(result, directed))
    print(f"{result.virtual_s:.0f} virtual seconds in {time.perf_counter() - began:.2f} s; trace {result.digest}")
    return result


def _replay(path: Path) -> int:
    try:
        code, lines = report_replay.replay(path)
    except report_replay.BadReport as error:
        print(visible_text(f"{path} cannot be replayed: {error}"))
        return 2
    print("\n".join(lines))
    return code


def _run_file(path: Path) -> int:
    recorded = scenario_files.read(path.read_text())
    result = _print_run(recorded.seed, recorded.plan)
    is_seen = recorded.expects in map(shrink.kind_of, result.breaches)
    print(f"the violation of {path} ({recorded.expects}) {'is there' if is_seen else 'is not there any more'}")
    if recorded.version != VERSION:
        print(f"it was written by Fray {recorded.version}, and this is {VERSION}")
    elif recorded.digest != result.digest:
        print("the run differs from the recorded one: Fray or its simulator has changed since")
    return 1 if result.breaches else 0


def _shrink(options: argparse.Namespace) -> int:
    began, path = time.perf_counter(), options.shrink
    runs, progress = 0, Progress(options.progress_s)

    def run(seed: int, plan: ScenarioPlan) -> ScenarioResult:
        nonlocal runs
        progress.show(f"{runs} runs; now {_size(plan)}")
        runs += 1
        return run_seed(seed, plan=plan)

    if options.scenario is not None:
        recorded = scenario_files.read(options.scenario.read_text())
        seed, plan = recorded.seed, recorded.plan
    else:
        seed, plan = options.seed, _plan_of(options.seed, options.directed)
    try:
        found = shrink.shrink(seed, plan, run=run, limit_s=options.shrink_s)
    except shrink.NothingToShrink as error:
        print(error)
        return 0
    _print_run(found.seed, found.plan)
    text = scenario_files.write(found)
    path.write_text(text)
    print(f"\n{text}")
    print(
        f"from {_size(plan)} to {_size(found.plan)}, with {runs} runs in {time.perf_counter() - began:.0f} s\n"
        f"to run it again: python -m tests.simulation --scenario {path}"
    )
    return 1


def _size(plan: ScenarioPlan) -> str:
    return f"{len(plan.acts)} acts, {len(plan.faults)} faults, {len(plan.machines)} machines, {plan.drivers} drivers"


def _run_many(numbers: Sequence[int], options: argparse.Namespace) -> int:
    coverage_path: Path | None = options.coverage
    began, done, broken = time.perf_counter(), 0, 0
    faults, acts, events = Counter[str](), Counter[str](), Counter[str]()
    covered, virtual_s, progress = Counter[str](), 0.0, Progress(options.progress_s)
    for (number, directed), result in _results(_with_directed(numbers), options.jobs, options.limit_s):
        done += not directed
        if isinstance(result, str):
            broken += 1
            print(f"seed {number}{f' of {directed!r}' if directed else ''} FAILED: {result}", flush=True)
        else:
            faults, acts, events = faults + result.faults, acts + result.acts, events + result.events
            covered.update(result.coverage)
            virtual_s += result.virtual_s
            if result.breaches:
                broken += 1
                print(summary(result, directed), flush=True)
        progress.show(f"{done} of {len(numbers)} seeds run, {broken} broken")
    took_s = time.perf_counter() - began
    for what, counter in {"faults": faults, "acts": acts, "events": events}.items():
        print(f"{what}: {counts_text(counter)}")
    is_covered = True
    if coverage_path is not None:
        print("\n".join(coverage.report(covered, coverage_path)))
        is_covered = not coverage.missing(covered) and not coverage.wrongly_exempt(covered)
    pace = f"{done / took_s * 60:.0f} seeds per minute"
    print(f"{done} seeds, {broken} broken, {virtual_s / 3600:.1f} simulated hours, {pace}")
    if done < len(numbers):
        print(f"of {len(numbers)} seeds {len(numbers) - done} were not run: the limit was {options.limit_s:g} s")
    if broken:
        return 1
    return 0 if is_covered else NOT_COVERED


def _with_directed(numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield each seed with its random scenario (an empty name), and now and then also with a directed one."""
    for number in numbers:
        yield number, ""
        if number % DIRECTED_EVERY == 0:
            yield number, list(DIRECTED)[number // DIRECTED_EVERY % len(DIRECTED)]


def _results(
    runs: Iterable[tuple[int, str]], jobs: int, limit_s: float
) -> Iterator[tuple[tuple[int, str], ScenarioResult | str]]:
    ends_at = time.monotonic() + limit_s
    if jobs <= 1:
        yield from map(_attempt, takewhile(lambda _: time.monotonic() < ends_at, runs))
        return
    room, is_over = threading.Semaphore(jobs * QUEUED_PER_JOB), False

    def feed() -> Iterator[tuple[int, str]]:
        # The pool would take all of them at once, and the limit would come too late.
        for run in runs:
            room.acquire()
            if is_over or time.monotonic() >= ends_at:
                return
            yield run

    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        try:
            for result in pool.imap(_attempt, feed()):
                room.release()
                yield result
        finally:
            is_over = True
            room.release()  # the pool ends only when its feeding thread does


def _attempt(run: tuple[int, str]) -> tuple[tuple[int, str], ScenarioResult | str]:
    number, directed = run
    try:
        return run, run_seed(number, plan=draw_directed(number, directed) if directed else None)
    except Exception as error:  # noqa: BLE001  # one seed must not end the others
        return run, repr(error)
    finally:
        # Modules and caches stay: to search them after each run for garbage would take a twentieth of its time.
        gc.collect()
        gc.freeze()
