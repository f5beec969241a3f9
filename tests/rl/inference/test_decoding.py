"""Work of a server between two decoding steps: updates, pauses and requests in each of their modes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fray.rl.core.versions import VersionName
from fray.rl.inference.decoding import Decoder, WeightUpdate, checked_mode
from fray.rl.inference.requests import Completion
from tests.support.counting_engine import CountingEngine, OtherTable, request

V0, V1, V2 = VersionName(0, 0), VersionName(0, 1), VersionName(0, 2)


class Bench:
    """A decoder, and what it has answered."""

    def __init__(self, **options: Any) -> None:
        self.engine = CountingEngine(**options)
        ticks = itertools.count()
        self.decoder = Decoder(self.engine, lambda: float(next(ticks)))
        self.answers: dict[str, list[Completion]] = {}
        self.refused: dict[str, str] = {}
        self.done: list[str | None] = []

    def add(self, *names: str, **sampling: Any) -> None:
        for name in names:
            self.decoder.add(request(name, **sampling), False)

    def steps(self, count: int = 100) -> None:
        for _ in range(count):
            if not self.decoder.can_step:
                break
            self.decoder.step()
        outcome = self.decoder.take_outcome()
        if outcome is not None:
            for name, completion in outcome.events:  # type: ignore[misc]
                self.answers.setdefault(name, []).append(completion)
            self.refused.update({name: str(error) for name, error in outcome.refused})

    def update(self, version: VersionName, mode: Any, table: object = None) -> None:
        self.decoder.update(WeightUpdate(version, table, bytes([version.number]), mode), self.note)

    def note(self, refusal: ValueError | None = None) -> None:
        self.done.append(None if refusal is None else str(refusal))

    def segments(self, name: str) -> list[Any]:
        return [each.segments for each in self.answers[name]]


def test_keep_loads_at_once_and_requests_in_flight_continue_with_the_new_weights() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(2)
    bench.update(V1, "keep")
    assert bench.done == [None]
    bench.steps()
    assert bench.segments("a") == [[(V0, 2), (V1, 3)]]
    assert bench.answers["a"][0].token_ids == [3, 4, 6, 7, 13]  # counted from one more since the update


def test_wait_loads_when_requests_in_flight_have_finished_and_new_ones_wait_for_it() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(2)
    bench.update(V1, "wait")
    bench.add("b")
    assert (bench.done, list(bench.decoder.waiting)) == ([], ["b"])
    bench.steps(3)
    assert (bench.done, list(bench.decoder.waiting)) == ([None], [])
    bench.steps()
    assert (bench.segments("a"), bench.segments("b")) == ([[(V0, 5)]], [[(V1, 5)]])


def test_abort_ends_requests_with_what_they_have_and_then_loads() -> None:
    bench = Bench()
    bench.add("a", n=2)
    bench.steps(2)
    bench.update(V1, "abort")
    assert bench.done == [None]
    bench.steps()
    assert [(each.finish_reason, each.segments) for each in bench.answers["a"]] == [("abort", [(V0, 2)])] * 2
    bench.add("b")
    bench.steps()
    assert bench.segments("b") == [[(V1, 5)]]


def test_an_update_that_is_refused_aborts_nothing() -> None:
    bench = Bench()
    bench.update(V2, "keep")
    bench.add("a")
    bench.steps(1)
    bench.update(V1, "abort")
    bench.update(VersionName(1, 3), "keep", OtherTable())
    assert bench.done == [None, "version 0.1 is older than 0.2, which the server has", "it lacks embed.weight"]
    bench.steps()
    assert bench.segments("a") == [[(V2, 5)]]


def test_a_version_of_a_later_incarnation_is_newer_whatever_its_number() -> None:
    bench = Bench()
    bench.update(V2, "keep")
    bench.update(VersionName(1, 1), "keep")
    bench.update(V2, "keep")
    assert bench.done == [None, None, "version 0.2 is older than 1.1, which the server has"]


def test_the_version_that_the_server_has_is_not_loaded_again() -> None:
    bench = Bench()
    bench.update(V1, "keep")
    bench.decoder.update(WeightUpdate(V1, None, bytes([77]), "keep"), bench.note)
    assert (bench.done, bench.engine.offset) == ([None, None], 1)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_paused_server_decodes_nothing_and_loads(mode: Any) -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(2)
    bench.decoder.pause(mode, bench.note)
    bench.add("b")
    assert (bench.done, bench.decoder.is_paused, bench.decoder.can_step) == ([None], True, False)
    bench.update(V1, "keep")
    bench.decoder.resume()
    bench.steps()
    assert bench.segments("b") == [[(V1, 5)]]
    assert bench.segments("a") == ([[(V0, 2), (V1, 3)]] if mode == "keep" else [[(V0, 2)]])


def test_a_pause_that_waits_is_there_when_requests_in_flight_have_finished() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(1)
    bench.decoder.pause("wait", bench.note)
    bench.add("b")
    assert not bench.done
    bench.steps()
    assert (bench.done, bench.decoder.is_paused, list(bench.decoder.waiting)) == ([None], True, ["b"])
    bench.decoder.resume()
    bench.steps()
    assert list(bench.answers) == ["a", "b"]


def test_an_update_that_would_wait_for_a_paused_server_is_refused() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(1)
    bench.decoder.pause("keep", bench.note)
    bench.update(V1, "wait")
    assert bench.done[1] == (
        "version 0.1 cannot wait for the requests in flight (1): the server is paused. Resume it first, or load with "
        'mode "keep" or "abort"'
    )


def test_the_last_cancelled_request_ends_what_waits_for_it() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(1)
    bench.update(V1, "wait")
    bench.add("b")
    bench.decoder.cancel("a")
    assert (bench.done, bench.engine.cancelled) == ([None], ["a"])
    bench.steps()
    assert list(bench.answers) == ["b"]


def test_a_request_that_waits_is_cancelled_without_the_engine() -> None:
    bench = Bench()
    bench.decoder.pause("keep", bench.note)
    bench.add("a")
    bench.decoder.cancel("a")
    bench.decoder.resume()
    bench.steps()
    assert (bench.engine.added, bench.engine.cancelled, bench.answers) == ([], [], {})


def test_an_update_that_waits_can_be_withdrawn() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps(1)
    bench.update(V1, "wait")
    bench.decoder.pause("wait", bench.note)
    bench.add("b")
    bench.decoder.withdraw(bench.note)
    assert bench.done == [None, None]
    bench.steps()
    assert (bench.segments("b"), bench.decoder.is_paused) == ([[(V0, 5)]], False)


def test_a_request_that_the_engine_refuses_does_not_affect_others() -> None:
    bench = Bench()
    bench.add("long", prompt="1" * 80)
    bench.add("a")
    bench.steps()
    assert bench.refused == {"long": "the prompt has 80 tokens, the model takes 64"}
    assert list(bench.answers) == ["a"]


def test_time_in_steps_is_counted() -> None:
    bench = Bench()
    bench.add("a")
    bench.steps()
    assert (bench.decoder.steps, bench.decoder.busy_s) == (5, 5.0)


def test_an_unknown_mode_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown mode .kept.; did you mean keep\?; keep, wait or abort"):
        checked_mode("kept")
