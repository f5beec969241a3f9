"""Looking around, and asking for what cannot be."""

from __future__ import annotations

from collections.abc import Mapping

from fray import (
    NameTaken,
    NotPicklable,
)
from fray.testing import errands
from fray.testing.acts.bench import Act, Bench
from fray.testing.errands import Counter, request


async def look_around(b: Bench) -> str:
    """Whatever can be asked."""
    b.op("list")
    listed = await b.cluster.list_jobs()
    b.op("nodes")
    nodes = await b.cluster.nodes()
    if listed:
        job_id = b.rng.choice(listed).job_id
        b.op("explain")
        text = await b.cluster.explain(job_id)
        b.check("P2", bool(text), f"nothing explains {job_id}")
        b.op("story")
        await b.cluster.story(job_id)
        b.op("poll")
        await b.cluster.poll(job_id)
    return f"{len(listed)} jobs, {len(nodes)} nodes"


async def bad_requests(b: Bench) -> str:
    """What cannot be is refused, and nothing comes of it."""
    b.op("launch")
    try:
        await b.cluster.launch(request(b.token, errands.give, (number for number in [1])))
        b.check("P2", False, "a generator was accepted as an argument")
    except NotPicklable:
        pass
    async with b.cluster.open_scope(b.token) as scope:
        b.op("create_actor")
        await scope.create_actor(Counter, name=b.token)
        b.op("create_actor")
        try:
            await scope.create_actor(Counter, name=b.token)
            b.check("P2", False, f"the name {b.token} was given twice")
        except NameTaken:
            pass
    return "refused"


ACTS: Mapping[str, Act] = {
    "look around": look_around,
    "bad requests": bad_requests,
}
