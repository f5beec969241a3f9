"""The policy of a pool, compared with a model that only records where each task is."""

from __future__ import annotations

from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from fray.runtime.tasks.policy import (
    AHEAD_BYTES,
    DEPTH_LIMIT,
    FIRST_DEPTH,
    Assign,
    Steal,
    TaskAssignment,
)

WORKERS = ("a", "b", "c")


@define(eq=False)
class Piece:
    number: int
    size: int = 1
    retries_left: int = 3
    excluded: frozenset[str] = frozenset()
    runs_alone: bool = False
    cancelled: bool = False


class Twin:
    """Obeys the orders of a board and remembers the place of every task: waiting, a worker, or its end."""

    def __init__(self) -> None:
        self.board: TaskAssignment[Piece] = TaskAssignment()
        self.place: dict[int, str] = {}
        self.pieces: dict[int, Piece] = {}
        self.charges: dict[int, int] = {}
        self.allowed: dict[int, int] = {}
        self.asked: dict[str, tuple[int, ...]] = {}
        self.gone: set[str] = set()
        for worker in WORKERS:
            self.board.expect_worker(worker)

    def held(self, worker: str) -> list[int]:
        return [number for number, place in self.place.items() if place == worker]

    def deal(self) -> None:
        for order in self.board.assign():
            if isinstance(order, Steal):
                assert order.worker not in self.asked
                assert set(order.numbers) <= set(self.held(order.worker))
                self.asked[order.worker] = order.numbers
            elif isinstance(order, Assign):
                self._give(order)
        self.check()

    def _give(self, order: Assign[Piece]) -> None:
        there = set(self.board.workers)
        for task in order.tasks:
            assert self.place[task.number] == "waiting"
            assert not task.cancelled
            assert order.worker not in task.excluded or there <= task.excluded
            self.place[task.number] = order.worker

    def check(self) -> None:
        board = self.board
        waiting = {*board.waiting, *board.singles}
        assert waiting == {number for number, place in self.place.items() if place == "waiting"}
        for worker, hand in board.workers.items():
            assert sorted(hand.assigned) == sorted(self.held(worker))
            assert hand.size == sum(task.size for task in hand.assigned.values())
            assert len(hand.assigned) <= DEPTH_LIMIT
            assert len(hand.assigned) == 1 or not any(task.runs_alone for task in hand.assigned.values())
            assert len(hand.assigned) < 2 or hand.size - max(t.size for t in hand.assigned.values()) < AHEAD_BYTES
            if not hand.assigned:  # no worker is idle that could work
                assert not board.waiting
                assert not any(board.may_run(worker, task) for task in board.singles.values())
        idle = [hand for hand in board.workers.values() if not hand.assigned]
        full = [worker for worker, hand in board.workers.items() if hand.spare]
        assert len(self.asked) >= min(len(idle), len(full) + len(self.asked))

    # What happens ----------------------------------------------------------------------------------------------------

    def add(self, size: int, retries: int) -> None:
        number = len(self.place) + 1
        self.pieces[number] = piece = Piece(number, size, retries)
        self.place[number], self.charges[number], self.allowed[number] = "waiting", 0, retries
        self.board.add(piece)

    def up(self, worker: str) -> None:
        if worker not in self.board.workers and worker not in self.gone:
            self.board.worker_up(worker)

    def down(self, worker: str, unsent: int, forever: bool) -> None:
        """Kill it; the last ``unsent`` of its tasks never reached it."""
        lost = self.board.worker_down(worker)
        self.asked.pop(worker, None)
        for task in lost:
            self.place[task.number] = "waiting"
        if forever and len(self.gone) < len(WORKERS) - 1:
            self.gone.add(worker)
            self.board.worker_gone(worker)
        split = max(0, len(lost) - unsent)
        self.board.requeue(lost[split:])
        for task in lost[:split]:
            self.charges[task.number] += 1
        for task in self.board.retry(worker, lost[:split]):
            assert self.charges[task.number] > self.allowed[task.number]
            self.place[task.number] = "failed"
        self.sweep()

    def sweep(self) -> None:
        """Return the cancelled tasks that came back."""
        void, self.board.returned_cancelled = self.board.returned_cancelled, []
        for task in void:
            assert task.cancelled
            assert self.place[task.number] == "waiting"
            self.place[task.number] = "dropped"

    def end(self, worker: str, pace_s: float) -> None:
        """The first it has is done."""
        for number in self.held(worker)[:1]:
            assert self.board.ended(worker, number) is self.pieces[number]
            assert self.board.ended(worker, number) is None, "an outcome counts once"
            self.place[number] = "done"
            self.board.record_pace(worker, 1, pace_s)

    def answer(self, worker: str) -> None:
        """Return the requested tasks that it has not begun."""
        if worker in self.asked:
            begun = self.held(worker)[:1]
            back = [n for n in self.asked.pop(worker) if self.place[n] == worker and n not in begun]
            self.board.returned(worker, back)
            for number in back:
                self.place[number] = "waiting"
            self.sweep()

    def drop(self, number: int) -> None:
        """Cancel it; a worker that has it does not learn of that before something else happens."""
        if self.place.get(number) == "waiting":
            assert self.board.drop(number)
            self.place[number] = "dropped"
        else:
            assert not self.board.drop(number)
            if number in self.pieces:
                self.pieces[number].cancelled = True

    def finish(self) -> None:
        """Workers come and work; in the end every task has one end."""
        for worker in WORKERS:
            self.up(worker)
        for _ in range(10_000):
            self.deal()
            for worker in self.board.workers:
                self.end(worker, 0.001)
                self.answer(worker)
            if not any(place in (*WORKERS, "waiting") for place in self.place.values()):
                return
        raise AssertionError(f"tasks are stuck: {self.place}")


