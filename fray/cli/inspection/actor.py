"""``fray actor``: calls of methods of actors, and stacks of their processes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fray.api.actors.handle import ActorHandle
from fray.api.cluster import Cluster
from fray.cli.jobs import show_stacks
from fray.cli.output import say_json
from fray.cli.target import NAMED_LIMIT, namespace_of
from fray.errors import InvalidRequest, NoSuchActor
from fray.model.actors import ActorInfo
from fray.model.ids import split_actor_id
from fray.runtime.runtime import current
from fray.runtime.serialization import pickling


async def call(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray actor call``."""
    arguments = [_parsed(text, "argument") for text in options.arguments]
    keywords = _parsed(options.keywords, "--keywords")
    if not isinstance(keywords, dict):
        raise InvalidRequest("--keywords is not a JSON object: write '{\"name\": value}'")
    info = await find_actor(cluster, options)
    method = getattr(ActorHandle(info.actor_id, info.name, None, current()), options.method)
    # The code of others must not run here, with the key of the person who calls.
    with pickling.plain_values_only():
        result = await method.options(timeout_s=options.timeout)(*arguments, **keywords)
    try:
        say_json(result)
    except TypeError as error:
        raise InvalidRequest(f"the result cannot be written as JSON: {error}") from None
    return 0


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{what} {text!r} is not JSON ({error}); a string is written '\"text\"'") from None


async def stack(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray actor stack``."""
    info = await find_actor(cluster, options)
    if info.served:
        raise InvalidRequest(f"actor {info.actor_id} is served by a driver, whose stacks the cluster cannot capture")
    host, _ = split_actor_id(info.actor_id)
    return show_stacks(await cluster.stacks(host), options)


async def find_actor(cluster: Cluster, options: argparse.Namespace) -> ActorInfo:
    """Return the living actor of this id, else of exactly this name.

    Raises:
        NoSuchActor: none.
        InvalidRequest: several.
    """
    text = options.actor
    found = await cluster.list_actors("", namespace_of(options))
    fitting = [info for info in found if info.actor_id == text] or [info for info in found if info.name == text]
    if len(fitting) > 1:
        shown = "\n".join(f"  {info.actor_id}  (namespace {info.namespace})" for info in fitting[:NAMED_LIMIT])
        raise InvalidRequest(f"{text!r} is the name of {len(fitting)} living actors: write an id\n{shown}")
    if not fitting:
        raise NoSuchActor(f"no living actor with the id or name {text!r}; `fray actor ls` lists all")
    return fitting[0]
