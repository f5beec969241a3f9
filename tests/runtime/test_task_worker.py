"""The worker of a pool: what it is given ends there once, whatever is asked back, cancelled, or comes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from fray.errors import FrayError
from fray.job import FrayContext, get_default_job_ctx
from fray.runtime.serialization import pickling
from fray.runtime.tasks import worker
from fray.runtime.tasks.task_run import CANCELLED, VALUE
from fray.runtime.tasks.worker import TaskWorker

ANSWER_AT_ONCE = 0
"""An unused number: an exchange that requests a task back is answered without waiting."""
FUNCTION = (1, pickling.dumps(abs, "abs"), "abs")


class HandTurned:
    """Executor that runs one item whenever the test calls it."""

    def __init__(self) -> None:
        self.queue: list[Any] = []

    def submit(self, job: Any) -> None:
        self.queue.append(job)

    def flush(self) -> None: ...

    async def run(self, fn: Callable[[], Any]) -> Any:
        return fn()

    def stop(self) -> None: ...

    def turn(self) -> None:
        if self.queue:
            job = self.queue.pop(0)
            job.run()
            job.done()


class Desk:
    """State of one worker on the pool's side."""

    def __init__(self) -> None:
        self.worker, self.thread = TaskWorker(), HandTurned()
        self.worker._runner = self.thread
        self.held: set[int] = set()

    def exchange(self, give: tuple[int, ...] = (), back: tuple[int, ...] = (), cancel: tuple[int, ...] = ()) -> None:
        self.held.update(give)
        tasks = [(number, 1, pickling.dumps_call("abs", (-number,), {}), False, False, None) for number in give]
        request = (tasks, [FUNCTION] if give else [], (), (*back, ANSWER_AT_ONCE), cancel)
        outcomes, returned, _, _ = trio.run(self.worker.exchange, *request)
        for number in [*(outcome[0] for outcome in outcomes), *returned]:
            self.held.discard(number)
        for number, kind, data in outcomes:
            assert kind == CANCELLED or (kind == VALUE and pickling.loads(data) == number)


def test_a_task_that_was_returned_and_cancelled_may_come_again_before_the_thread_gets_to_it() -> None:
    """The first run, still in the thread's queue, must not take the place of the second."""
    desk = Desk()
    desk.exchange(give=(1, 2))
    desk.exchange(back=(2,))
    desk.exchange(cancel=(2,))
    desk.exchange(give=(2,))
    assert desk.held == {1, 2}
    for _ in range(3):
        desk.thread.turn()
    desk.exchange()
    assert desk.held == set()


NUMBERS = st.integers(1, 2)
TURNS = st.lists(st.tuples(st.sampled_from(("give", "back", "cancel", "turn")), NUMBERS), max_size=30)


@settings(max_examples=300)
@given(TURNS)
def test_after_any_sequence_of_requests_nothing_stays_held(turns: list[tuple[str, int]]) -> None:
    desk = Desk()
    for what, number in turns:
        if what == "turn":
            desk.thread.turn()
            desk.exchange()
        elif what != "give" or number not in desk.held:
            desk.exchange(**{what: (number,)})
    while desk.thread.queue:
        desk.thread.turn()
    desk.exchange()
    assert desk.held == set()


def test_so_many_tasks_of_one_worker_may_wait_and_one_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BLOCKED_LIMIT", 3)
    with FrayContext("local", num_workers=1) as ctx:
        assert ctx.get(ctx.run(deep, 3), timeout=30) == 3
        with pytest.raises(FrayError, match="3 tasks of this worker wait"):
            ctx.get(ctx.run(deep, 4), timeout=30)
        assert ctx.get(ctx.run(deep, 3), timeout=30) == 3


def deep(n: int) -> int:
    ctx = get_default_job_ctx()
    return 0 if n == 0 else 1 + int(ctx.get(ctx.run(deep, n - 1)))