worker = st.sampled_from(WORKERS)
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([1, AHEAD_BYTES]), st.integers(0, 3)),
    st.tuples(st.just("add"), st.just(1), st.just(3)),
    st.tuples(st.just("up"), worker),
    st.tuples(st.just("down"), worker, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("end"), worker, st.sampled_from([1e-6, 1e-3, 10.0])),
    st.tuples(st.just("answer"), worker),
    st.tuples(st.just("drop"), st.integers(1, 30)),
)


@given(st.lists(EVENTS, max_size=120))
def test_every_task_is_in_one_place_and_has_one_end(events: list[tuple[object, ...]]) -> None:
    twin = Twin()
    for name, *arguments in events:
        getattr(twin, str(name))(*arguments)
        twin.deal()
    twin.finish()
    assert set(twin.place.values()) <= {"done", "dropped", "failed"}


def board_of(tasks: int, *workers: str, **more: int) -> TaskAssignment[Piece]:
    board: TaskAssignment[Piece] = TaskAssignment()
    for worker in WORKERS:
        board.expect_worker(worker)
    for number in range(1, tasks + 1):
        board.add(Piece(number, **more))
    for worker in workers:
        board.worker_up(worker)
    return board


def given_of(orders: list[object]) -> dict[str, list[int]]:
    return {order.worker: [task.number for task in order.tasks] for order in orders if isinstance(order, Assign)}


def test_tasks_are_shared_out_evenly() -> None:
    assert given_of(board_of(3, "a", "b", "c").assign()) == {"a": [1], "b": [2], "c": [3]}
    assert given_of(board_of(30, "a", "b").assign()) == {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}


def test_quick_tasks_travel_in_large_batches_and_slow_ones_in_pairs() -> None:
    for pace_s, depth in ((1e-6, DEPTH_LIMIT), (0.001, 20), (5.0, 2)):
        board = board_of(10_000, "a")
        (first,) = given_of(board.assign()).values()
        assert len(first) == FIRST_DEPTH
        for number in first:
            board.ended("a", number)
        board.record_pace("a", len(first), pace_s * len(first))
        (second,) = given_of(board.assign()).values()
        assert len(second) == depth


def test_an_idle_worker_takes_over_what_is_behind_a_long_task() -> None:
    board = board_of(8, "a", "b")
    orders = board.assign()
    while not any(isinstance(order, Steal) for order in orders):
        for number in list(board.workers["b"].assigned):
            board.ended("b", number)
        orders = board.assign()
    assert orders == [Steal("a", (3, 4))]
    assert board.assign() == [], "it is asked once"
    board.returned("a", [3, 4])
    assert given_of(board.assign()) == {"b": [3, 4]}
    board.add(Piece(9))
    assert given_of(board.assign()) == {"b": [9]}, "nothing goes behind a long task"


def test_a_task_whose_worker_died_goes_alone_to_another() -> None:
    board = board_of(2, "a")
    board.assign()
    assert board.retry("a", board.worker_down("a")) == []
    board.worker_up("b")
    board.worker_up("a")
    assert given_of(board.assign()) == {"b": [1]}
    assert board.assign() == [], "not to that worker again"
    board.ended("b", 1)
    assert given_of(board.assign()) == {"b": [2]}


def test_the_only_worker_gets_back_the_tasks_it_died_with() -> None:
    """Workers that are expected may take days to come, if their machines are full."""
    board = board_of(1, "a")
    board.assign()
    board.retry("a", board.worker_down("a"))
    assert board.assign() == []
    board.worker_up("a")
    assert given_of(board.assign()) == {"a": [1]}


def test_a_cancelled_task_that_comes_back_is_not_assigned_again() -> None:
    board = board_of(4, "a")
    board.assign()
    for task in board.workers["a"].assigned.values():
        task.cancelled = True
    board.returned("a", [4])
    lost = board.worker_down("a")
    board.requeue(lost[2:])
    assert board.retry("a", lost[:2]) == []
    board.worker_up("b")
    assert (board.assign(), len(board)) == ([], 0)
    assert sorted(task.number for task in board.returned_cancelled) == [1, 2, 3, 4]


def test_a_task_that_may_not_be_repeated_is_not_charged_for_others() -> None:
    board = board_of(3, "a", retries_left=0)
    assert given_of(board.assign()) == {"a": [1]}
    assert [task.number for task in board.retry("a", board.worker_down("a"))] == [1]
    assert len(board) == 2


def test_arguments_assigned_ahead_are_bounded_in_bytes() -> None:
    board = board_of(4, "a", size=AHEAD_BYTES)
    assert given_of(board.assign()) == {"a": [1]}


def test_a_task_that_waits_for_others_makes_room_and_is_lost_with_its_worker_like_any_other() -> None:
    board: TaskAssignment[Piece] = TaskAssignment()
    board.expect_worker("a")
    board.worker_up("a")
    for number in range(FIRST_DEPTH + 3):
        board.add(Piece(number))
    (given,) = board.assign()
    assert isinstance(given, Assign)
    assert [task.number for task in given.tasks] == list(range(FIRST_DEPTH))
    assert board.assign() == []  # it has enough
    for task in given.tasks[:3]:
        board.mark_blocked("a", task.number)
    board.mark_blocked("a", 99)
    board.mark_blocked("b", 0)
    assert (board.workers["a"].held, len(board.workers["a"].assigned)) == (FIRST_DEPTH, FIRST_DEPTH - 3)
    (more,) = board.assign()
    assert isinstance(more, Assign)
    assert len(more.tasks) == 3
    assert board.ended("a", 0) is given.tasks[0]
    assert board.ended("a", 0) is None
    assert {task.number for task in board.worker_down("a")} == set(range(1, FIRST_DEPTH + 3))
