"""Choice among the engines of one base model: where a model is trained, and where samples are made."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

LOAD_COST = 32
"""Samples under way that count as much as reading weights from the store."""


@frozen
class EngineLoad:
    """Work of an engine.

    Attributes:
        is_up: it answers.
        has_failed: it is not started again.
        models: that it trains.
        samples: that it has under way.
        has_weights: those that are asked for are in its memory.
        is_queued: its work waits for other work.
    """

    is_up: bool = True
    has_failed: bool = False
    models: int = 0
    samples: int = 0
    has_weights: bool = True
    is_queued: bool = False


def engine_for_model(engines: Sequence[EngineLoad]) -> int:
    """Return the engine that trains a new model: of those that have not failed, the one that trains the fewest."""
    return min(range(len(engines)), key=lambda number: (engines[number].has_failed, engines[number].models, number))


def engine_for_samples(engines: Sequence[EngineLoad]) -> int | None:
    """Return the engine that makes samples; None: none is up.

    It is the one with the fewest samples under way, where `LOAD_COST` more are better than reading the weights, or than
    waiting for other work; of equals the one that trains the fewest models.
    """

    def cost(number: int) -> tuple[int, int, int]:
        load = engines[number]
        more = LOAD_COST * ((not load.has_weights) + load.is_queued)
        return load.samples + more, load.models, number

    return min((number for number, load in enumerate(engines) if load.is_up), key=cost, default=None)
