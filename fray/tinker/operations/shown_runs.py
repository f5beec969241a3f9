"""Facts about the Tinker API for operators: engines, models, samplers, checkpoints; what each waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fray.tinker.api_store import TinkerCheckpoint, TinkerModel, TinkerSampler
from fray.tinker.tinker_api.model_run import engine_name
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

IsVisible = Callable[[str], bool]
"""Returns whether the caller may see what a user has."""
NameOf = Callable[[str], str]
"""Returns the name of a user."""


def shown_runs(runs: TinkerRuns, is_visible: IsVisible, name_of: NameOf) -> dict[str, Any]:
    """Return the ``engines``, and the ``models``, ``samplers`` and ``checkpoints`` that a caller may see.

    Models and samplers are those whose sessions have not ended.
    """
    checkpoints = [each for each in runs.checkpoints.values() if is_visible(each.user_id)]
    checkpoints.sort(key=lambda each: each.created_at)
    return {
        "engines": [
            {
                "base_model": engine.base_model,
                "number": engine.number,
                "is_up": engine.is_up,
                "starts": engine.starts,
                "models": len(engine.models),
                "queued": round(engine.queued + engine.samples_queued, 2),
                "starting": "" if engine.is_up or engine.failure else engine.starting,
                "resident": len(engine.info.get("resident", ())),
                "offloaded": len(engine.info.get("offloaded", ())),
                "error": engine.failure,
            }
            for engines in runs.engines.values()
            for engine in engines
        ],
        "engine_groups": [
            {
                "base_model": group.base_model,
                "count": len(group.engines),
                "least": runs.plan.engines.least,
                "most": runs.plan.engines.most,
                "explanation": group.explanation(),
            }
            for group in runs.groups.values()
        ],
        "models": [
            shown_model(runs, each, name_of)
            for each in runs.models.values()
            if each.session_id and is_visible(each.user_id)
        ],
        "samplers": [shown_sampler(runs, each, name_of) for each in runs.samplers.values() if is_visible(each.user_id)],
        "checkpoints": [shown_checkpoint(each, name_of) for each in checkpoints],
    }


def shown_model(runs: TinkerRuns, model: TinkerModel, name_of: NameOf) -> dict[str, Any]:
    """Return facts about a model."""
    run = runs.run_of(model.id)
    return {
        "model_id": model.id,
        "user": name_of(model.user_id),
        "base_model": model.base_model,
        "lora": model.lora,
        "place": _place(runs, model.base_model, engine_name(model.id)),
        "requests": run.ledger.last if run else None,
        "executed": run.executed if run else None,
        "activity": _with_queue(runs, model.base_model, run.activity())
        if run
        else "its session has ended, or it was unloaded",
        "created_at": model.created_at,
    }


def shown_sampler(runs: TinkerRuns, sampler: TinkerSampler, name_of: NameOf) -> dict[str, Any]:
    """Return facts about a sampler."""
    waiting = runs.waiting_of(sampler.id)
    engines = runs.engines.get(sampler.base_model, ())
    activity = f"{waiting} requests for samples wait" if waiting else "waits for its client's next request"
    if waiting and engines and not any(engine.is_up for engine in engines):
        activity += f": {engines[0].starting}"
    elif waiting:
        activity = _with_queue(runs, sampler.base_model, activity)
    return {
        "sampler_id": sampler.id,
        "user": name_of(sampler.user_id),
        "base_model": sampler.base_model,
        "weights": sampler.model_path or sampler.weights,
        "place": "" if sampler.weights is None else _place(runs, sampler.base_model, sampler.weights),
        "waiting": waiting,
        "activity": activity,
    }


def shown_checkpoint(checkpoint: TinkerCheckpoint, name_of: NameOf) -> dict[str, Any]:
    """Return facts about saved weights."""
    return {
        "path": checkpoint.id,
        "user": name_of(checkpoint.user_id),
        "bytes": checkpoint.size,
        "created_at": checkpoint.created_at,
        "expires_at": checkpoint.expires_at,
        "is_public": checkpoint.is_public,
    }


def _with_queue(runs: TinkerRuns, base_model: str, activity: str) -> str:
    """Return what a model or sampler does, with the reason for which its requests may queue."""
    reason = group.explanation() if (group := runs.groups.get(base_model)) else ""
    return f"{activity}; at the engines of {base_model}, {reason}" if reason else activity


def _place(runs: TinkerRuns, base_model: str, name: str) -> str:
    """Return where an adapter is: ``resident``, or ``offloaded`` to disk; empty: no engine has it."""
    engines = runs.engines.get(base_model, ())
    places = ("resident", "offloaded")
    return next((each for each in places if any(name in engine.info.get(each, ()) for engine in engines)), "")
