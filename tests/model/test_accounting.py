"""Hours that attempts held, what of them was done again, and their cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import InvalidRequest
from fray.model.messages.history import AttemptRecord
from fray.model.monitoring.accounting import GIB, KEYS, Cost, Hours, UsageSum, cost, sums

HOUR = 3600.0


def attempt(name: str, began_h: float = 0.0, ended_h: float | None = 1.0, **more: Any) -> AttemptRecord:
    """An attempt of so many hours on 2 CPUs with 4 GiB; ``name`` is its id, such as ``a:0:0``."""
    job = name.split(":")[0]
    made = {
        "job_id": job,
        "name": job,
        "user": "ada",
        "namespace": "ns",
        "band": "batch",
        "node": "n1",
        "machine": "cpu",
        "cpu_milli": 2000,
        "memory_bytes": 4 * GIB,
        "queued_at": began_h * HOUR,
        "placed_at": began_h * HOUR,
        "ended_at": None if ended_h is None else ended_h * HOUR,
        "cause": "" if ended_h is None else "succeeded",
    } | more
    return AttemptRecord(attempt_id=name, **made)


def on_gpus(name: str, count: int = 8, **more: Any) -> AttemptRecord:
    return attempt(
        name, **({"device_kind": "gpu", "device_variant": "h100", "devices": count, "machine": "h100"} | more)
    )


def all_of(*attempts: AttemptRecord, since_h: float = 0.0, until_h: float = 100.0) -> UsageSum:
    (found,) = sums(attempts, "user", since_h * HOUR, until_h * HOUR)
    return found


def test_hours_are_what_was_held_times_the_time_for_which_it_was() -> None:
    found = all_of(on_gpus("a:0:0", ended_h=3.0), attempt("b:0:0", ended_h=1.0))
    assert found.held == Hours(cpu=8.0, memory_gib=16.0, chips={"gpu:h100": 24.0})
    assert (found.key, found.jobs, found.attempts) == ("ada", 2, 2)


def test_only_the_part_within_the_time_counts() -> None:
    assert all_of(attempt("a:0:0", 1.0, 9.0), since_h=2.0, until_h=5.0).held.cpu == 6.0
    assert all_of(attempt("a:0:0", 1.0, None), since_h=2.0, until_h=5.0).held.cpu == 6.0
    assert sums([attempt("a:0:0", 1.0, 2.0)], "user", 3 * HOUR, 4 * HOUR) == []
    assert sums([attempt("a:0:0", 5.0, 6.0)], "user", 3 * HOUR, 4 * HOUR) == []


def test_what_was_followed_by_another_attempt_was_done_again() -> None:
    found = all_of(
        attempt("a:0:0", 0, 1, cause="failure"),
        attempt("a:1:0", 1, 4, cause="preempted"),
        attempt("a:2:0", 4, None),
        attempt("b:0:0", 0, 1, cause="failure"),
    )
    assert found.retried.cpu == 2.0
    assert found.preempted.cpu == 6.0


def test_the_attempt_that_followed_counts_also_when_it_is_later_than_the_time_in_question() -> None:
    found = all_of(attempt("a:0:0", 0, 1, cause="failure"), attempt("a:1:0", 7, None), until_h=2.0)
    assert (found.attempts, found.retried.cpu) == (1, 2.0)


def test_idle_cpus_are_those_of_attempts_whose_use_is_known() -> None:
    found = all_of(attempt("a:0:0", ended_h=2.0, cpu_s=HOUR), attempt("b:0:0", ended_h=5.0))
    assert (found.cpu_known, found.cpu_idle) == (4.0, 3.0)
    # More than it has reserved is not less than nothing.
    assert all_of(attempt("a:0:0", cpu_s=9 * HOUR)).cpu_idle == 0.0


def test_a_gang_has_waited_once() -> None:
    members = [attempt(f"a:0:{number}", 3.0, 4.0, queued_at=HOUR) for number in range(4)]
    assert all_of(*members).wait_h == 2.0


def test_sums_are_made_by_what_is_asked_for_the_largest_first() -> None:
    longer = attempt("b:0:0", ended_h=9.0, user="bob", cause="failure")
    some = [on_gpus("a:0:0"), longer, attempt("c:0:0", ended_h=None)]
    assert [each.key for each in sums(some, "machine", 0.0, HOUR)] == ["h100", "cpu"]
    assert [each.key for each in sums(some, "user", 0.0, 9 * HOUR)] == ["ada", "bob"]
    assert {each.key for each in sums(some, "cause", 0.0, HOUR)} == {"succeeded", "failure", "running"}
    assert [each.name for each in sums(some, "job", 0.0, HOUR)] == ["a", "b", "c"]
    with pytest.raises(InvalidRequest, match="by='color' is not one of user, namespace, machine"):
        sums(some, "color", 0.0, HOUR)


TIMES = st.integers(0, 20)
DRAWN = st.tuples(st.sampled_from("ab"), st.integers(0, 3), TIMES, st.none() | TIMES, st.integers(0, 2))


@given(st.lists(DRAWN, max_size=12), TIMES, TIMES, st.sampled_from(sorted(KEYS)))
def test_sums_over_any_key_and_over_parts_of_a_time_are_the_same(drawn: Any, first: int, second: int, by: str) -> None:
    some = [
        on_gpus(f"{job}:{generation}:{number}", gpus, began_h=began, ended_h=None if ended is None else began + ended)
        for number, (job, generation, began, ended, gpus) in enumerate(drawn)
    ]
    since, until = sorted((first, second))

    def total(since: float, until: float, by: str) -> float:
        return sum(each.held.all_chips for each in sums(some, by, since * HOUR, until * HOUR))

    middle = (since + until) / 2
    whole = total(since, until, "user")
    assert total(since, until, by) == pytest.approx(whole)
    assert total(since, middle, by) + total(middle, until, by) == pytest.approx(whole)
    for each in sums(some, by, since * HOUR, until * HOUR):
        assert each.retried.all_chips + each.preempted.all_chips <= each.held.all_chips + 1e-9


PRICES = {"cpu": 0.5, "memory": 0.25, "gpu": 2.0, "gpu:h100": 3.0}


def test_the_cost_is_that_of_the_prices_and_the_variant_comes_before_the_kind() -> None:
    found = cost(all_of(on_gpus("a:0:0", 2), on_gpus("b:0:0", 1, device_variant="a100")), PRICES)
    assert found == Cost(key="ada", cpu=2.0, memory=2.0, chips=8.0, total=12.0)


def test_the_cost_of_what_was_done_again_is_named() -> None:
    some = (attempt("a:0:0", cause="preempted"), attempt("a:1:0", cause="failure"), attempt("a:2:0"))
    found = cost(all_of(*some), PRICES)
    assert (found.total, found.wasted) == (6.0, 4.0)


def test_what_has_no_price_is_named_and_costs_nothing() -> None:
    found = cost(all_of(on_gpus("a:0:0")), {"cpu": 1.0, "tpu": 5.0})
    assert (found.total, found.unpriced) == (2.0, ("gpu:h100", "memory"))
