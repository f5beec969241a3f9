"""Fuzzers of what strangers and peers send: ``python -m tests.fuzz --target frames --seconds 300 --seed 7``."""

from __future__ import annotations

import argparse
import random
import secrets
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from attrs import define, field

from tests.fuzz.corpus_file import FOLDER, add_example, read_examples
from tests.fuzz.live_controller import fuzz_controller
from tests.fuzz.live_listener import fuzz_listener
from tests.fuzz.targets import TARGETS

POOL_LIMIT = 2000
"""Examples kept as parents."""
LIVE = {"listener": fuzz_listener, "controller": fuzz_controller}
"""Targets that are running programs; they say themselves what broke them."""


@define
class Findings:
    """Result of one run: examples tried, kinds of outcomes, and what was found as a text per example."""

    tried: int = 0
    outcomes: set[str] = field(factory=set)
    broken: dict[bytes, str] = field(factory=dict)


def fuzz(name: str, seconds: float, seed: int, folder: Path = FOLDER) -> Findings:
    """Run the examples of a target, then changed ones, for so long. The first finding of each kind is kept."""
    target, rng, found = TARGETS[name], random.Random(seed), Findings()
    pool = [*target.seeds(), *read_examples(name, folder)]
    waiting = list(pool)
    until = time.monotonic() + seconds
    kinds: set[str] = set()
    while waiting or time.monotonic() < until:
        data = waiting.pop() if waiting else target.change(rng.choice(pool), pool, rng)
        found.tried += 1
        try:
            result = target.run(data)
        except Exception as error:  # noqa: BLE001 - any error but a refusal is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            result = f"{type(error).__name__} in {where.name}, line {where.lineno}"
            if result not in kinds:
                kinds.add(result)
                found.broken[data] = f"{result}: {error}"
        if result not in found.outcomes and len(pool) < POOL_LIMIT:
            found.outcomes.add(result)
            pool.append(data)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run some fuzzers one after the other; exit status 1 if one has found something, which is added to its corpus."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*TARGETS, *LIVE], action="append", help="default: all of them")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    given = parser.parse_args(argv)
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    print(f"seed {seed}")
    broken = 0
    for name in given.target or [*TARGETS, *LIVE]:
        found = Findings()
        if name in TARGETS:
            found = fuzz(name, given.seconds, seed)
        else:
            found.tried, found.broken = LIVE[name](given.seconds, seed)
        print(
            f"{name}: {found.tried:,} examples, {len(found.outcomes)} kinds of outcomes, {len(found.broken)} findings"
        )
        for data, why in found.broken.items():
            broken += 1
            print(f"  {why[:500]}\n  {data[:2000]!r}\n  added to {add_example(name, data, why)}")
    return 1 if broken else 0
