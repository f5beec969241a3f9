"""Gangs: one leading task reserves the machines of all members, runs them, and fails when the first of them fails.

An attempt of the gang is an attempt of its leader, so Ray's single count of retries is that of the whole gang. The
machines are reserved as placement groups, all or none; to remove a placement group ends what runs in it.
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
from fray.v2.ray_backend.errors import RetryableError, carried, is_user_error
from fray.v2.ray_backend.job_runner import classify_failure, run_job
from fray.v2.ray_backend.process_context import untyped
from fray.v2.ray_backend.resources import bundle
from fray.v2.ray_backend.specs import Member, RayJobSpec


def lead_job(spec: RayJobSpec, registry: Any, work: list[Any]) -> None:
    """Run all members to their ends.

    Raises:
        RetryableError, PickledError: a member failed, see `run_job`; the others were ended.
    """
    groups: list[Any] = []

    def reserve(bundles: list[dict[str, float]], strategy: str) -> Any:
        selector = spec.options.get("label_selector")
        more = {"bundle_label_selector": [selector] * len(bundles)} if selector else {}
        group = placement_group(bundles, strategy=strategy, **more)
        groups.append(group)
        # Recorded before the wait for machines, so that a stop during the wait releases them.
        ray.get(registry.add_placement_group.remote(spec.job_id, group))
        ray.get(group.ready())
        return group

    if not ray.get(registry.leader_started.remote(spec.job_id)):
        return
    try:
        # Raises at the first failure; the `finally` below then ends the other members with their machines.
        ray.get(_start_members(spec, registry, work, _reserve_machines(spec, reserve)))
    except RayError as error:
        if is_user_error(error):
            raise classify_failure(spec, registry, carried(error)) from None
        raise RetryableError(None, carried(error).text) from None  # a process or a machine was lost
    finally:
        for group in groups:
            remove_placement_group(group)


def _reserve_machines(spec: RayJobSpec, reserve: Callable[[list[dict[str, float]], str], Any]) -> Any:
    """Return the placement group with a bundle for each member; each on its own machine if there are enough."""
    each = bundle(spec.options)
    if spec.slices is None:
        return reserve([each] * spec.replicas, "SPREAD")
    # First a whole slice by its head resource, then its VMs by name: two gangs never hold halves of the same slices.
    heads = reserve(tpu.head_bundles(spec.slices), "SPREAD")
    return reserve(tpu.vm_bundles(spec.slices, tpu.names_of_slices(heads), each), "PACK")


def _start_members(spec: RayJobSpec, registry: Any, work: list[Any], group: Any) -> list[Any]:
    host, port = ray.get(_in_bundle(ray.remote(_coordinator_address), group, 0, {"num_cpus": 0}).remote())
    # The label selector is applied to the bundles, when the machines are reserved.
    options = {name: value for name, value in spec.options.items() if name not in ("label_selector", "name")}
    body = ray.remote(max_calls=1)(run_job) if spec.own_process else ray.remote(run_job)
    return [
        _in_bundle(body, group, rank, options | {"max_retries": 0}).remote(
            spec, registry, work, Member(rank, _variables(spec, rank, host, port))
        )
        for rank in range(spec.replicas)
    ]


def _in_bundle(function: Any, group: Any, index: int, options: dict[str, Any]) -> Any:
    return function.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index), **options)


def _coordinator_address() -> tuple[str, int]:
    """Return an address of the first member's machine, and a port that is free there at this moment."""
    with socket.socket() as listener:
        # Free at this moment only: another program may take it before the members listen.
        listener.bind(("", 0))
        return untyped.util.get_node_ip_address(), int(listener.getsockname()[1])


def _variables(spec: RayJobSpec, rank: int, host: str, port: int) -> dict[str, str]:
    """Return the environment variables of a member: those that Fray sets on its own clusters, and PyTorch's names."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(spec.replicas)}
    fray = {f"FRAY_{name}": value for name, value in own.items()} | {"FRAY_COORDINATOR_ADDRESS": f"{host}:{port}"}
    slices = tpu.variables(spec.slices, rank, host) if spec.slices else {}
    return fray | own | {"MASTER_ADDR": host, "MASTER_PORT": str(port)} | slices
