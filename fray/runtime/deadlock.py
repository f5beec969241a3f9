"""Calls that come back to an actor which cannot run them, because it waits for them. Pure.

The law. Every call made inside an actor's method carries the links of its chain: which method of which actor made
which call. An actor whose calls under way all wait, each for a call that leads to one waiting in the same queue, will
never start any of those: the newest of them is a cycle. Calls under way that wait for something else may end, so
nothing is said of them; nor of cycles through the queues of several actors that no single chain connects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Link: TypeAlias = str
"""Actor id, what the user calls the method, and the mark of the call it made: apart by `_APART`."""
_APART = "\x1f"


def link(actor_id: str, what: str, mark: str) -> Link:
    return f"{actor_id}{_APART}{what}{_APART}{mark}"


def actor_of(link: Link) -> str:
    return link.partition(_APART)[0]


def comes_back(links: Iterable[Link], actor_id: str) -> bool:
    """The chain has been at this actor before."""
    start = actor_id + _APART
    return any(link.startswith(start) for link in links)


def marks_of(links: Iterable[Link]) -> frozenset[str]:
    """The calls that a call is part of."""
    return frozenset(link.rpartition(_APART)[2] for link in links)


def is_stuck(waits: Sequence[Iterable[str]], queued: Iterable[frozenset[str]], limit: int) -> bool:
    """Whether no call of a queue will ever start.

    ``waits``: for each call under way, the marks of those it waits for. ``queued``: for each that has not begun, the
    marks of those it is part of. ``limit``: how many may be under way.
    """
    led_to = frozenset[str]().union(*queued)
    return len(waits) >= limit and all(any(mark in led_to for mark in waiting) for waiting in waits)


def describe_cycle(links: Sequence[Link], actor_id: str, what: str) -> list[str]:
    """The cycle in the user's words, from where it left this actor last to where it wants to come in again."""
    words = [link.split(_APART) for link in links]
    last = max((place for place, word in enumerate(words) if word[0] == actor_id), default=0)
    return [*(word[1] for word in words[last:]), what]
