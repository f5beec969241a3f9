"""Random scenarios of whole clusters, each decided by one seed.

``python -m tests.simulation --seed 7`` runs one again; ``--seeds 0-299 --jobs 2`` runs many and prints progress.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import trio
import trio.testing
from attrs import evolve

from fray.testing.ground_truth import Violation
from fray.testing.seed import Seed, Trace, steady
from tests.simulation.scenario import GONE_WITHIN_S, ScenarioResult, simulate
from tests.simulation.scenario_plans import ScenarioPlan, draw_plan

PASSES_LIMIT = 200_000
"""Turns of Trio's loop without any time passing, after which it counts as an endless loop."""
PROGRESS_SEEDS = 20


class VirtualTimeStuck(Exception):
    """The loop turns again and again without virtual time passing."""


class _Watchdog(trio.abc.Instrument):
    def __init__(self) -> None:
        self._time = -1.0
        self._passes = 0
        self.scope = trio.CancelScope()
        self.barked = False

    def before_io_wait(self, timeout: float) -> None:
        now = trio.current_time()
        self._passes = self._passes + 1 if now == self._time else 0
        self._time = now
        if self._passes > PASSES_LIMIT:
            self.barked = True
            self.scope.cancel()


class _ErrorLogHandler(logging.Handler):
    """Collector of errors that were only logged: nothing of ours may fail unnoticed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.texts.append(f"{record.name} logged {record.getMessage()!r}: {record.exc_info[1]!r}")


@contextmanager
def _listening() -> Iterator[_ErrorLogHandler]:
    """Collect logged failures; other messages are only printed with ``--verbose``."""
    logger, caught = logging.getLogger("fray"), _ErrorLogHandler()
    before = logger.level, logger.propagate
    if logger.level != logging.INFO:
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    logger.addHandler(caught)
    try:
        yield caught
    finally:
        logger.removeHandler(caught)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def run_seed(
    number: int, *, plan: ScenarioPlan | None = None, trace: Trace | None = None, gone_within_s: float = GONE_WITHIN_S
) -> ScenarioResult:
    """Run the scenario of a seed: the same seed, the same scenario, to the last byte on the wire.

    Args:
        plan: instead of the plan that the seed draws.
        trace: to record what happened (see `Trace`).
        gone_within_s: limit of P1.

    Raises:
        VirtualTimeStuck: virtual time stood still.
    """
    seed, trace = Seed(number), trace or Trace()
    chosen = plan or draw_plan(seed.stream("plan"))
    dog = _Watchdog()
    results: list[ScenarioResult] = []

    async def main() -> None:
        with dog.scope:
            results.append(await simulate(seed, chosen, trace, gone_within_s=gone_within_s))

    with steady(seed), _listening() as caught:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[dog])
    if not results:
        raise VirtualTimeStuck(f"seed {number}: time stood still")
    logged = tuple(Violation("error", results[0].virtual_s, text) for text in dict.fromkeys(caught.texts))
    return evolve(results[0], breaches=(*results[0].breaches, *logged))


# The command line ----------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run the scenario of this seed")
    parser.add_argument("--seeds", metavar="A-B", help="run all of these and count")
    parser.add_argument("--jobs", type=int, default=1, help="processes to use (default: 1)")
    parser.add_argument("--verbose", action="store_true", help="also what the parts log")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit status 0 if every promise held, 1 if not."""
    options = _parse(argv)
    if options.verbose:
        logging.getLogger("fray").setLevel(logging.INFO)
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
    if options.seeds is not None:
        first, _, last = options.seeds.partition("-")
        return _run_many(range(int(first), int(last or first) + 1), options.jobs)
    return _run_one(options.seed if options.seed is not None else 0)


def _run_one(number: int) -> int:
    began = time.perf_counter()
    result = run_seed(number)
    print("\n".join(result.lines))
    print(summary(result))
    print(f"{result.virtual_s:.0f} virtual seconds in {time.perf_counter() - began:.2f} s; trace {result.digest}")
    return 1 if result.breaches else 0


def summary(result: ScenarioResult) -> str:
    """Return counts of what happened, and the breaches."""
    lines = [
        f"seed {result.seed}: {result.operations.total()} operations, {result.faults.total()} faults",
        "operations: " + _counts(result.operations),
        "acts: " + _counts(result.acts),
        "events: " + _counts(result.events),
        "faults: " + _counts(result.faults),
        "errors met: " + _counts(result.outcomes),
        *(f"BROKEN {breach}" for breach in result.breaches),
    ]
    if result.breaches:
        lines.append(f"to run it again: python -m tests.simulation --seed {result.seed}")
    return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counter.items())) or "none"


def _run_many(numbers: Iterable[int], jobs: int) -> int:
    began, done, broken = time.perf_counter(), 0, 0
    faults, acts, events = Counter[str](), Counter[str](), Counter[str]()
    for number, result in _results(numbers, jobs):
        done += 1
        if isinstance(result, str):
            broken += 1
            print(f"seed {number} FAILED: {result}", flush=True)
        else:
            faults, acts, events = faults + result.faults, acts + result.acts, events + result.events
            if result.breaches:
                broken += 1
                print(summary(result), flush=True)
        if done % PROGRESS_SEEDS == 0:
            print(f"{done} seeds run, {broken} broken", file=sys.stderr, flush=True)
    took_s = time.perf_counter() - began
    for what, counter in {"faults": faults, "acts": acts, "events": events}.items():
        print(f"{what}: {_counts(counter)}")
    print(f"{done} seeds, {broken} broken, {done / took_s * 60:.0f} seeds per minute")
    return 1 if broken else 0


def _results(numbers: Iterable[int], jobs: int) -> Iterator[tuple[int, ScenarioResult | str]]:
    if jobs <= 1:
        yield from map(_attempt, numbers)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_attempt, numbers, chunksize=4)


def _attempt(number: int) -> tuple[int, ScenarioResult | str]:
    try:
        return number, run_seed(number)
    except Exception as error:  # noqa: BLE001  # one seed must not end the others
        return number, repr(error)
