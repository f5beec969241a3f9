"""Lines of jobs that print: each is read once and in order, or is missing with a word; none is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fray import Entrypoint, Job, JobRequest, LogLine, LogLineKind
from fray.model.ids import AttemptId
from tests.simulation.operations.context import Act, OperationContext, launch
from tests.simulation.workloads import SMALL


def chatter(b: OperationContext, seconds: float) -> JobRequest:
    """A program that prints (`fray.testing.fakes`)."""
    code = b.rng.choice((0, 0, 0, 3))
    argv = Entrypoint.from_binary("chatter", [f"{seconds:.3f}", str(code)])
    return JobRequest(name=b.token, resources=SMALL, entrypoint=argv, max_retries_failure=b.rng.choice((0, 1)))


async def followed_job(b: OperationContext) -> str:
    """Follow a job from its launch to its end, and then read all of its lines once more."""
    job = await launch(b, b.cluster, chatter(b, b.rng.uniform(1, 40)))
    b.op("follow logs")
    heard = [line async for line in job.logs(follow=True)]
    account(b, heard, {})
    b.saw(await job.wait_ended())
    return f"{len(heard)} lines live, {await _read_all(b, job)} after"


async def late_reader(b: OperationContext) -> str:
    """Read the last lines of a running job, and all of its lines after its end."""
    job = await launch(b, b.cluster, chatter(b, b.rng.uniform(1, 20)))
    await job.wait_running()
    b.op("read logs")
    heard = [line async for line in job.logs(tail=5)]
    b.check("P10", len(heard) <= 5 + len({line.attempt_id for line in heard}), f"{b.token}: a tail of {len(heard)}")
    account(b, heard, {})
    b.saw(await job.wait_ended())
    return f"{len(heard)} lines of its tail, {await _read_all(b, job)} after"


async def _read_all(b: OperationContext, job: Job) -> int:
    printed = b.printed(job.id)  # by attempts that are surely over
    b.op("read logs")
    heard = [line async for line in job.logs()]
    account(b, heard, printed)
    return len(heard)


def account(b: OperationContext, heard: Sequence[LogLine], printed: Mapping[AttemptId, int]) -> None:
    """Check that no line is repeated, out of order or changed; return, for each attempt, what is neither read nor
    reported missing."""
    places: dict[AttemptId, int] = {}
    is_open: set[AttemptId] = set()
    for line in heard:
        at = places.get(line.attempt_id)
        if line.kind is LogLineKind.GAP:
            if line.lost is None:
                is_open.add(line.attempt_id)
            places[line.attempt_id] = line.number + (line.lost or 0)
            continue
        expected = f"{line.attempt_id} {line.number}"
        b.check("P10", line.text == expected, f"line {line.number} of {line.attempt_id} is {line.text!r}")
        in_order = at is None or line.number == at or (line.number > at and line.attempt_id in is_open)
        b.check("P10", in_order, f"{line.attempt_id}: line {line.number} where {at} should be")
        places[line.attempt_id] = line.number + 1
    for attempt, count in printed.items():
        whole = attempt in is_open or places.get(attempt, 0) >= count
        b.check("P10", whole, f"{attempt} has printed {count} lines, and {places.get(attempt, 0)} are accounted for")


ACTS: Mapping[str, Act] = {"followed job": followed_job, "late reader": late_reader}
