"""Detection of call cycles: calls that come back to an actor which cannot run them, because it waits for them. Pure.

Contract: every call made inside an actor's method carries the links of its chain: which method of which actor made
which call. If all calls in progress of a queue wait, each for a call that leads to one waiting in the same queue, none
of those will ever start, and the newest of them is reported as a cycle. Calls in progress that wait for something else
may end, so nothing is reported then; nor for cycles through several actors that no single chain connects, which are
left to deadlines. Only waits count that are known where they happen: `start` without an await, `wait_any` and
`as_completed` do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Link: TypeAlias = str
"""Actor id, name of the method, and mark of the call it made, separated by `_APART`."""
# The unit separator of ASCII: no id and no method name contains it.
_APART = "\x1f"


def link(actor_id: str, what: str, mark: str) -> Link:
    return f"{actor_id}{_APART}{what}{_APART}{mark}"


def actor_of(link: Link) -> str:
    return link.partition(_APART)[0]


def comes_back(links: Iterable[Link], actor_id: str) -> bool:
    """Return whether the chain contains this actor already."""
    # With the separator, or an id would match every longer one that begins with it.
    start = actor_id + _APART
    return any(link.startswith(start) for link in links)


def marks_of(links: Iterable[Link]) -> frozenset[str]:
    """Return the marks of the calls that a call is part of."""
    return frozenset(link.rpartition(_APART)[2] for link in links)


def is_stuck(waits: Sequence[Iterable[str]], queued: Iterable[frozenset[str]], limit: int) -> bool:
    """Return whether no call of a queue will ever start.

    Args:
        waits: for each call in progress, the marks of the calls it waits for.
        queued: for each call that has not begun, the marks of the calls it is part of.
        limit: number of calls that may be in progress at once.
    """
    led_to = frozenset[str]().union(*queued)
    # A free place means that the next call starts anyway. A call that waits for nothing here may end, so one such call
    # is enough to report nothing.
    return len(waits) >= limit and all(any(mark in led_to for mark in waiting) for waiting in waits)


def describe_cycle(links: Sequence[Link], actor_id: str, what: str) -> list[str]:
    """Return the cycle as method names, from where it last left this actor to the call that comes back."""
    words = [link.split(_APART) for link in links]
    last = max((place for place, word in enumerate(words) if word[0] == actor_id), default=0)
    return [*(word[1] for word in words[last:]), what]
