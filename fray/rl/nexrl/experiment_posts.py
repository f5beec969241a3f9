"""Metrics and messages that workers and trainers post to the trackers of their run, on their way to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from attrs import field, frozen

POSTS_LIMIT = 1_000
"""Posts that are kept until they are fetched; the oldest are dropped, and counted."""
VALUES_LIMIT = 200
"""Metrics of one post; further ones are left out."""
TEXT_LIMIT_CHARACTERS = 2_000
"""Length of names and texts; what is longer is cut off."""


@frozen
class ExperimentPost:
    """Arguments of one `ActivityTracker.experiment_logger_post`: its backend, and what that takes."""

    backend: str
    values: dict[str, Any]


@frozen
class FetchedPosts:
    """Posts in the order in which they were made, and the number of older ones that were dropped."""

    posts: tuple[ExperimentPost, ...] = ()
    dropped: int = 0


NO_POSTS = FetchedPosts()


@frozen(eq=False)
class PostQueue:
    """Posts that wait to be fetched. It never waits, has a limit, and may be used by several threads.

    Args:
        limit: posts that are kept.
    """

    limit: int = POSTS_LIMIT
    _posts: deque[ExperimentPost] = field(factory=deque, init=False)
    _counts: dict[str, int] = field(factory=lambda: {"dropped": 0}, init=False)
    _lock: Any = field(factory=threading.Lock, init=False)

    def __bool__(self) -> bool:
        return bool(self._posts)

    def post(self, backend: str, values: Mapping[str, Any]) -> None:
        """Add a post: its numbers and texts, cut to their limits; anything else becomes text."""
        self.add(FetchedPosts((ExperimentPost(str(backend), _limited(values)),)))

    def add(self, found: FetchedPosts) -> None:
        """Add posts that were fetched from another queue."""
        with self._lock:
            self._posts.extend(found.posts)
            self._counts["dropped"] += found.dropped
            while len(self._posts) > self.limit:
                self._posts.popleft()
                self._counts["dropped"] += 1

    def fetch(self) -> FetchedPosts:
        """Return what is there, and forget it."""
        with self._lock:
            found = FetchedPosts(tuple(self._posts), self._counts["dropped"])
            self._posts.clear()
            self._counts["dropped"] = 0
        return found


@frozen
class EpisodePosts:
    """Posts of one episode, and the number of updates that its model had when the episode began."""

    queue: PostQueue
    step: int


episode_posts: ContextVar[EpisodePosts | None] = ContextVar("episode_posts", default=None)
"""Posts of the episode that runs; None outside of runs."""


def _limited(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_text(key): _value(value) for key, value in _first(values.items())}


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_text(key): _plain(each) for key, each in _first(value.items())}
    return _plain(value)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    if isinstance(value, str):
        return _text(value)
    try:
        # Numbers of NumPy and torch.
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return _text(value)


def _text(value: Any) -> str:
    return str(value)[:TEXT_LIMIT_CHARACTERS]


def _first(items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return list(items)[:VALUES_LIMIT]
