"""One seed is one scenario, to the last byte on the wire: twice in a process, and in processes with other hash
seeds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import trio

from fray.testing.seed import Seed, Trace
from tests.simulation.run import run_seed
from tests.simulation.scenario_plans import draw_plan

ON_DISK = 2


def test_one_of_the_repeated_scenarios_has_its_controller_on_a_disk() -> None:
    assert draw_plan(Seed(ON_DISK).stream("plan")).on_disk


@pytest.fixture
def another_loop() -> Iterator[None]:
    """A Trio loop on another thread, such as an open cluster of `fray.blocking` has: two tasks that never rest."""
    stop = threading.Event()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spin)
            nursery.start_soon(spin)

    async def spin() -> None:
        while not stop.is_set():  # noqa: ASYNC110 - turning the loop is what this is for
            await trio.sleep(0.001)

    thread = threading.Thread(target=trio.run, args=(run,))
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("another_loop")
@pytest.mark.parametrize("seed", [3, ON_DISK])
def test_the_same_seed_gives_the_same_scenario_twice(seed: int) -> None:
    first, second = Trace(keep=True), Trace(keep=True)
    run_seed(seed, trace=first)
    run_seed(seed, trace=second)
    assert first.kept is not None
    assert second.kept is not None
    for number, (one, other) in enumerate(zip(first.kept, second.kept, strict=False)):
        assert one == other, f"entry {number} differs"
    assert first.digest == second.digest


@pytest.mark.parametrize("seed", [5])
def test_the_same_seed_gives_the_same_scenario_under_another_hash_seed(seed: int) -> None:
    digests = {run_seed(seed).digest, *(_digest_elsewhere(seed, hash_seed) for hash_seed in ("1", "2"))}
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
