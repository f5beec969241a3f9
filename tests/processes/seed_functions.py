"""The free names of the code blocks of Fray-Zero: what its author left to the reader."""

from __future__ import annotations

import threading
import time
from typing import Any

from fray import blocking

MODULE = "seed_000"
"""Module that the blocks claim to be: it does not exist, so their functions are pickled by value."""


def run_block(source: str, **names: Any) -> dict[str, Any]:
    """Run a block as its author would have run it; return its names afterwards."""
    found = {name: getattr(blocking, name) for name in blocking.__all__} | names | {"__name__": MODULE}
    exec(compile(source, MODULE, "exec"), found)
    return found


def run_program(source: str, names: dict[str, Any]) -> None:
    """A block that is a whole program, as a job."""
    run_block(source, **names)


def load_model() -> Any:
    return lambda x: x * x


def process_shard(shard: range) -> int:
    return sum(shard)


class InferenceModel:
    """One of several: it says which, and one of them may be broken."""

    def __init__(self, number: int = 0, broken: int | None = None) -> None:
        self.number, self.broken = number, broken

    def predict(self, batch: list[int]) -> tuple[int, list[int]]:
        if self.number == self.broken:
            raise ValueError(f"model {self.number} is broken")
        return self.number, [2 * x for x in batch]


class MyActor:
    def process(self, data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Marks what it was given, and says on which thread."""
        data["seen"] = True
        return threading.current_thread().name, data


def process_there(data: dict[str, Any]) -> Any:
    """Call it from another job."""
    pool = blocking.ClusterResolver(blocking.current_cluster()).lookup("my_actor")
    return pool.call().process(data)[1]


class Reader:
    def kinds(self, futures: list[blocking.ActorFuture[Any]]) -> list[str]:
        return [type(future.result(10)).__name__ for future in futures]


# RL ------------------------------------------------------------------------------------------------------------------


class CurriculumActor:
    """Lessons in order; what came of each."""

    def __init__(self) -> None:
        self.lessons = 0
        self.results: list[Any] = []

    def get_lesson(self) -> int:
        self.lessons += 1
        return self.lessons

    get_next_task = get_lesson

    def report_result(self, result: Any) -> None:
        self.results.append(result)

    def all_results(self) -> list[Any]:
        return self.results


class WeightStore:
    def get_weights(self) -> list[float]:
        return [0.5, 2.0]


def serve_curriculum() -> None:
    server = blocking.ActorServer(blocking.current_cluster())
    server.register("curriculum", CurriculumActor())
    server.serve()


def take_lessons(who: str, lessons: int) -> list[int]:
    """Work of the controller's workers, as its comment describes it."""
    cluster = blocking.current_cluster()
    resolver = blocking.ClusterResolver(cluster)
    curriculum = resolver.lookup("curriculum")
    taken = [curriculum.call().get_lesson() for _ in range(lessons)]
    curriculum.call().report_result((who, taken))
    return taken


# Multi-slice ---------------------------------------------------------------------------------------------------------


class Enough(Exception):
    """Ends a loop that its author wrote without an end."""


TRAINING = """
from tests.processes.seed_functions import Enough

step = 0

def train_step():
    global step
    step += 1
    if step == 5:
        raise Enough(step)
"""
"""Free names of a slice: it trains five steps."""


class Barrier:
    """Lets a step begin when all slices have reached it."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.reached: dict[int, set[int]] = {}
        self.passed: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def wait_for(self, slice_id: int, step: int) -> None:
        with self._changed:
            reached = self.reached.setdefault(step, set())
            reached.add(slice_id)
            self._changed.notify_all()
            whole = self._changed.wait_for(lambda: len(reached) >= self.slices, timeout=20)
            assert whole, f"step {step} was reached by {reached} alone"
            self.passed.append((step, len(reached)))


class Model:
    """Worker of the leader: learns from its batches; the sum of its weights shows how much."""

    def __init__(self, weights: list[float], peers: list[int]) -> None:
        self.weights, self.peers = weights, peers

    def step(self, batch: int) -> None:
        self.weights = [weight + batch for weight in self.weights]


def wait_until(true: Any, within_s: float = 20.0) -> None:
    """Look again and again: for what other processes do."""
    give_up_at = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < give_up_at, "it has not come"
        time.sleep(0.01)
