"""``fray rl run``: a run from its recipe, or what it would start."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import trio

from fray.cli.formatting import fields, table
from fray.cli.output import note, say, say_json
from fray.cli.target import open_target
from fray.errors import InvalidRequest
from fray.model.resources import ResourceConfig
from fray.model.text import byte_size_text

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "omegaconf")
"""Packages of ``fray[rl]`` without which no recipe runs."""


def run(options: argparse.Namespace) -> int:
    """Run ``fray rl run``."""
    check_extra(("omegaconf",) if options.dry else NEEDED)
    from fray.rl.recipe.guide_config import is_guide_config
    from fray.rl.recipe.resolved import resolved_run
    from fray.rl.recipe.run_recipe import run_of, source_env_file
    from fray.rl.recipe.sources import read_settings
    from fray.rl.run_cluster import check_model_of_spec, spec_of_run

    if options.cluster:
        os.environ["FRAY_CLUSTER_SPEC"] = options.cluster
    if options.token_file:
        os.environ["FRAY_TOKEN_FILE"] = options.token_file
    variables = source_env_file(options.recipe)
    settings = read_settings(options.recipe, options.overrides)
    if is_guide_config(settings.values):
        return _run_guide(settings, variables, options)
    run = run_of(settings, env_vars={**(settings.values.get("env_vars") or {}), **variables})
    if options.dry:
        if not options.detach:
            check_model_of_spec(run.parts.model, spec_of_run())
        _print_plan(settings.values, resolved_run(settings, run), processes_of(run.parts), options.json)
        return 0
    if options.detach:
        return trio.run(_detach, run, options)
    result = trio.run(run.main)
    if options.json:
        say_json({"steps": result.steps, "status": result.status})
    elif run.output is not None:
        note(f"run {run.parts.name}: {len(result.steps)} steps; output in {run.parts.url or run.parts.output}")
    return 0


async def _detach(run: Any, options: argparse.Namespace) -> int:
    """Launch a run as a job, or name the job in which it lives."""
    async with open_target(options) as cluster:
        job = await run.submit(cluster)
    if options.json:
        say_json(job.info)
        return 0
    say([job.id])
    name = run.parts.name
    note(f"run {name} is a job of the cluster: fray rl top {name} shows it, fray rl stop {name} ends it")
    return 0


def check_extra(packages: tuple[str, ...]) -> None:
    """Raise InvalidRequest if one of the packages is missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InvalidRequest(f"this needs {', '.join(missing)}: pip install 'fray[rl]'")


def processes_of(parts: Any) -> list[dict[str, Any]]:
    """Return the processes that a run starts: their part, number, what each does, and what each reserves."""
    found: list[dict[str, Any]] = [{"part": "coordinator", "count": 1, "does": "data, groups, versions"}]
    if parts.trainer is not None:
        share = "" if parts.trainer_ranks == 1 else ", a share of each batch"
        does = f"updates {_model_text(parts.model)}{share}{_device_text(parts.trainer_device)}"
        found.append({"part": "trainer", "count": parts.trainer_ranks, "does": does})
        if parts.reference == "server":
            does = f"scores with {_model_text(parts.model)}, for the KL penalty{_device_text(parts.reference_device)}"
            found.append({"part": "reference", "count": 1, "does": does})
    does = f"generates with {_model_text(parts.model)}{_device_text(parts.server_device)}"
    found.append({"part": "server", "count": parts.servers, "does": does})
    workers = parts.episodes.workers
    found.append({"part": "rollout", "count": parts.processes, "does": f"{workers} episodes at once"})
    return [{**one, "reserves": _reserved_text(parts.resources.get(one["part"]))} for one in found]


def _model_text(model: object) -> str:
    return model if isinstance(model, str) else type(model).__name__


def _device_text(device: str) -> str:
    return "" if device == "cpu" else f" on {device}"


def _reserved_text(wanted: ResourceConfig | None) -> str:
    if wanted is None:
        return "nothing"
    device = type(wanted.device).__name__.removesuffix("Config").lower()
    variant, count = getattr(wanted.device, "variant", ""), getattr(wanted.device, "count", 1)
    accelerator = [] if device == "cpu" else [f"{count} {device} {variant}".rstrip()]
    memory = wanted.memory
    amount = [] if memory is None else [f"{memory if isinstance(memory, str) else byte_size_text(memory)} memory"]
    return ", ".join([*accelerator, f"{wanted.cpu:g} CPU{'s' * (wanted.cpu != 1)}", *amount])


def _print_plan(
    given: Mapping[str, Any], recipe: dict[str, Any], processes: list[dict[str, Any]], as_json: bool
) -> None:
    if as_json:
        say_json({"recipe": recipe, "processes": processes})
        return
    rows = [[one["part"], str(one["count"]), one["reserves"], one["does"]] for one in processes]
    say([*fields(list(_flat(recipe, given))), "", *table(["PROCESS", "COUNT", "EACH RESERVES", "DOES"], rows)])


def _flat(recipe: Mapping[str, Any], given: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each setting and its value as YAML, with whether it was given."""
    for key, value in recipe.items():
        # Given as a whole, such as the name of a model, where there is nothing to look into.
        is_given, below = (key in given, given.get(key)) if isinstance(given, Mapping) else (True, None)
        if f"{prefix}{key}" == "env_vars":  # also those of the file beside the recipe
            is_given, below = True, value
        if isinstance(value, dict) and value:
            yield from _flat(value, below if is_given else {}, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{prefix}{key}", text if is_given else f"{text or '(empty)'}  (default)"


def _run_guide(settings: Any, variables: Mapping[str, str], options: argparse.Namespace) -> int:
    """Run a recipe in the words of NexRL's guide, as a program with `NexRLController` does."""
    from fray.rl.nexrl.controller import NexRLController
    from fray.rl.recipe.resolved import resolved_guide

    controller = NexRLController(settings, env_vars=variables)
    if options.dry:
        if not options.detach:
            controller.check_model()
        recipe = resolved_guide(settings, controller.config, controller.parts, variables)
        _print_plan(settings.values, recipe, processes_of(controller.parts), options.json)
        return 0
    if options.detach:
        return trio.run(_detach, controller, options)
    controller.run()
    if options.json and controller.result is not None:
        say_json({"steps": controller.result.steps, "status": controller.result.status})
    return 0
