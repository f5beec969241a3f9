"""Linearizability: does some order of operations, one at a time, explain all outcomes?

An operation takes effect at one moment between its begin and its end; one of unknown outcome at one moment after its
begin, or never. The search keeps every state that the operations until now may have led to, each with the operations
under way that have taken effect in it (Wing and Gong, 1993, in the order of Lowe, 2017).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from bench.histories.records import Kind, Operation, Outcome


class Model(Protocol):
    """An object whose operations are executed one at a time."""

    initial: Hashable

    def step(self, state: Hashable, operation: Operation) -> Sequence[Hashable]:
        """Return the states that the operation, with its outcome, leads to: none if it is impossible."""

    def alike(self, operation: Operation) -> Hashable:
        """Return what operations of unknown outcome have in common that lead from each state to the same."""


class CounterModel:
    """A counter that starts with 0."""

    initial: Hashable = 0

    def step(self, state: Hashable, operation: Operation) -> Sequence[Hashable]:
        assert isinstance(state, int)
        after = state + 1 if operation.kind is Kind.INCREMENT else state
        return [after] if operation.outcome is Outcome.UNKNOWN or operation.value == after else []

    def alike(self, operation: Operation) -> Hashable:
        return operation.kind


class NameModel:
    """A name that one actor has at most; "": it is free. The actor of a claim of unknown outcome has an unknown id."""

    initial: Hashable = ""

    def __init__(self, ids: Iterable[str]) -> None:
        """``ids``: those of the actors whose claims were answered."""
        self._ids = set(ids)

    def step(self, state: Hashable, operation: Operation) -> Sequence[Hashable]:
        is_free = state == ""
        match operation.kind, operation.outcome:
            case Kind.CLAIM, Outcome.UNKNOWN:
                return [holder_of(operation)] if is_free else []
            case Kind.CLAIM, _:
                refused = operation.value == ""
                return [state if refused else operation.value] if is_free is not refused else []
            case Kind.RELEASE, _:
                return [""] if state == operation.value else []
        is_unknown = str(state).startswith(UNKNOWN_HOLDER) and operation.value not in ("", *self._ids)
        return [state] if operation.value == state or is_unknown else []

    def alike(self, operation: Operation) -> Hashable:
        return id(operation)


UNKNOWN_HOLDER = "unknown actor of "


def holder_of(claim: Operation) -> str:
    """Return what stands for the id of the actor of a claim of unknown outcome."""
    return f"{UNKNOWN_HOLDER}{claim.process} at {claim.begin}"


def first_impossible(operations: Iterable[Operation], model: Model) -> tuple[Operation, Operation | None] | None:
    """Return the first operation by whose end no order explains all outcomes, and the one that ended before it.

    Returns:
        None if some order explains everything.
    """
    useless = (Kind.READ, Kind.LOOKUP)
    changes = (one for one in operations if one.outcome is Outcome.UNKNOWN and one.kind not in useless)
    whole = [*(one for one in operations if _is_known(one)), *changes]
    # At equal times begins come first: then more orders are possible.
    events = [(one.begin, 0, at) for at, one in enumerate(whole)]
    events += [(one.end, 1, at) for at, one in enumerate(whole) if one.end is not None and _is_known(one)]
    states: set[tuple[Hashable, frozenset[int]]] = {(model.initial, frozenset())}
    under_way: dict[int, Operation] = {}
    before: Operation | None = None
    for _, is_end, at in sorted(events):
        if not is_end:
            under_way[at] = whole[at]
            continue
        states = _after(states, at, under_way, model)
        if not states:
            return whole[at], before
        before = under_way.pop(at)
        # An operation of unknown outcome that has taken effect in every state is settled.
        for settled in frozenset.intersection(*(done for _, done in states)):
            if settled in under_way and not _is_known(under_way[settled]):
                del under_way[settled]
                states = {(state, done - {settled}) for state, done in states}
    return None


def _is_known(operation: Operation) -> bool:
    return operation.outcome is Outcome.VALUE


def _after(
    states: set[tuple[Hashable, frozenset[int]]], ended: int, under_way: dict[int, Operation], model: Model
) -> set[tuple[Hashable, frozenset[int]]]:
    """Return the states in which an operation has taken effect, which ended now."""
    found, todo, seen = set(), list(states), set(states)
    while todo:
        state, done = todo.pop()
        if ended in done:
            found.add((state, done - {ended}))
            continue
        tried: set[Hashable] = set()
        for at, operation in under_way.items():
            if at in done:
                continue
            if not _is_known(operation):
                # Of those alike the one that began first stands for all: it can take effect wherever they can.
                if model.alike(operation) in tried:
                    continue
                tried.add(model.alike(operation))
            for after in model.step(state, operation):
                if (following := (after, done | {at})) not in seen:
                    seen.add(following)
                    todo.append(following)
    return found
