"""One seed is one scenario, to the last byte on the wire: twice in a process, and in processes with other hash seeds.

Each comparison has an interpreter of its own, as `python -m tests.simulation --seed N` has: what thousands of other
tests leave behind in the process of the test runner does not belong to a seed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fray.testing.seed import Seed
from tests.simulation.scenario_plans import draw_plan

ON_DISK = 2


def test_one_of_the_repeated_scenarios_has_its_controller_on_a_disk() -> None:
    assert draw_plan(Seed(ON_DISK).stream("plan")).on_disk


TWICE = """
import sys
from fray.testing.seed import Trace
from tests.simulation.run import run_story

first, second = Trace(keep=True), Trace(keep=True)
run_story(int(sys.argv[1]), trace=first)
run_story(int(sys.argv[1]), trace=second)
for number, (one, other) in enumerate(zip(first.kept, second.kept)):
    assert one == other, f"entry {number} differs:\\n{one}\\n{other}"
assert first.digest == second.digest
"""


@pytest.mark.parametrize("seed", [3, ON_DISK])
def test_the_same_seed_gives_the_same_scenario_twice(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(seed)], capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("seed", [5])
def test_the_same_seed_gives_the_same_scenario_under_another_hash_seed(seed: int) -> None:
    digests = {_digest_elsewhere(seed, hash_seed) for hash_seed in ("0", "1", "2")}
    assert len(digests) == 1


def _digest_elsewhere(seed: int, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip().rpartition(" ")[2]


def test_other_seeds_give_other_scenarios() -> None:
    assert Seed(1).stream("a").random() != Seed(2).stream("a").random()
    assert Seed(1).stream("a").random() != Seed(1).stream("b").random()
    assert Seed(1).stream("a").random() == Seed(1).stream("a").random()
