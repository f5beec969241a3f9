"""Posts to trackers on their way: their limits, and threads that post at once."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Any

import pytest

from fray import rl
from fray.rl.nexrl.experiment_posts import (
    TEXT_LIMIT_CHARACTERS,
    VALUES_LIMIT,
    ExperimentPost,
    FetchedPosts,
    PostQueue,
)
from tests.rl.nexrl.test_nexrl_controller import config


def test_the_oldest_posts_are_dropped_and_counted() -> None:
    first, second = PostQueue(3), PostQueue(2)
    for number in range(5):
        first.post("wandb", {"step": number})
    fetched = first.fetch()
    assert [one.values["step"] for one in fetched.posts] == [2, 3, 4]
    assert (fetched.dropped, bool(first), first.fetch()) == (2, False, FetchedPosts())
    second.add(fetched)
    assert second.fetch() == FetchedPosts(fetched.posts[1:], 3)


class Unprintable:
    """Is neither a number nor a short text."""

    def __str__(self) -> str:
        return "x" * 10_000


def test_a_post_has_numbers_and_short_texts() -> None:
    queue = PostQueue()
    data: dict[Any, Any] = {"half": Fraction(1, 2), "many": 1 << 80, 3: Unprintable(), "none": None, "yes": True}
    queue.post("wandb", {"data": data, "step": 7, "content": "y" * 10_000})
    queue.post("wandb", {"data": {str(number): number for number in range(1_000)}})
    (one, other), values = queue.fetch().posts, {"half": 0.5, "many": float(1 << 80), "none": None, "yes": True}
    assert one.values["data"] == values | {"3": "x" * TEXT_LIMIT_CHARACTERS}
    assert (one.values["step"], one.values["content"]) == (7, "y" * TEXT_LIMIT_CHARACTERS)
    assert len(other.values["data"]) == VALUES_LIMIT


def test_threads_may_post_at_once() -> None:
    queue = PostQueue(100)

    def post() -> None:
        for number in range(1_000):
            queue.post("wandb", {"step": number})

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    found = queue.fetch()
    for thread in threads:
        thread.join()
    rest = queue.fetch()
    assert len(found.posts) + len(rest.posts) + found.dropped + rest.dropped == 4_000
    assert len(rest.posts) <= 100


def test_a_destination_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    controller, got = rl.NexRLController(config({})), list[Any]()

    def sink(**values: Any) -> None:
        got.append(values)
        raise KeyError("reward")

    controller.experiment_logger.sinks["mine"] = sink
    controller._run.on_post(ExperimentPost("mine", {"data": {"length": 1}}))  # type: ignore[misc]
    assert got == [{"data": {"length": 1}}]
    assert "a post to mine failed: KeyError: 'reward'" in caplog.text
