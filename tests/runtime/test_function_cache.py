"""A function's pickle is made once, and again when anything it carries has changed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from fray.runtime.serialization import pickling
from fray.runtime.serialization.function_cache import FunctionPickleCache
from tests.support import job_functions


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Functions that were really pickled."""
    seen: list[object] = []
    dumps = pickling.dumps

    def watched(obj: Any, what: str = "") -> bytes:
        seen.append(obj)
        return dumps(obj, what)

    monkeypatch.setattr(pickling, "dumps", watched)
    return seen


def adder(k: Any) -> Callable[[int], Any]:
    return lambda n: (n, k, json.dumps(n))


def test_an_unchanged_function_is_pickled_once(made: list[object]) -> None:
    closures, fn = FunctionPickleCache(), adder(3)
    assert closures.dumps(fn, "it") == closures.dumps(fn, "it")
    assert len(made) == 1
    assert pickle.loads(closures.dumps(fn, "it"))(4) == (4, 3, "4")
    assert (
        closures.dumps(job_functions.double, "it")
        == closures.dumps(job_functions.double, "it")
        == pickling.dumps(job_functions.double)
    )


def test_a_variable_that_is_assigned_again_is_seen(made: list[object]) -> None:
    k, closures = 1, FunctionPickleCache()

    def fn(n: int) -> int:
        return n + k

    assert pickle.loads(closures.dumps(fn, "it"))(0) == 1
    k = 2
    assert pickle.loads(closures.dumps(fn, "it"))(0) == 2
    assert len(made) == 2


def test_functions_with_mutable_references_are_pickled_each_time(made: list[object]) -> None:
    basket, closures = [1], FunctionPickleCache()

    def fn() -> list[int]:
        return basket

    assert pickle.loads(closures.dumps(fn, "it"))() == [1]
    basket.append(2)
    assert pickle.loads(closures.dumps(fn, "it"))() == [1, 2]
    holder = adder((1, [2]))
    closures.dumps(holder, "it")
    closures.dumps(holder, "it")
    assert made.count(holder) == 2


def test_a_change_is_seen_through_functions_that_travel_along(made: list[object]) -> None:
    k, closures = 1, FunctionPickleCache()

    def inner() -> int:
        return k

    def fn() -> int:
        return inner()

    assert pickle.loads(closures.dumps(fn, "it"))() == 1
    closures.dumps(fn, "it")
    assert len(made) == 1
    k = 2
    assert pickle.loads(closures.dumps(fn, "it"))() == 2
    fn.__defaults__ = (1,)
    closures.dumps(fn, "it")
    assert len(made) == 3


def test_functions_of_a_module_are_seen_when_they_are_replaced() -> None:
    closures = FunctionPickleCache()
    fn = eval("lambda n: helper(n)", {"helper": job_functions.double})
    assert pickle.loads(closures.dumps(fn, "it"))(2) == 4
    fn.__globals__["helper"] = abs
    assert pickle.loads(closures.dumps(fn, "it"))(-2) == 2
