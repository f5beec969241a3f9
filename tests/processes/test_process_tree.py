"""Invariant: whichever processes are killed, nothing of them is left behind and no other process is harmed."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import trio

from fray.node.attempts.process_launcher import ProcessLauncher
from tests.processes.process_trees import (
    LIMIT_S,
    READY_S,
    Tree,
    comm,
    kill_if,
    lives,
    open_tree,
    seconds_until_gone,
    wait_end,
)

pytestmark = pytest.mark.timed

SUBSETS = [
    subset for size in range(1, 5) for subset in itertools.combinations(("driver", "node", "zygote", "shim"), size)
]
ALL_THREE = {"node", "zygote", "shim"}
STRIKES_S = 45.0
"""200 take 20 s where nothing else runs; a busy machine does fewer."""


def check(tree: Tree, subset: tuple[str, ...]) -> float:
    """Kill a subset at one instant and check the invariant. Returns the seconds until it held."""
    tree.kill(*subset)
    if set(subset) >= ALL_THREE:
        return check_next_start(tree)
    if {"driver", "node"} & set(subset):
        took_s = seconds_until_gone(tree.below, LIMIT_S)
        wait_end(tree.pid("node"), READY_S)
    elif "shim" in subset:
        took_s = seconds_until_gone(lambda: tree.of_job("storm-a"), LIMIT_S)
        assert lives(tree.pids["jobs"]["storm-b"]), "the neighbour must not notice"
    else:
        took_s = 0.0
        wait_end(tree.pid("zygote"), LIMIT_S)
        assert all(lives(pid) for pid in tree.pids["jobs"].values()), "running jobs continue without a zygote"
    assert lives(tree.pids["unrelated"]), "the driver's own child is its own"
    return took_s


def check_next_start(tree: Tree) -> float:
    """No process is left to sweep: the next node on the state directory does."""
    for pid in (tree.pid("node"), tree.pids["jobs"]["storm-a"]):
        wait_end(pid, LIMIT_S)
    trio.run(start_and_stop, tree.state_dir)
    assert tree.marked() == []
    return 0.0


async def start_and_stop(state_dir: str) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(ProcessLauncher(state_dir, warm=()).run)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_killing_any_of_them_leaves_nothing_of_theirs_and_harms_no_other_process(
    subset: tuple[str, ...], tmp_path: Path
) -> None:
    with open_tree(str(tmp_path / "node")) as tree:
        check(tree, subset)


def test_two_hundred_random_kills_below_a_living_node_leave_nothing_each_time(tmp_path: Path) -> None:
    rng, took_s = random.Random(7), list[float]()
    with open_tree(str(tmp_path / "node")) as tree:
        deadline = time.monotonic() + STRIKES_S
        while len(took_s) < 200 and time.monotonic() < deadline:
            took_s.append(strike(tree, rng))
        assert lives(tree.pid("node"))
        check(tree, ("node",))
    print(f"{len(took_s)} strikes, longest {max(took_s):.3f} s, mean {sum(took_s) / len(took_s):.3f} s")


def strike(tree: Tree, rng: random.Random) -> float:
    """Kill a shim or two and perhaps the zygote at one instant, wherever in their lives they are."""
    while not (shims := tree.shims()):
        assert lives(tree.pid("node"))
    wait_end(min(shims), rng.choice((0.0, 0.02, 0.1)))
    doomed = rng.sample(sorted(shims), rng.randint(1, len(shims)))
    victims = [*doomed]
    if rng.random() < 0.3:
        victims += [pid for pid in tree.marked() if comm(pid) == "fray-zygote"]
    for pid in victims:
        kill_if(pid, lambda pid: comm(pid) in ("fray-shim", "fray-zygote"))
    names = [shims[pid] for pid in doomed]
    return seconds_until_gone(lambda: [pid for name in names for pid in tree.of_job(name)], LIMIT_S)
