"""Choice among the engines of a base model: for the training of a model, and for samples."""

from __future__ import annotations

import pytest

from fray.tinker.core.engine_choice import LOAD_COST, EngineLoad, engine_for_model, engine_for_samples

IDLE, FAILED, DOWN = EngineLoad(), EngineLoad(is_up=False, has_failed=True), EngineLoad(is_up=False)


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ([IDLE], 0),
        ([IDLE, IDLE], 0),
        ([EngineLoad(models=2), EngineLoad(models=1), EngineLoad(models=1)], 1),
        ([IDLE, DOWN], 0),
        # It is being started, and has the fewest.
        ([EngineLoad(models=1), DOWN], 1),
        ([FAILED, EngineLoad(models=5)], 1),
    ],
)
def test_a_new_model_is_trained_where_the_fewest_are(engines: list[EngineLoad], chosen: int) -> None:
    assert engine_for_model(engines) == chosen


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ([IDLE], 0),
        ([], None),
        ([DOWN, FAILED], None),
        ([DOWN, EngineLoad(samples=1_000, has_weights=False)], 1),
        ([EngineLoad(samples=2), EngineLoad(samples=1)], 1),
        # One that trains is slower.
        ([EngineLoad(models=1), IDLE], 1),
        ([EngineLoad(models=1), EngineLoad(samples=1)], 0),
        # Weights are read by another engine only if the one that has them has much to do.
        ([EngineLoad(has_weights=False), EngineLoad(samples=LOAD_COST - 1)], 1),
        ([EngineLoad(has_weights=False), EngineLoad(samples=LOAD_COST + 1)], 0),
        ([EngineLoad(has_weights=False), EngineLoad(has_weights=False, samples=1)], 0),
        # One that trains a model without a pause has turns for samples now and then.
        ([EngineLoad(is_queued=True), EngineLoad(samples=LOAD_COST - 1)], 1),
        ([EngineLoad(is_queued=True), EngineLoad(samples=LOAD_COST + 1)], 0),
    ],
)
def test_samples_are_made_where_the_least_is_to_do_and_the_weights_are(
    engines: list[EngineLoad], chosen: int | None
) -> None:
    assert engine_for_samples(engines) == chosen
