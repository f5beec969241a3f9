"""A gang: one leading task, which holds the places of all members, runs them, and fails when the first of them does.

An attempt of the gang is an attempt of its leader, so Ray's single count of retries is that of the whole gang. The
places are placement groups, all or none; to remove one ends whatever runs in it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fray.v2.ray_backend import tpu
from fray.v2.ray_backend.errors import RetryableError, carried, of_user_code
from fray.v2.ray_backend.job_runner import classify_failure, run_job
from fray.v2.ray_backend.process_context import untyped
from fray.v2.ray_backend.resources import bundle
from fray.v2.ray_backend.specs import Member, RayJobSpec


def lead_job(spec: RayJobSpec, registry: Any, work: list[Any]) -> None:
    """Run all members to their ends.

    Raises:
        Again, Carried: the first of them failed, as `run_job` has it; the others were ended.
    """
    held: list[Any] = []

    def hold(bundles: list[dict[str, float]], strategy: str) -> Any:
        selector = spec.options.get("label_selector")
        more = {"bundle_label_selector": [selector] * len(bundles)} if selector else {}
        group = placement_group(bundles, strategy=strategy, **more)
        held.append(group)
        ray.get(registry.holds.remote(spec.job_id, group))
        ray.get(group.ready())
        return group

    if not ray.get(registry.leads.remote(spec.job_id)):
        return
    try:
        ray.get(_members(spec, registry, work, _places(spec, hold)))
    except RayError as error:
        if of_user_code(error):
            raise classify_failure(spec, registry, carried(error)) from None
        raise RetryableError(None, carried(error).text) from None  # a process or a machine was lost
    finally:
        for group in held:
            remove_placement_group(group)


def _places(spec: RayJobSpec, hold: Callable[[list[dict[str, float]], str], Any]) -> Any:
    """The group that has a bundle for each member. On machines of their own, where there are as many."""
    each = bundle(spec.options)
    if spec.slices is None:
        return hold([each] * spec.replicas, "SPREAD")
    heads = hold(tpu.head_bundles(spec.slices), "SPREAD")
    return hold(tpu.vm_bundles(spec.slices, tpu.names_of_slices(heads), each), "PACK")


def _members(spec: RayJobSpec, registry: Any, work: list[Any], places: Any) -> list[Any]:
    host, port = ray.get(_at(ray.remote(_meeting_point), places, 0, {"num_cpus": 0}).remote())
    options = {name: value for name, value in spec.options.items() if name not in ("label_selector", "name")}
    body = ray.remote(max_calls=1)(run_job) if spec.own_process else ray.remote(run_job)
    return [
        _at(body, places, rank, options | {"max_retries": 0}).remote(
            spec, registry, work, Member(rank, _variables(spec, rank, host, port))
        )
        for rank in range(spec.replicas)
    ]


def _at(function: Any, places: Any, index: int, options: dict[str, Any]) -> Any:
    return function.options(scheduling_strategy=PlacementGroupSchedulingStrategy(places, index), **options)


def _meeting_point() -> tuple[str, int]:
    """An address of the first member's machine, and a port that is free there just now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return untyped.util.get_node_ip_address(), int(listener.getsockname()[1])


def _variables(spec: RayJobSpec, rank: int, host: str, port: int) -> dict[str, str]:
    """As the members of a gang have them on a cluster of Fray."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(spec.replicas)}
    fray = {f"FRAY_{name}": value for name, value in own.items()} | {"FRAY_COORDINATOR_ADDRESS": f"{host}:{port}"}
    slices = tpu.variables(spec.slices, rank, host) if spec.slices else {}
    return fray | own | {"MASTER_ADDR": host, "MASTER_PORT": str(port)} | slices
