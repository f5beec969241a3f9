"""Scopes that fail, are cancelled or abandoned; families of jobs."""

from __future__ import annotations

import random
from collections.abc import Mapping

import trio
from attrs import evolve

from fray import EndReason, ResourceConfig
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    OperationContext,
    booms,
    launch,
    value_of,
)
from tests.simulation.workloads import (
    Boom,
    Child,
    Counter,
    request,
)


async def failing_scope(b: OperationContext) -> str:
    """One child fails: its error comes up with its type, its siblings are ended."""
    siblings = [f"{b.token}.{number}" for number in range(b.rng.randint(1, 3))]
    bad, text = f"{b.token}.bad", "no error"
    try:
        async with b.cluster.open_scope(b.token) as scope:
            b.op("open_scope")
            jobs = [await launch(b, scope, request(name, workloads.linger, name, 0.2)) for name in siblings]
            b.op("launch")
            jobs.append(await scope.launch(request(bad, workloads.fail, bad, b.rng.uniform(0, 4))))
            b.accepted(jobs[-1])
        b.check("P2", False, f"scope {b.token} ended without the error of its child")
    except* Boom as group:
        b.check("P2", booms(group) == {bad}, f"scope {b.token} raised {booms(group)}")
        text = "the child's error"
    finally:
        b.doomed(bad, *siblings)
    return text


async def cancelled_scope(b: OperationContext) -> str:
    """A scope that is cancelled ends its children."""
    names = [f"{b.token}.{number}" for number in range(b.rng.randint(1, 3))]
    cleanup_s = b.rng.choice((0.0, 0.1, 1.0, 8.0))
    with trio.move_on_after(b.rng.uniform(0.01, 6)):
        async with b.cluster.open_scope(b.token) as scope:
            b.op("open_scope")
            for name in names:
                await launch(b, scope, request(name, workloads.linger, name, cleanup_s))
            if b.rng.random() < 0.5:
                names.append(f"{b.token}.actor")
                b.op("create_actor")
                await scope.create_actor(Counter, name=names[-1])
            await trio.sleep_forever()
    b.doomed(*names)
    return f"{len(names)} children ended"


async def error_in_body(b: OperationContext) -> str:
    """An error of the body ends the children and is raised alone."""
    name = f"{b.token}.child"
    try:
        async with b.cluster.open_scope(b.token) as scope:
            await launch(b, scope, request(name, workloads.linger, name, 0.1))
            await trio.sleep(b.rng.uniform(0, 2))
            raise Boom(b.token)
    except* Boom as group:
        b.check("P2", booms(group) == {b.token}, f"scope {b.token} raised {booms(group)}")
    b.doomed(name)
    return "the body's error"


def _draw_child(rng: random.Random, token: str, depth: int) -> Child:
    count = rng.randint(1, 2) if depth else 0
    children = tuple(_draw_child(rng, f"{token}.{number}", depth - rng.randint(1, depth)) for number in range(count))
    return Child(token, rng.randrange(100), rng.uniform(0, 4), rng.random() < 0.1, children)


async def family(b: OperationContext) -> str:
    """A job whose children have children."""
    top = _draw_child(b.rng, b.token, 2)
    text = ""
    try:
        async with b.cluster.open_scope(b.token) as scope:
            job = await launch(b, scope, request(b.token, workloads.family, top))
            text = await value_of(b, job, top.total(), b.token)
        b.check("P2", not list(top.booms()), f"{b.token} succeeded although {list(top.booms())} failed")
    except* Boom as group:
        wrong = booms(group) - set(top.booms())
        b.check("P2", not wrong, f"{b.token} raised {wrong}, which did not fail")
        text = f"errors of {len(booms(group))} descendants"
    finally:
        b.doomed(*top.tokens())
    return text


async def lent_cpus(b: OperationContext) -> str:
    """A job waits for one that needs as much as it has: that runs on the CPUs of the one that waits."""
    resources, value = ResourceConfig.with_cpu(cpu=1.5, memory="100MB"), b.rng.randrange(100)
    wanted = request(
        b.token, workloads.wait_for_one_below, b.token, value, b.rng.uniform(0, 4), resources, resources=resources
    )
    job = await launch(b, b.cluster, evolve(wanted, wait_limit_s=20.0))
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    b.doomed(f"{b.token}.below")
    if info.cause is EndReason.UNSCHEDULABLE:
        return "no room in time"
    return await value_of(b, job, value, b.token)


async def abandoned_launch(b: OperationContext) -> str:
    """A launch that is cancelled half-way leaves nothing."""
    with trio.move_on_after(b.rng.choice((0.0005, 0.002, 0.01, 0.05))):
        async with b.cluster.open_scope(b.token) as scope:
            b.op("launch")
            await scope.launch(request(b.token, workloads.linger, b.token, 0.0))
            await trio.sleep_forever()
    b.doomed(b.token)
    return "abandoned"


ACTS: Mapping[str, Act] = {
    "failing scope": failing_scope,
    "family": family,
    "lent CPUs": lent_cpus,
    "cancelled scope": cancelled_scope,
    "error in the body": error_in_body,
    "abandoned launch": abandoned_launch,
}
