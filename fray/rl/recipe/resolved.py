"""Recipes as `fray rl run --dry` prints them: with what was not given, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from attrs import evolve, fields, has

from fray.rl.recipe.guide_config import GuideConfig
from fray.rl.recipe.run_recipe import BY_PROGRAM
from fray.rl.recipe.sources import Settings
from fray.rl.rollout_worker import WorkerEpisode
from fray.rl.run import Run
from fray.rl.run_parts import RunParts
from fray.rl.tokenizers import load_limits
from fray.rl.train.settings import GRPO

HIDDEN = "***"
_SECRET = re.compile(r"key|token|secret|passw|passphrase|pwd|credential|auth|cookie|jwt|bearer|private", re.IGNORECASE)
"""Pattern in names of what may be a secret, among keys that Fray does not know."""
_REFERENCE = re.compile(r"\$\{[\w.]+(:\w+)?\}")
"""Pattern of an interpolation without a text of its own, such as a default."""
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY_OF_URL = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]+")


def resolved_run(settings: Settings, run: Run) -> dict[str, Any]:
    """Return all settings of a run that was made of a recipe in the words of `Run`.

    Args:
        settings: of the recipe, with what they were before interpolations were resolved.
        run: that was made of them.
    """
    parts, plan, given = run.parts, run.parts.plan, settings.given
    values = {one.name: getattr(run, one.name) for one in fields(Run) if one.init and one.name not in BY_PROGRAM}
    values |= {
        "name": parts.name,
        "trainer": None if parts.trainer is None else _resolved_trainer(parts.trainer),
        "samples_per_row": plan.order.repeats,
        "rollout_processes": parts.processes,
        "validation_samples_per_row": None if plan.validation is None else plan.validation.samples,
        "max_length": _max_length(parts),
        "threads": parts.threads,
        "device": _device(parts),
        # As they were written, where the value has no text.
        "rollout": settings.values["rollout"],
        "resources": settings.values.get("resources", {}),
    }
    for name, rows in (("data", parts.rows), ("validation_data", parts.validation_rows)):
        if not isinstance(settings.values.get(name), str | None):
            values[name] = f"{len(rows)} rows"
    secret = {one.name for one in fields(Run) if not one.repr}
    return {name: _shown(value, given.get(name), is_secret=name in secret) for name, value in values.items()}


def resolved_guide(
    settings: Settings, config: GuideConfig, parts: RunParts, env_vars: Mapping[str, str]
) -> dict[str, Any]:
    """Return all settings of a run that was made of a recipe in the words of NexRL's guide.

    Args:
        settings, parts: as for `resolved_run`.
        config: that was made of the settings.
        env_vars: variables of the environment that the run gets beside them.
    """
    shown: dict[str, Any] = _shown(config, settings.given)
    assert parts.trainer is not None
    plan, trainer = parts.plan, _resolved_trainer(parts.trainer)
    shown["data"]["rollout_repeat_n"] = plan.order.repeats
    shown["rollout_worker"]["processes"] = parts.processes
    shown["trainer"]["total_train_steps"] = trainer.steps
    shown["trajectory_pool"] |= {"batch_size": plan.batch_size, "group_size": trainer.group_size}
    shown["service"]["inference_service"]["max_length"] = _max_length(parts)
    for service in shown["service"].values():
        service["model"] = _shown(parts.model, None)
    if isinstance(parts.episodes.rollout, WorkerEpisode):
        _fill(shown["rollout_worker"], parts.episodes.rollout.config)
    for section in (shown["trainer"], shown["algorithm"]):
        _fill(section, {one.name: getattr(trainer, one.name) for one in fields(GRPO)})
    shown |= {"env_vars": _hidden(env_vars, None)} if env_vars else {}
    return {
        name: value for name, value in shown.items() if name in settings.values or name not in ("defaults", "hydra")
    }


def _resolved_trainer(trainer: GRPO) -> GRPO:
    return evolve(trainer, old_logprobs=trainer.ratio_refers_to, critic=trainer.critic_settings)


def _device(parts: RunParts) -> str | None:
    """Return the device of trainer and servers; None: each has its own, which the list of processes shows."""
    devices = {parts.server_device} if parts.trainer is None else {parts.server_device, parts.trainer_device}
    return devices.pop() if len(devices) == 1 else None


def _fill(section: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put values where a section has a key without one."""
    for name in section:
        if section[name] is None and name in values:
            section[name] = _shown(values[name], None)


def _max_length(parts: RunParts) -> int | None:
    limits = load_limits(parts.model, downloads=False)
    return parts.max_length or (None if limits is None else limits.max_length)


def _shown(value: Any, given: Any, *, is_secret: bool = False, is_own: bool = False) -> Any:
    """Return a value as dicts, lists, texts and numbers.

    Args:
        given: the same in the recipe, if it is there, before interpolations were resolved.
        is_secret: whether it may be a secret.
        is_own: whether it is under a key that Fray does not know: a text is shown by reference, if it was given so.
    """
    if is_secret:
        return _hidden(value, given)
    if has(type(value)):
        shown = {
            one.name: _shown(getattr(value, one.name), _below(given, one.name), is_secret=not one.repr)
            for one in fields(type(value))
            if one.init
        }
        return shown | _own(getattr(value, "own", {}), given)
    if isinstance(value, Mapping):
        return _own(value, given)
    if isinstance(value, list | tuple):
        of_items = given if isinstance(given, list) and len(given) == len(value) else [None] * len(value)
        return [_shown(each, of_each, is_own=is_own) for each, of_each in zip(value, of_items, strict=True)]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(given, str) and (callable(value) or (is_own and "${" in given)):
        return given
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    text = str(value.value if isinstance(value, Enum) else value)
    # Without a look for "://": the name of a run may be the end of a URL.
    return _QUERY_OF_URL.sub(rf"\1={HIDDEN}", _USER_OF_URL.sub(HIDDEN, text))


def _own(values: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """Return values of keys that Fray does not know, such as those of a class of the user."""
    return {
        key: _shown(each, _below(given, key), is_secret=_may_be_secret(str(key), each), is_own=True)
        for key, each in values.items()
    }


def _may_be_secret(name: str, value: object) -> bool:
    is_count = isinstance(value, int) and name.endswith("tokens")
    return _SECRET.search(name) is not None and not is_count


def _hidden(value: Any, given: Any) -> Any:
    """Return the names in a value that may be secret, and references; nothing else of it."""
    if isinstance(given, str) and _REFERENCE.fullmatch(given):
        return given
    if isinstance(value, Mapping):
        return {key: _hidden(each, _below(given, key)) for key, each in value.items()}
    return value if value is None or isinstance(value, bool) else HIDDEN


def _below(given: Any, name: object) -> Any:
    return given.get(name) if isinstance(given, Mapping) else None
